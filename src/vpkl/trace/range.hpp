// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Named ranges for profilers: Kokkos profiling regions and, when enabled, NVTX.
#pragma once

#include <cstdint>

namespace vpkl::trace {

/// What a range covers. Each is a registered NVTX string of domain `vpkl` and, prefixed `vpkl::`,
/// a Kokkos profiling region.
enum class Phase : std::uint32_t {
  rollout,
  teacher,
  store,
  fetch,
  statistics,
  combine,
  gradient,
  update,
};

/// NVTX category of a range.
enum class Category : std::uint32_t { cache = 1, kernel = 2, comm = 3, io = 4, phase = 5 };

/// \brief The phase's name as profilers show it.
char const* to_string(Phase phase);

/// Opens a range on construction and closes it on destruction, also when an exception leaves the
/// scope. Ranges nest within a thread.
class Range {
 public:
  /// \param[in] payload bytes or rows of the work, shown by NVTX tools
  Range(Phase phase, Category category, std::int64_t payload = 0);
  ~Range();
  Range(Range const&) = delete;
  Range& operator=(Range const&) = delete;
};

}  // namespace vpkl::trace
