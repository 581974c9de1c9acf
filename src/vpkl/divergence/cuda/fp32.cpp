// SPDX-License-Identifier: Apache-2.0
#include <vpkl/divergence/cuda/two_phase.hpp>

namespace vpkl::impl::cuda {

namespace {
TwoPhase<float, float> const kernels;
}
TypedKernels const& fp32_kernels = kernels;

}  // namespace vpkl::impl::cuda
