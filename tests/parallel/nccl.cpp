// SPDX-License-Identifier: Apache-2.0
// What NCCL communicators do beyond those of any transport. One rank proves that NCCL itself runs;
// several need a GPU each.
#include <support/together.hpp>

#include <vpkl/divergence/plan.hpp>
#include <vpkl/parallel/process_grid.hpp>
#include <vpkl/rollout/greedy.hpp>

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <thread>
#include <utility>

namespace {

using namespace vpkl;
using namespace vpkl::test;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

ncclUniqueId shared_id(Communicator const& host) {
  ncclUniqueId id{};
  if (host.rank() == 0) {
    EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  }
  Kokkos::DefaultHostExecutionSpace const exec;
  host.broadcast(exec, &id, sizeof id, 0);
  return id;
}

struct Fill {
  Kokkos::View<float*, Kokkos::Cuda> data;
  int ranks, rank;
  KOKKOS_FUNCTION void operator()(int) const {
    data(rank) = static_cast<float>(rank);
    for (int i = 0; i < 3; ++i)
      data(ranks + i) = static_cast<float>(rank + 1);
  }
};

/// A blocking communicator, as a framework would own it.
class Foreign {
 public:
  explicit Foreign(Communicator const& host) {
    ncclUniqueId const id = shared_id(host);
    EXPECT_EQ(ncclCommInitRank(&comm, host.size(), id, host.rank()), ncclSuccess);
  }
  ~Foreign() {
    if (comm) ncclCommDestroy(comm);
  }
  void abort() { EXPECT_EQ(ncclCommAbort(std::exchange(comm, nullptr)), ncclSuccess); }
  Foreign(Foreign const&) = delete;
  Foreign& operator=(Foreign const&) = delete;
  ncclComm_t comm = nullptr;
};

class Nccl : public testing::Test {
 protected:
  void SetUp() override {
    std::string const why = why_no_nccl();
    if (!why.empty()) GTEST_SKIP() << why;
    host.set_timeout(seconds(30));
  }

  /// Enqueues all four collectives between device work of `comm`'s ranks.
  void carries(Communicator const& comm) {
    int const ranks = comm.size(), rank = comm.rank();
    auto const before = comm.counters();
    std::int64_t const waits = vpkl::impl::host_waits;
    Kokkos::View<float*, Kokkos::Cuda> data("vpkl_test::data", ranks + 3);
    Kokkos::parallel_for("vpkl_test::fill", Kokkos::RangePolicy<Kokkos::Cuda>(exec, 0, 1),
                         Fill{data, ranks, rank});
    comm.all_gather(exec, data.data() + rank, data.data(), sizeof(float));
    comm.all_reduce_sum(exec, data.data() + ranks, 1);
    comm.all_reduce_max(exec, data.data() + ranks + 1, 1);
    comm.broadcast(exec, data.data() + ranks + 2, sizeof(float), ranks - 1);
    EXPECT_EQ(vpkl::impl::host_waits, waits) << "a collective waited";
    comm.wait(exec);
    auto const got = to_host(data);
    for (int r = 0; r < ranks; ++r)
      EXPECT_EQ(got[r], static_cast<float>(r));
    EXPECT_EQ(got[ranks], static_cast<float>(ranks * (ranks + 1) / 2));
    EXPECT_EQ(got[ranks + 1], static_cast<float>(ranks));
    EXPECT_EQ(got[ranks + 2], static_cast<float>(ranks));
    EXPECT_EQ(comm.counters().device_collectives - before.device_collectives, 4);

    std::vector<int> records(static_cast<std::size_t>(ranks));
    comm.exchange_record(&rank, records.data(), sizeof rank);
    for (int r = 0; r < ranks; ++r)
      EXPECT_EQ(records[r], r);
  }

