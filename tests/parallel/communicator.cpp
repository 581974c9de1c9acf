// SPDX-License-Identifier: Apache-2.0
#include <support/together.hpp>

#include <gtest/gtest.h>

#include <vector>

namespace {

using namespace vpkl;
using namespace vpkl::test;

template <class Exec>
class Comm : public CollectiveTest<Exec> {
 protected:
  using Memory = typename Exec::memory_space;
  using Bytes = Kokkos::View<unsigned char*, Memory>;

  static unsigned char pattern(int rank, std::size_t i) {
    return static_cast<unsigned char>(rank * 31 + static_cast<int>(i % 251));
  }

  void gathers(std::size_t bytes, bool in_place) {
    int const ranks = this->comm.size(), rank = this->comm.rank();
    Bytes gathered("vpkl_test::gathered", bytes * static_cast<std::size_t>(ranks));
    Bytes const local =
        in_place
            ? Bytes(Kokkos::subview(gathered, std::make_pair(bytes * rank, bytes * (rank + 1))))
            : Bytes("vpkl_test::local", bytes);
    auto const mine = Kokkos::create_mirror_view(local);
    for (std::size_t i = 0; i < bytes; ++i)
      mine(i) = pattern(rank, i);
    Kokkos::deep_copy(local, mine);
    this->comm.all_gather(this->exec, local.data(), gathered.data(), bytes);
    this->comm.wait(this->exec);
    auto const all = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), gathered);
    for (int r = 0; r < ranks; ++r)
      for (std::size_t i = 0; i < bytes; ++i)
        ASSERT_EQ(all(bytes * static_cast<std::size_t>(r) + i), pattern(r, i))
            << bytes << " bytes, byte " << i << " of rank " << r;
  }
};
TYPED_TEST_SUITE(Comm, ExecutionSpaces, SpaceNames);

TYPED_TEST(Comm, all_gather_keeps_rank_order) {
  // Below, at and above the size that goes through buffers of the transport's own.
  for (std::size_t bytes : {0, 1, 3, 32, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20})
    for (bool in_place : {false, true})
      this->gathers(bytes, in_place);
}

TYPED_TEST(Comm, all_reduce_sums_in_place) {
  for (std::int64_t count : {0, 1, 1000, 300001}) {
    Kokkos::View<float*, typename TypeParam::memory_space> data("vpkl_test::data", count);
    auto const host = Kokkos::create_mirror_view(data);
    for (std::int64_t i = 0; i < count; ++i)
      host(i) = static_cast<float>(i % 1000 + this->comm.rank());
    Kokkos::deep_copy(data, host);
    this->comm.all_reduce_sum(this->exec, data.data(), count);
    this->comm.wait(this->exec);
    Kokkos::deep_copy(host, data);
    int const n = this->comm.size();
    for (std::int64_t i = 0; i < count; ++i)
      ASSERT_EQ(host(i), static_cast<float>(i % 1000 * n + n * (n - 1) / 2));
  }
}

TYPED_TEST(Comm, all_reduce_takes_the_maximum) {
  std::int64_t const count = 300001;
  int const n = this->comm.size();
  Kokkos::View<float*, typename TypeParam::memory_space> data("vpkl_test::data", count);
  auto const host = Kokkos::create_mirror_view(data);
  for (std::int64_t i = 0; i < count; ++i)
    host(i) = static_cast<float>((this->comm.rank() + i) % n) - 0.5f;
  Kokkos::deep_copy(data, host);
  this->comm.all_reduce_max(this->exec, data.data(), count);
  this->comm.wait(this->exec);
  Kokkos::deep_copy(host, data);
  for (std::int64_t i = 0; i < count; ++i)
    ASSERT_EQ(host(i), static_cast<float>(n) - 1.5f) << i;
}

