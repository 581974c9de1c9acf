// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief The one place that knows how Kokkos differs between 3.4 and 5.x.
#pragma once

#include <vpkl/config.hpp>

#include <Kokkos_Core.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#if KOKKOS_VERSION < 30400
#error "vpkl needs Kokkos 3.4 or later"
#endif

#if defined(VPKL_ENABLE_CUDA) && !defined(KOKKOS_ENABLE_CUDA)
#error "this vpkl was built for CUDA; the Kokkos found here has no CUDA"
#endif

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
#if defined(VPKL_ENABLE_CUDA)
#define VPKL_IMPL_FOREACH_CUDA(X) X(Kokkos::Cuda)
#else
#define VPKL_IMPL_FOREACH_CUDA(X)
#endif
/// Calls X(ExecutionSpace) for every host execution space of this Kokkos.
#define VPKL_FOREACH_HOST_SPACE(X) VPKL_IMPL_FOREACH_SERIAL(X) VPKL_IMPL_FOREACH_OPENMP(X)
/// Calls X(ExecutionSpace) for every execution space that this Kokkos has and vpkl is built for.
#define VPKL_FOREACH_EXECUTION_SPACE(X) VPKL_FOREACH_HOST_SPACE(X) VPKL_IMPL_FOREACH_CUDA(X)

namespace vpkl {

/// Flat device bytes; the owner type of workspaces.
template <class ExecutionSpace>
using ByteView = Kokkos::View<unsigned char*, typename ExecutionSpace::memory_space>;

namespace impl {

template <class ExecutionSpace>
constexpr bool is_host_space =
    Kokkos::Impl::MemorySpaceAccess<Kokkos::HostSpace,
                                    typename ExecutionSpace::memory_space>::accessible;

// As variables: device code may use a constant, but not call the standard library's functions.
inline constexpr float infinity = std::numeric_limits<float>::infinity();
inline constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();

/// How often this process has waited for enqueued work; tests compare it before and after a call.
inline std::atomic<std::int64_t> host_waits{0};

/// \brief Fences one instance; the label is dropped where Kokkos takes none (before 3.5).
template <class ExecutionSpace>
void fence(ExecutionSpace const& exec, char const* label) {
  ++host_waits;
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
