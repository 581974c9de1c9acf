// SPDX-License-Identifier: Apache-2.0
#include <support/together.hpp>

#include <vpkl/parallel/process_grid.hpp>

#include <gtest/gtest.h>

namespace {

using namespace vpkl;
using namespace vpkl::test;

using Grid = CollectiveTest<Kokkos::DefaultHostExecutionSpace>;

TEST_F(Grid, arranges_ranks) {
  int const ranks = comm.size();
  for (int tensor = 1; tensor <= ranks; ++tensor) {
    if (ranks % tensor != 0) continue;
    int const data = ranks / tensor;
    ProcessGrid const grid(comm, tensor, data);
    EXPECT_EQ(grid.tensor_parallel().size(), tensor);
    EXPECT_EQ(grid.data_parallel().size(), data);
    EXPECT_EQ(grid.tensor_parallel_index(), comm.rank() % tensor);
    EXPECT_EQ(grid.data_parallel_index(), comm.rank() / tensor);
    // Groups of one never communicate.
    EXPECT_EQ(std::string(grid.tensor_parallel().transport_name()) == "self", tensor == 1);
    EXPECT_EQ(std::string(grid.data_parallel().transport_name()) == "self", data == 1);
    auto const told = Agreement("group").tell("rank", comm.rank()).exchange(grid.tensor_parallel());
    for (int r = 0; r < tensor; ++r)
      EXPECT_EQ(told[r][0], comm.rank() / tensor * tensor + r);
  }
}

TEST_F(Grid, sizes_that_do_not_fit_are_refused_by_all) {
  for (auto const& [tensor, data] :
       {std::pair{comm.size() + 1, 1}, {comm.size(), 2}, {0, 1}, {1, 0}, {-1, -comm.size()}})
    expect_all_throw<InvalidArgument>(
        comm, [&, t = tensor, d = data] { ProcessGrid(comm, t, d); },
        {"process grid is " + std::to_string(tensor), std::to_string(comm.size()) + " ranks"});
}

TEST_F(Grid, ranks_must_ask_for_the_same_grid) {
  if (comm.size() != 4) GTEST_SKIP() << "needs sizes with two factorisations";
  expect_all_throw<AgreementError>(
      comm, [&] { on_rank(3) ? ProcessGrid(comm, 4, 1) : ProcessGrid(comm, 2, 2); },
      {"tensor-parallel sizes differ: 2 on rank 0, 4 on rank 3"});
}

}  // namespace
