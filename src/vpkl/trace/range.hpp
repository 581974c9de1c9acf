// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Named ranges for profilers: Kokkos profiling regions and NVTX, each where it is enabled.
#pragma once

#include <vpkl/config.hpp>

#include <cstdint>

namespace vpkl::trace {

/// What a range covers. Each is a registered NVTX string of domain `vpkl` and, prefixed `vpkl::`,
/// a Kokkos profiling region. Beside it what the range's payload counts.
enum class Phase : std::uint32_t {
  rollout,     ///< token selection: rows
  teacher,     ///< the teacher's logits of a micro-batch: rows
  store,       ///< into the cache: bytes
  fetch,       ///< out of the cache or a file: bytes
  statistics,  ///< first read of a shard: rows
  combine,     ///< exchange between ranks: rows
  gradient,    ///< value and gradient: rows
  update,      ///< a whole update: its number
  chunk,       ///< a chunk of the streamed loss, its fetch and its compute each: its number
};

/// NVTX category of a range; `phase` is for steps made of others.
enum class Category : std::uint32_t { cache = 1, kernel = 2, comm = 3, io = 4, phase = 5 };

/// \brief The phase's name as profilers show it.
char const* to_string(Phase phase);

/// Opens a range on construction and closes it on destruction, also when an exception leaves the
/// scope. Ranges nest within a thread. Nothing is left of it where both VPKL_ENABLE_NVTX and
/// VPKL_ENABLE_KOKKOS_REGIONS are off.
class Range {
 public:
#if defined(VPKL_ENABLE_NVTX) || defined(VPKL_ENABLE_KOKKOS_REGIONS)
  /// \param[in] payload what the phase says: bytes, rows or a number; shown by NVTX tools
  Range(Phase phase, Category category, std::int64_t payload);
  ~Range();
#else
  Range(Phase, Category, std::int64_t) {}  ///< both are off
  // Not defaulted, so that a range nobody reads is no unused variable.
  ~Range() {}
#endif
  Range(Range const&) = delete;
  Range& operator=(Range const&) = delete;
};

}  // namespace vpkl::trace
