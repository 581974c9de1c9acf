// SPDX-License-Identifier: Apache-2.0
// Kernels that see records only, and the choice of those that see logits.
#include <vpkl/divergence/cuda/two_phase.hpp>

namespace vpkl::impl::cuda {

namespace {

constexpr int fold_warps = 4;

__global__ void __launch_bounds__(fold_warps* lanes)
    fold_statistics_kernel(RowJob const job, SegmentOptions const options, std::int64_t segments,
                           SegmentRecord const* partial, RowStatistics* out) {
  join_launches();
  std::int64_t const row = std::int64_t(blockIdx.x) * fold_warps + threadIdx.x / lanes;
  if (row >= job.student.index.count) return;
  RowStatistics r = empty_statistics();
  if (weight_of(job, row) != 0)
    r = merge_segments(partial + row * segments, static_cast<int>(segments), job.options.weighting,
                       options);
  if (threadIdx.x % lanes == 0)
    out[row] = job.one_model() && weight_of(job, row) != 0 ? job.completed(row, r) : r;
}

__global__ void __launch_bounds__(fold_warps* lanes)
    fold_shares_kernel(RowJob const job, std::int64_t segments, double const* partial,
                       RowStatistics const* merged, bool first_rank, double* share) {
  join_launches();
  std::int64_t const row = std::int64_t(blockIdx.x) * fold_warps + threadIdx.x / lanes;
  if (row >= job.student.index.count) return;
  double const total = add_segments(partial + row * segments, segments);
  if (threadIdx.x % lanes == 0)
    share[row] = weight_of(job, row) != 0
                     ? forward_kl_share(merged[row], total, first_rank, job.options)
                     : 0.0;
}

__global__ void __launch_bounds__(128)
    add_shares_kernel(std::int64_t rows, double const* shares, int ranks, double temperature,
                      float* value) {
  join_launches();
  std::int64_t const row = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < rows) value[row] = value_of_shares(shares + row, ranks, rows, temperature);
}

__global__ void __launch_bounds__(fold_warps* lanes)
    fold_sums_kernel(std::int64_t rows, std::int64_t segments, JsdSums const* partial,
                     JsdSums* out) {
  join_launches();
  std::int64_t const row = std::int64_t(blockIdx.x) * fold_warps + threadIdx.x / lanes;
  if (row >= rows) return;
  JsdSums const sums = merge_sums(partial + row * segments, segments);
  if (threadIdx.x % lanes == 0) out[row] = sums;
}

__global__ void __launch_bounds__(128)
    combine_kernel(RowJob const job, RowStatistics const* gathered, int ranks, std::int64_t stride,
                   RowStatistics* merged) {
  join_launches();
  std::int64_t const row = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= job.student.index.count) return;
  RowAccumulator sum(job.options.weighting,
                     static_cast<double>(job.options.scale) / static_cast<double>(logit_unit));
  for (int r = 0; r < ranks; ++r)
    sum.add(gathered[r * stride + row]);
  merged[row] = sum.result();
}

unsigned blocks_for(std::int64_t rows, int rows_per_block) {
  return static_cast<unsigned>((rows + rows_per_block - 1) / rows_per_block);
}

}  // namespace

TypedKernels const& typed_kernels(ElementType student, ElementType teacher) {
  if (student != teacher) return mixed_kernels;
  switch (student) {
    case ElementType::bf16: return bf16_kernels;
    case ElementType::fp16: return fp16_kernels;
    case ElementType::fp32: break;
  }
  return fp32_kernels;
}

bool hopper() {
  static bool const found = [] {
    int device = 0, major = 0;
    VPKL_CHECK_CUDA(cudaGetDevice(&device));
    VPKL_CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    // Code made for an older device and translated for this one lacks the instructions.
    cudaFuncAttributes attributes;
    VPKL_CHECK_CUDA(cudaFuncGetAttributes(&attributes, combine_kernel));
    return major >= 9 && attributes.ptxVersion >= 90;
  }();
  return found;
}

void load_common() {
  cudaFuncAttributes attributes;
  VPKL_CHECK_CUDA(cudaFuncGetAttributes(&attributes, fold_statistics_kernel));
  VPKL_CHECK_CUDA(cudaFuncGetAttributes(&attributes, fold_sums_kernel));
  VPKL_CHECK_CUDA(cudaFuncGetAttributes(&attributes, fold_shares_kernel));
  VPKL_CHECK_CUDA(cudaFuncGetAttributes(&attributes, add_shares_kernel));
  VPKL_CHECK_CUDA(cudaFuncGetAttributes(&attributes, combine_kernel));
}

void fold_statistics(cudaStream_t stream, RowJob const& job, void const* partial,
                     RowStatistics* out) {
  launch_joined(stream, dim3(blocks_for(job.rows(), fold_warps)), fold_warps * lanes, 0,
                fold_statistics_kernel, job, SegmentOptions::make(job), segments_of(job.columns),
                static_cast<SegmentRecord const*>(partial), out);
}

void fold_sums(cudaStream_t stream, RowJob const& job, void const* partial, JsdSums* out) {
  launch_joined(stream, dim3(blocks_for(job.rows(), fold_warps)), fold_warps * lanes, 0,
                fold_sums_kernel, job.rows(), segments_of(job.columns),
                static_cast<JsdSums const*>(partial), out);
}

void fold_shares(cudaStream_t stream, RowJob const& job, void const* partial,
                 RowStatistics const* merged, bool first_rank, double* share) {
  launch_joined(stream, dim3(blocks_for(job.rows(), fold_warps)), fold_warps * lanes, 0,
                fold_shares_kernel, job, segments_of(job.columns),
                static_cast<double const*>(partial), merged, first_rank, share);
}

void add_shares(cudaStream_t stream, std::int64_t rows, double const* shares, int ranks,
                double temperature, float* value) {
  launch_joined(stream, dim3(blocks_for(rows, 128)), 128, 0, add_shares_kernel, rows, shares, ranks,
                temperature, value);
}

void combine(cudaStream_t stream, RowJob const& job, RowStatistics const* gathered, int ranks,
             std::int64_t stride, RowStatistics* merged) {
  launch_joined(stream, dim3(blocks_for(job.rows(), 128)), 128, 0, combine_kernel, job, gathered,
                ranks, stride, merged);
}

}  // namespace vpkl::impl::cuda
