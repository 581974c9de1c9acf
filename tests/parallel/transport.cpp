// SPDX-License-Identifier: Apache-2.0
// A message layer of the caller's own: ranks are threads of this process.
#include <vpkl/core/error.hpp>
#include <vpkl/parallel/agreement.hpp>
#include <vpkl/vocab/shard.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using namespace vpkl;

/// Meeting point of `size` threads.
struct Meeting {
  explicit Meeting(int n) : size(n), messages(static_cast<std::size_t>(n)) {}
  int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::vector<unsigned char>> messages;
  int arrived = 0, left = 0;
  bool broken = false;

  std::vector<unsigned char> gather(int rank, void const* data, std::size_t bytes,
                                    std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex);
    auto const wait = [&](auto&& ready) {
      if (!changed.wait_for(lock, timeout, [&] { return broken || ready(); }) || broken) {
        broken = true;
        changed.notify_all();
        throw CommunicationError("a thread stayed away");
      }
    };
    wait([&] { return left == 0; });
    auto const* const p = static_cast<unsigned char const*>(data);
    messages[static_cast<std::size_t>(rank)].assign(p, p + bytes);
    ++arrived;
    changed.notify_all();
    wait([&] { return arrived == size; });
    std::vector<unsigned char> all;
    for (auto const& message : messages)
      all.insert(all.end(), message.begin(), message.end());
    if (++left == size) arrived = left = 0;
    changed.notify_all();
    return all;
  }
};

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Meeting> meeting, int rank)
      : meeting_(std::move(meeting)), rank_(rank) {}
  char const* name() const override { return "threads"; }
  int rank() const override { return rank_; }
  int size() const override { return meeting_->size; }
  void all_gather(void const* local, void* gathered, std::size_t bytes,
                  std::chrono::milliseconds timeout) override {
    auto const all = meeting_->gather(rank_, local, bytes, timeout);
    std::memcpy(gathered, all.data(), all.size());
  }
  std::unique_ptr<Transport> split(int, int) override { return nullptr; }

 private:
  std::shared_ptr<Meeting> meeting_;
  int rank_;
};

void on_ranks(int ranks, std::function<void(Communicator)> const& body) {
  auto const meeting = std::make_shared<Meeting>(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      auto comm = Communicator::from_transport(std::make_unique<ThreadTransport>(meeting, r));
      comm.set_timeout(std::chrono::seconds(10));
      body(comm);
    });
  for (std::thread& thread : threads)
    thread.join();
}

TEST(Transport, carries_agreement_and_shards) {
  on_ranks(4, [](Communicator comm) {
    EXPECT_STREQ(comm.transport_name(), "threads");
    auto const [begin, end] = even_range(1031, 4, comm.rank());
    VocabShard const shard =
        VocabShard::make(comm, {1031, begin, end, end - begin, end - begin, {}});
    EXPECT_EQ(shard.bounds().back(), 1031);
    try {
      Agreement("x").equal("numbers", comm.rank() == 2 ? 1 : 0).exchange(comm);
      ADD_FAILURE() << "expected AgreementError";
    } catch (AgreementError const& error) {
      EXPECT_STREQ(error.what(), "x: numbers differ: 0 on rank 0, 1 on rank 2");
    }
  });
}

TEST(Transport, reduces_and_broadcasts_with_nothing_but_an_all_gather) {
  on_ranks(3, [](Communicator comm) {
    Kokkos::DefaultHostExecutionSpace const exec;
    float const rank = static_cast<float>(comm.rank());
    float sums[] = {rank, 1}, largest[] = {-rank, rank}, copied[] = {rank, rank + 1};
    comm.all_reduce_sum(exec, sums, 2);
    comm.all_reduce_max(exec, largest, 2);
    comm.broadcast(exec, copied, sizeof copied, 1);
    EXPECT_EQ(sums[0], 3);
    EXPECT_EQ(sums[1], 3);
    EXPECT_EQ(largest[0], 0);
    EXPECT_EQ(largest[1], 2);
    EXPECT_EQ(copied[0], 1);
    EXPECT_EQ(copied[1], 2);
  });
}

TEST(Transport, a_failure_kills_the_communicator) {
  on_ranks(3, [](Communicator comm) {
    comm.set_timeout(std::chrono::milliseconds(300));
    if (comm.rank() == 1) return;
    EXPECT_THROW(Agreement("x").equal("x", 1).exchange(comm), CommunicationError);
    EXPECT_FALSE(comm.alive());
    EXPECT_THROW(Agreement("x").equal("x", 1).exchange(comm), CommunicationError);
  });
}

}  // namespace
