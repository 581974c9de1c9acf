// SPDX-License-Identifier: Apache-2.0
#include <vpkl/divergence/cuda/fused.hpp>

namespace vpkl::impl::cuda {

namespace {
AllKernels<bfloat16, bfloat16> const kernels;
}
TypedKernels const& bf16_kernels = kernels;

// Every fused kernel takes one block a multiprocessor, so that one kernel answers for all.
ResidentClusters ResidentClusters::query() {
  ResidentClusters r;
  for (int i = 0; i < sizes; ++i)
    r.count[i] = FusedKernels<bfloat16, bfloat16>::resident_clusters(blocks(i));
  return r;
}

}  // namespace vpkl::impl::cuda
