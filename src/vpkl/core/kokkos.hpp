// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief The one place that knows how Kokkos differs between 3.4 and 5.x.
#pragma once

#include <Kokkos_Core.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#if KOKKOS_VERSION < 30400
#error "vpkl needs Kokkos 3.4 or later"
#endif

/// Calls X(ExecutionSpace) for every execution space that this Kokkos has and vpkl is built for.
#if defined(KOKKOS_ENABLE_SERIAL)
#define VPKL_IMPL_FOREACH_SERIAL(X) X(Kokkos::Serial)
#else
#define VPKL_IMPL_FOREACH_SERIAL(X)
#endif
#if defined(KOKKOS_ENABLE_OPENMP)
#define VPKL_IMPL_FOREACH_OPENMP(X) X(Kokkos::OpenMP)
#else
#define VPKL_IMPL_FOREACH_OPENMP(X)
#endif
#define VPKL_FOREACH_EXECUTION_SPACE(X) VPKL_IMPL_FOREACH_SERIAL(X) VPKL_IMPL_FOREACH_OPENMP(X)

namespace vpkl {

/// Flat device bytes; the owner type of workspaces.
template <class ExecutionSpace>
using ByteView = Kokkos::View<unsigned char*, typename ExecutionSpace::memory_space>;

namespace impl {

template <class ExecutionSpace>
constexpr bool is_host_space =
    Kokkos::Impl::MemorySpaceAccess<Kokkos::HostSpace,
                                    typename ExecutionSpace::memory_space>::accessible;

/// \brief Fences one instance; the label is dropped where Kokkos takes none (before 3.5).
template <class ExecutionSpace>
void fence(ExecutionSpace const& exec, char const* label) {
#if KOKKOS_VERSION >= 30500
  exec.fence(label);
#else
  (void)label;
  exec.fence();
#endif
}

template <class ExecutionSpace>
using RangePolicy64 = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

}  // namespace impl
}  // namespace vpkl
