// SPDX-License-Identifier: Apache-2.0
#include <vpkl/divergence/cuda/fused.hpp>

namespace vpkl::impl::cuda {

namespace {
AllKernels<float, float> const kernels;
}
TypedKernels const& fp32_kernels = kernels;

}  // namespace vpkl::impl::cuda
