// SPDX-License-Identifier: Apache-2.0
#include <vpkl/divergence/cuda/fused.hpp>

namespace vpkl::impl::cuda {

namespace {
AllKernels<AnyType, AnyType> const kernels;
}
TypedKernels const& mixed_kernels = kernels;

}  // namespace vpkl::impl::cuda
