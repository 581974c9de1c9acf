// SPDX-License-Identifier: Apache-2.0
#include "memory_tracker.hpp"

#include <Kokkos_Core.hpp>

#include <atomic>
#include <cstring>

namespace vpkl::apps {

namespace {

std::atomic<std::int64_t> current{0}, peak{0};

bool counted(Kokkos::Profiling::SpaceHandle space, char const* label) {
  using Memory = Kokkos::DefaultExecutionSpace::memory_space;
  return std::strcmp(space.name, Memory::name()) == 0 &&
         std::strcmp(label, "vpkl::TeacherCache::rows") != 0;
}

void allocated(Kokkos::Profiling::SpaceHandle space, char const* label, void const*,
               std::uint64_t bytes) {
  if (!counted(space, label)) return;
  std::int64_t const now = current += static_cast<std::int64_t>(bytes);
  std::int64_t before = peak;
  while (before < now && !peak.compare_exchange_weak(before, now)) {
  }
}

void freed(Kokkos::Profiling::SpaceHandle space, char const* label, void const*,
           std::uint64_t bytes) {
  if (counted(space, label)) current -= static_cast<std::int64_t>(bytes);
}

}  // namespace

void MemoryTracker::install() {
  Kokkos::Tools::Experimental::set_allocate_data_callback(&allocated);
  Kokkos::Tools::Experimental::set_deallocate_data_callback(&freed);
}

void MemoryTracker::reset_peak() { peak = current.load(); }
std::int64_t MemoryTracker::peak_bytes() { return peak; }
std::int64_t MemoryTracker::current_bytes() { return current; }

}  // namespace vpkl::apps
