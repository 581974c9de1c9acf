// SPDX-License-Identifier: Apache-2.0
// What tests run on: execution spaces, communicators, floating-point traps, random numbers.
#pragma once

#include <vpkl/core/kokkos.hpp>
#include <vpkl/parallel/communicator.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>

namespace vpkl::test {

namespace impl {

template <class Tuple>
struct AsTypes;
template <class First, class... Rest>
struct AsTypes<std::tuple<First, Rest...>> {
  using type = testing::Types<Rest...>;
};

}  // namespace impl

#define VPKL_TEST_LIST_SPACE(Exec) , Exec
using ExecutionSpaces =
    impl::AsTypes<std::tuple<void VPKL_FOREACH_EXECUTION_SPACE(VPKL_TEST_LIST_SPACE)>>::type;
#undef VPKL_TEST_LIST_SPACE

struct SpaceNames {
  template <class Exec>
  static std::string GetName(int) {
    return Exec::name();
  }
};

/// \brief Collective. A communicator over all ranks of the run: MPI's, or with
/// VPKL_TEST_TRANSPORT=nccl NCCL's, which tests share.
Communicator world();

/// \brief VPKL_TEST_TRANSPORT is nccl.
bool wants_nccl();

/// \brief Collective. Why these ranks cannot have an NCCL communicator; empty where they can.
std::string why_no_nccl();

/// \brief All ranks hold `mine` of rank 0. Collective.
std::uint64_t same_on_all_ranks(Communicator const& comm, std::uint64_t mine);

/// \brief True on every rank if `mine` is true on every rank. Collective.
bool all_of(Communicator const& comm, bool mine);

/// Makes invalid operations (0/0, inf - inf, comparisons with NaN) fatal on all threads while it
/// lives, where the C library can.
class FloatingPointTraps {
 public:
  FloatingPointTraps();
  ~FloatingPointTraps();
  FloatingPointTraps(FloatingPointTraps const&) = delete;
  FloatingPointTraps& operator=(FloatingPointTraps const&) = delete;
};

using Random = std::mt19937_64;

/// \brief Uniform integer in [low, high]; unlike the standard distributions the same everywhere.
inline std::int64_t uniform(Random& random, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
}

/// \brief Uniform number in [low, high).
inline double uniform_real(Random& random, double low, double high) {
  return low + (high - low) * (static_cast<double>(random() >> 11) * 0x1p-53);
}

/// \brief Standard normal number.
double normal(Random& random);

/// \brief VPKL_FUZZ_SEED or a fresh seed, the same on every rank, printed by rank 0.
std::uint64_t fuzz_seed(Communicator const& comm);

/// \brief VPKL_FUZZ_ITERATIONS or `otherwise`.
std::int64_t fuzz_iterations(std::int64_t otherwise);

}  // namespace vpkl::test
