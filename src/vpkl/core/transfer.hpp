// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Small arrays between host vectors and an execution space's memory.
#pragma once

#include <vpkl/core/kokkos.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace vpkl::impl {

template <class T>
using HostArray = Kokkos::View<T*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

template <class ExecutionSpace, class T>
using DeviceArray = Kokkos::View<T*, typename ExecutionSpace::memory_space,
                                 Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

/// \brief Copies `values` to the start of `target`; done on return.
template <class ExecutionSpace, class T>
void to_device(ExecutionSpace const& exec, std::vector<T> const& values,
               ByteView<ExecutionSpace> const& target) {
  Kokkos::deep_copy(
      exec, DeviceArray<ExecutionSpace, T>(reinterpret_cast<T*>(target.data()), values.size()),
      HostArray<T const>(values.data(), values.size()));
  fence(exec, "vpkl::to_device");
}

/// \brief Copies `count` values from `source`; done on return.
template <class ExecutionSpace, class T>
std::vector<T> to_host(ExecutionSpace const& exec, T const* source, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  Kokkos::deep_copy(exec, HostArray<T>(values.data(), values.size()),
                    DeviceArray<ExecutionSpace, T const>(source, values.size()));
  fence(exec, "vpkl::to_host");
  return values;
}

}  // namespace vpkl::impl