  static std::vector<float> to_host(Kokkos::View<float*, Kokkos::Cuda> const& data) {
    auto const mirror = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), data);
    return {mirror.data(), mirror.data() + mirror.size()};
  }

  /// One rank stays away from a collective; the others give up in time, and their stream ends.
  void survives_a_missing_rank(Communicator comm) {
    if (comm.size() == 1) GTEST_SKIP() << "needs two ranks";
    auto const start = Clock::now();
    comm.set_timeout(seconds(2));
    Kokkos::View<float*, Kokkos::Cuda> data("vpkl_test::data", 1 << 20);
    if (comm.rank() == comm.size() - 1) {
      std::this_thread::sleep_for(seconds(4));
    } else {
      try {
        comm.all_reduce_sum(exec, data.data(), 1 << 20);
        comm.wait(exec);
        ADD_FAILURE() << "expected CommunicationError";
      } catch (CommunicationError const& error) {
        EXPECT_NE(std::string(error.what()).find("2000 ms"), std::string::npos) << error.what();
      }
      EXPECT_FALSE(comm.alive());
      EXPECT_THROW(comm.all_reduce_sum(exec, data.data(), 1), CommunicationError);
      exec.fence("vpkl_test::aborted");
    }
    EXPECT_LT(Clock::now() - start, seconds(10));
    // The ranks meet again before the late one destroys what the others have aborted.
    all_of(host, true);
  }

  VocabShard four_columns() const {
    VocabShard::Spec spec;
    spec.vocabulary = 4 * host.size();
    spec.begin = 4 * host.rank();
    spec.end = spec.begin + 4;
    spec.student_width = spec.teacher_width = 4;
    return VocabShard::make(host, spec);
  }

  /// One rank stays away from a `call` over the caller's communicator, which only the caller can
  /// abort: the others must get their error before that.
  template <class F>
  void reports_a_missing_rank(F&& call) {
    if (host.size() == 1) GTEST_SKIP() << "needs two ranks";
    Foreign foreign(host);
    Communicator comm = Communicator::nccl(foreign.comm);
    carries(comm);
    auto const start = Clock::now();
    comm.set_timeout(seconds(2));
    if (comm.rank() == comm.size() - 1)
      std::this_thread::sleep_for(seconds(4));
    else
      EXPECT_THROW(call(comm), CommunicationError);
    EXPECT_LT(Clock::now() - start, seconds(10));
    foreign.abort();
    exec.fence("vpkl_test::aborted");
    all_of(host, true);
  }

  Kokkos::Cuda exec;
  Communicator host =
#ifdef VPKL_ENABLE_MPI
      Communicator::mpi(MPI_COMM_WORLD);
#else
      Communicator::self();
#endif
};

TEST_F(Nccl, over_another_communicator) {
  host.set_timeout(seconds(20));
  Communicator const comm = Communicator::nccl(host);
  EXPECT_STREQ(comm.transport_name(), "nccl");
  EXPECT_EQ(comm.rank(), host.rank());
  EXPECT_EQ(comm.size(), host.size());
  EXPECT_EQ(comm.timeout(), seconds(20));
  auto const before = host.counters();
  carries(comm);
  // Records go over a duplicate, so the bootstrap may be used and dropped meanwhile.
  EXPECT_EQ(host.counters().records, before.records);
}

TEST_F(Nccl, from_a_unique_id) {
  Communicator const comm =
      Communicator::nccl(shared_id(host), host.rank(), host.size(), seconds(20));
  EXPECT_EQ(comm.timeout(), seconds(20));
  carries(comm);
  Kokkos::DefaultHostExecutionSpace const here;
  float value = static_cast<float>(comm.rank()), largest = value;
  comm.all_reduce_sum(here, &value, 1);
  comm.all_reduce_max(here, &largest, 1);
  EXPECT_EQ(value, static_cast<float>(comm.size() * (comm.size() - 1) / 2));
  EXPECT_EQ(largest, static_cast<float>(comm.size() - 1));
}

TEST_F(Nccl, from_the_callers_communicator) {
  Foreign const foreign(host);
  {
    Communicator const comm = Communicator::nccl(foreign.comm);
    EXPECT_EQ(comm.rank(), host.rank());
    EXPECT_EQ(comm.size(), host.size());
    carries(comm);
    carries(comm.split(0, -comm.rank()));
  }
  // It is still the caller's, and works.
  carries(Communicator::nccl(foreign.comm));
}

TEST_F(Nccl, splits_into_grids) {
  ProcessGrid const grid(Communicator::nccl(host), host.size(), 1);
  if (host.size() > 1) {
    EXPECT_STREQ(grid.tensor_parallel().transport_name(), "nccl");
  }
  Communicator const reversed = grid.world().split(0, -host.rank());
  EXPECT_EQ(reversed.rank(), host.size() - 1 - host.rank());
  carries(reversed);
  Communicator const alone = grid.world().split(host.rank(), 0);
  EXPECT_EQ(alone.size(), 1);
  carries(alone);
}

TEST_F(Nccl, refuses_what_it_cannot_use) {
  EXPECT_THROW(Communicator::nccl(static_cast<ncclComm_t>(nullptr)), InvalidArgument);
  ncclUniqueId id{};
  EXPECT_THROW(Communicator::nccl(id, 0, 0), InvalidArgument);
  EXPECT_THROW(Communicator::nccl(id, 2, 2), InvalidArgument);
  EXPECT_THROW(Communicator::nccl(id, -1, 2), InvalidArgument);
  EXPECT_THROW(Communicator::nccl(id, 0, 1, milliseconds(0)), InvalidArgument);
}

TEST_F(Nccl, refuses_a_second_copy_of_nccl) {
  std::string const path =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "libnccl.so";
  void* const second = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(second, nullptr) << dlerror();
  expect_all_throw<Error>(host, [&] { Communicator::nccl(host); }, {path, "expected one copy"});
  dlclose(second);
  EXPECT_NO_THROW(Communicator::nccl(host));
}