TYPED_TEST(Comm, broadcast_from_every_rank) {
  using Bytes = typename TestFixture::Bytes;
  for (int root = 0; root < this->comm.size(); ++root)
    for (std::size_t bytes : {0, 1, 4097, (1 << 20) + 1}) {
      Bytes data("vpkl_test::data", bytes);
      auto const host = Kokkos::create_mirror_view(data);
      for (std::size_t i = 0; i < bytes; ++i)
        host(i) = this->pattern(this->comm.rank(), i);
      Kokkos::deep_copy(data, host);
      this->comm.broadcast(this->exec, data.data(), bytes, root);
      this->comm.wait(this->exec);
      Kokkos::deep_copy(host, data);
      for (std::size_t i = 0; i < bytes; ++i)
        ASSERT_EQ(host(i), this->pattern(root, i)) << bytes << " bytes of rank " << root;
    }
  EXPECT_THROW(this->comm.broadcast(this->exec, nullptr, 0, this->comm.size()), InvalidArgument);
  EXPECT_THROW(this->comm.broadcast(this->exec, nullptr, 0, -1), InvalidArgument);
}

TYPED_TEST(Comm, counts_what_it_carries) {
  auto const before = this->comm.counters();
  this->gathers(24, false);
  auto const after = this->comm.counters();
  EXPECT_EQ(after.all_gathers - before.all_gathers, 1);
  EXPECT_EQ(after.all_gather_bytes - before.all_gather_bytes, 24);
  EXPECT_EQ(after.records, before.records);
  bool const on_device = wants_nccl() && !vpkl::impl::is_host_space<TypeParam>;
  EXPECT_EQ(after.device_collectives - before.device_collectives, on_device ? 1 : 0);
}

using CommHost = CollectiveTest<Kokkos::DefaultHostExecutionSpace>;

TEST_F(CommHost, split_orders_by_key) {
  // Odd and even ranks, in reversed order.
  Communicator const part = comm.split(comm.rank() % 2, -comm.rank());
  int const members = (comm.size() + 1 - comm.rank() % 2) / 2;
  ASSERT_EQ(part.size(), members);
  EXPECT_EQ(part.rank(), members - 1 - comm.rank() / 2);
  EXPECT_EQ(part.timeout(), comm.timeout());
  auto const told = Agreement("part").tell("rank", comm.rank()).exchange(part);
  for (int r = 0; r < members; ++r)
    EXPECT_EQ(told[r][0], (members - 1 - r) * 2 + comm.rank() % 2);
}

TEST_F(CommHost, a_negative_color_is_refused_by_all) {
  for (int bad = 0; bad < comm.size(); ++bad)
    expect_all_throw<InvalidArgument>(comm, [&] { comm.split(comm.rank() == bad ? -1 : 0, 0); },
                                      {from_rank(comm, bad) + "split: color is -1"});
}

TEST(Self, is_a_group_of_one) {
  Communicator const self;
  EXPECT_EQ(self.rank(), 0);
  EXPECT_EQ(self.size(), 1);
  EXPECT_STREQ(self.transport_name(), "self");
  EXPECT_TRUE(self.alive());
  EXPECT_EQ(self.split(3, 4).size(), 1);
}

TEST(Communicator, refuses_what_it_cannot_be) {
  EXPECT_THROW(Communicator::from_transport(nullptr), InvalidArgument);
  Communicator self;
  EXPECT_THROW(self.set_timeout(std::chrono::milliseconds(0)), InvalidArgument);
  EXPECT_THROW(self.set_timeout(std::chrono::milliseconds(-5)), InvalidArgument);
#ifdef VPKL_ENABLE_MPI
  EXPECT_THROW(Communicator::mpi(MPI_COMM_NULL), InvalidArgument);
#endif
}

#ifdef VPKL_ENABLE_MPI
TEST(MpiCommunicator, outlives_the_callers_communicator) {
  MPI_Comm copy;
  MPI_Comm_dup(MPI_COMM_WORLD, &copy);
  Communicator const comm = Communicator::mpi(copy);
  MPI_Comm_free(&copy);
  EXPECT_STREQ(comm.transport_name(), "mpi");
  EXPECT_NO_THROW(Agreement("x").equal("x", 1).exchange(comm));
}
#endif

}  // namespace
