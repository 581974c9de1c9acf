// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Allocation with a typed error, and how much host memory there is.
#pragma once

#include <vpkl/core/error.hpp>
#include <vpkl/core/kokkos.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace vpkl {

/// \brief Bytes of host memory this process may still take: the least of the machine's available
/// memory and what is left of its control group's limit (versions 1 and 2).
std::size_t available_host_memory();

/// What the pool of pinned host memory holds.
struct PinnedMemoryUsage {
  std::size_t bytes = 0;         ///< pinned now
  std::size_t in_use = 0;        ///< of them with an owner
  std::size_t high_water = 0;    ///< most ever with an owner
  std::int64_t allocations = 0;  ///< times that memory was newly pinned
};

/// \brief State of the process's pinned pool; all zero in a build without CUDA.
PinnedMemoryUsage pinned_memory_usage();

namespace impl {

/// \brief Free bytes on the current CUDA device; 0 in a build without CUDA.
std::size_t available_device_memory();

[[noreturn]] void throw_out_of_memory(std::string const& label, std::size_t bytes, bool on_host);

/// \brief Uninitialised bytes.
/// \throws OutOfMemory with label, requested and available bytes
template <class ExecutionSpace>
ByteView<ExecutionSpace> allocate_bytes(ExecutionSpace const& exec, std::string const& label,
                                        std::size_t bytes) {
  if (is_host_space<ExecutionSpace> && bytes > available_host_memory())
    throw_out_of_memory(label, bytes, is_host_space<ExecutionSpace>);
  try {
    return ByteView<ExecutionSpace>(Kokkos::view_alloc(exec, label, Kokkos::WithoutInitializing),
                                    bytes);
  } catch (std::exception const&) {
    // Kokkos 3 throws a bad_alloc of its own, later versions a runtime_error.
    throw_out_of_memory(label, bytes, is_host_space<ExecutionSpace>);
  }
}

/// \brief Gives up an owner of device memory instead of freeing it; host memory it leaves alone.
///
/// After a CommunicationError: freeing waits for all that runs on the device, and a collective that
/// another rank missed does not end before its communicator is aborted, maybe by the caller, who is
/// yet to be told.
template <class ExecutionSpace, class Owner>
void leak(Owner& owner) noexcept {
  if constexpr (!is_host_space<ExecutionSpace>) (void)new Owner(std::move(owner));
}

}  // namespace impl
}  // namespace vpkl
