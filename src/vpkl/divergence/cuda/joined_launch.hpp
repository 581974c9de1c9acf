// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Launches whose blocks are in place when the launch before them ends.
///
/// The kernels of a call follow each other closely, and each is short: from compute capability 9.0
/// on a kernel's blocks take their places while those of the one before still run, and wait there.
#pragma once

#include <vpkl/core/cuda/check.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

namespace vpkl::impl::cuda {

/// \brief First statement of a kernel for launch_joined(): nothing is read or written before it.
__device__ __forceinline__ void join_launches() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}

/// \brief Whether the device has compute capability 9.0 or later, and with it joined launches and
/// clusters.
bool hopper();

/// \brief Enqueues a kernel that begins with join_launches().
template <class... Parameters, class... Arguments>
void launch_joined(cudaStream_t stream, dim3 grid, int threads, std::size_t shared,
                   void (*kernel)(Parameters...), Arguments&&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = hopper() ? 1 : 0;
  VPKL_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

}  // namespace vpkl::impl::cuda
