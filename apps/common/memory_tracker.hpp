// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief High-water mark of Kokkos allocations, by listening to Kokkos Tools.
#pragma once

#include <cstdint>

namespace vpkl::apps {

/// Counts bytes allocated through Kokkos in the default execution space's memory, apart from the
/// teacher cache (which is reported by itself). Install once, after Kokkos::initialize.
class MemoryTracker {
 public:
  static void install();
  /// \brief Forgets the high-water mark: it becomes what is allocated now.
  static void reset_peak();
  static std::int64_t peak_bytes();
  static std::int64_t current_bytes();
};

}  // namespace vpkl::apps
