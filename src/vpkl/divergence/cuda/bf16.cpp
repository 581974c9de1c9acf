// SPDX-License-Identifier: Apache-2.0
#include <vpkl/divergence/cuda/two_phase.hpp>

namespace vpkl::impl::cuda {

namespace {
TwoPhase<bfloat16, bfloat16> const kernels;
}
TypedKernels const& bf16_kernels = kernels;

}  // namespace vpkl::impl::cuda