// Connections are made at first use: the host waits in the call itself.
TEST_F(Nccl, a_rank_that_misses_the_first_collective) {
  survives_a_missing_rank(Communicator::nccl(host));
}

TEST_F(Nccl, a_rank_that_misses_a_later_collective) {
  Communicator const comm = Communicator::nccl(host);
  carries(comm);
  Kokkos::View<float*, Kokkos::Cuda> data("vpkl_test::data", 1 << 20);
  comm.all_reduce_sum(exec, data.data(), 1 << 20);
  comm.wait(exec);
  survives_a_missing_rank(comm);
}

// What the call owns on the device cannot be freed yet.
TEST_F(Nccl, greedy_tokens_over_the_callers_communicator_without_a_rank) {
  Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::Cuda> logits("vpkl_test::logits", 3, 4);
  VocabShard const shard = four_columns();
  reports_a_missing_rank(
      [&](Communicator const& comm) { greedy_tokens(exec, comm, shard, const_rows(logits)); });
}

TEST_F(Nccl, a_plan_over_the_callers_communicator_without_a_rank) {
  VocabShard const shard = four_columns();
  DivergencePlan<Kokkos::Cuda>::Options options;
  options.max_rows = 3;
  reports_a_missing_rank(
      [&](Communicator const& comm) { DivergencePlan<Kokkos::Cuda>(exec, comm, shard, options); });
}

// Its communicator goes with the stack; the others are not told, and end all the same.
TEST_F(Nccl, a_rank_that_throws) {
  if (host.size() == 1) GTEST_SKIP() << "needs two ranks";
  auto const start = Clock::now();
  bool const thrower = host.rank() == 0;
  Kokkos::View<float*, Kokkos::Cuda> data("vpkl_test::data", 1000);
  auto const work = [&] {
    Communicator comm = Communicator::nccl(host);
    comm.set_timeout(seconds(2));
    comm.all_reduce_sum(exec, data.data(), 1000);
    comm.wait(exec);
    if (thrower) throw InvalidArgument("of one rank alone");
    comm.all_reduce_sum(exec, data.data(), 1000);
    comm.wait(exec);
  };
  if (thrower)
    EXPECT_THROW(work(), InvalidArgument);
  else
    EXPECT_THROW(work(), CommunicationError);
  exec.fence("vpkl_test::ended");
  EXPECT_LT(Clock::now() - start, seconds(10));
  all_of(host, true);
}

TEST_F(Nccl, records_without_a_bootstrap_have_a_deadline) {
  if (host.size() == 1) GTEST_SKIP() << "needs two ranks";
  Communicator comm = Communicator::nccl(shared_id(host), host.rank(), host.size(), seconds(20));
  Agreement("warm").equal("x", 1).exchange(comm);
  auto const start = Clock::now();
  comm.set_timeout(seconds(2));
  if (comm.rank() == 0)
    std::this_thread::sleep_for(seconds(4));
  else
    EXPECT_THROW(Agreement("early").equal("x", 1).exchange(comm), CommunicationError);
  EXPECT_EQ(comm.alive(), comm.rank() == 0);
  EXPECT_LT(Clock::now() - start, seconds(10));
  all_of(host, true);
}

TEST_F(Nccl, a_rank_that_is_not_there_when_it_is_made) {
  if (host.size() == 1) GTEST_SKIP() << "needs two ranks";
  ncclUniqueId const id = shared_id(host);
  auto const start = Clock::now();
  if (host.rank() == 0)
    EXPECT_THROW(Communicator::nccl(id, 0, host.size(), seconds(2)), CommunicationError);
  EXPECT_LT(Clock::now() - start, seconds(10));
  all_of(host, true);
}

// Many more collectives than a driver's queue has room for, behind one that waits.
TEST_F(Nccl, the_host_does_not_run_away) {
  Communicator const comm = Communicator::nccl(host);
  Kokkos::View<float*, Kokkos::Cuda> data("vpkl_test::data", 1);
  Kokkos::deep_copy(data, 1.0f);
  for (int i = 0; i < 3000; ++i)
    comm.all_reduce_max(exec, data.data(), 1);
  comm.wait(exec);
  EXPECT_EQ(to_host(data)[0], 1.0f);
}

TEST(NcclSharedGpu, is_refused_by_all_ranks) {
#ifdef VPKL_ENABLE_MPI
  Communicator host = Communicator::mpi(MPI_COMM_WORLD);
  if (why_no_nccl().empty()) GTEST_SKIP() << "every rank has a GPU of its own";
  expect_all_throw<InvalidArgument>(host, [&] { Communicator::nccl(host); }, {"share a GPU"});
  EXPECT_TRUE(host.alive());
#endif
}

}  // namespace
