// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Allocation with a typed error, and how much host memory there is.
#pragma once

#include <vpkl/core/error.hpp>
#include <vpkl/core/kokkos.hpp>

#include <cstddef>
#include <string>

namespace vpkl {

/// \brief Bytes of host memory this process may still take: the least of the machine's available
/// memory and what is left of its control group's limit (versions 1 and 2).
std::size_t available_host_memory();

namespace impl {

[[noreturn]] void throw_out_of_memory(std::string const& label, std::size_t bytes);

/// \brief Uninitialised bytes.
/// \throws OutOfMemory with label, requested and available bytes
template <class ExecutionSpace>
ByteView<ExecutionSpace> allocate_bytes(ExecutionSpace const& exec, std::string const& label,
                                        std::size_t bytes) {
  if (is_host_space<ExecutionSpace> && bytes > available_host_memory())
    throw_out_of_memory(label, bytes);
  try {
    return ByteView<ExecutionSpace>(Kokkos::view_alloc(exec, label, Kokkos::WithoutInitializing),
                                    bytes);
  } catch (std::exception const&) {
    // Kokkos 3 throws a bad_alloc of its own, later versions a runtime_error.
    throw_out_of_memory(label, bytes);
  }
}

}  // namespace impl
}  // namespace vpkl
