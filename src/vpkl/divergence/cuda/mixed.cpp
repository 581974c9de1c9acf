// SPDX-License-Identifier: Apache-2.0
#include <vpkl/divergence/cuda/two_phase.hpp>

namespace vpkl::impl::cuda {

namespace {
TwoPhase<AnyType, AnyType> const kernels;
}
TypedKernels const& mixed_kernels = kernels;

}  // namespace vpkl::impl::cuda
