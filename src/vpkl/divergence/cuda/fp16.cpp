// SPDX-License-Identifier: Apache-2.0
#include <vpkl/divergence/cuda/fused.hpp>

namespace vpkl::impl::cuda {

namespace {
AllKernels<half, half> const kernels;
}
TypedKernels const& fp16_kernels = kernels;

}  // namespace vpkl::impl::cuda
