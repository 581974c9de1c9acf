// SPDX-License-Identifier: Apache-2.0
#include <vpkl/divergence/cuda/two_phase.hpp>

namespace vpkl::impl::cuda {

namespace {
TwoPhase<half, half> const kernels;
}
TypedKernels const& fp16_kernels = kernels;

}  // namespace vpkl::impl::cuda
