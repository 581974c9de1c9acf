// SPDX-License-Identifier: Apache-2.0
// The main of every test: MPI and Kokkos around GoogleTest. Only rank 0 prints, unless a test
// fails.
#include <support/environment.hpp>

#include <gtest/gtest.h>
#include <Kokkos_Core.hpp>

#include <cstdio>
#include <cstdlib>

#ifdef VPKL_ENABLE_MPI
#include <mpi.h>
#endif

namespace {

// A failed assertion on any rank, with the rank's number.
class RankPrinter : public testing::EmptyTestEventListener {
 public:
  explicit RankPrinter(int rank) : rank_(rank) {}
  void OnTestPartResult(testing::TestPartResult const& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "[rank %d] %s:%d: %s\n", rank_,
                 result.file_name() ? result.file_name() : "?", result.line_number(),
                 result.summary());
  }

 private:
  int rank_;
};

}  // namespace

// What CTest takes for "skipped".
constexpr int skipped = 77;

int main(int argc, char** argv) {
#ifdef VPKL_ENABLE_NCCL
  // A program that fails with multicast memory open may put the GPUs out of service for others.
  setenv("NCCL_NVLS_ENABLE", "0", 0);
#endif
  testing::InitGoogleTest(&argc, argv);
  int rank = 0;
#ifdef VPKL_ENABLE_MPI
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
#endif
  if (rank != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new RankPrinter(rank));
  }
  int failed;
  {
    Kokkos::initialize(argc, argv);
    std::string const why = vpkl::test::wants_nccl() ? vpkl::test::why_no_nccl() : "";
    if (why.empty()) {
      failed = RUN_ALL_TESTS();
    } else {
      failed = skipped;
      if (rank == 0) std::printf("[  SKIPPED ] all tests: %s\n", why.c_str());
    }
    Kokkos::finalize();
  }
#ifdef VPKL_ENABLE_MPI
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
#endif
  return failed;
}
