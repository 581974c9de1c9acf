// SPDX-License-Identifier: Apache-2.0
// The plan's kernels on a CUDA execution space.
#include <vpkl/core/allocate.hpp>
#include <vpkl/core/error.hpp>
#include <vpkl/divergence/cuda/joined_launch.hpp>
#include <vpkl/divergence/cuda/launch.hpp>
#include <vpkl/divergence/cuda/segment.hpp>

#include <fmt/format.h>

#include <algorithm>

namespace vpkl::impl {

namespace {

/// Shows a launch to Kokkos Tools under its label.
class Labelled {
 public:
  Labelled(Kokkos::Cuda const& exec, char const* label) {
    if (Kokkos::Tools::profileLibraryLoaded())
      Kokkos::Tools::beginParallelFor(label, Kokkos::Tools::Experimental::device_id(exec), &id_);
  }
  ~Labelled() {
    if (Kokkos::Tools::profileLibraryLoaded()) Kokkos::Tools::endParallelFor(id_);
  }
  Labelled(Labelled const&) = delete;
  Labelled& operator=(Labelled const&) = delete;

 private:
  std::uint64_t id_ = 0;
};

/// A block that merges a row keeps the records of its segments in its 48 KB of shared memory.
void check_columns(char const* what, std::int64_t columns) {
  constexpr std::int64_t most = 48 * 1024 / sizeof(cuda::SegmentRecord) * cuda::segment_columns;
  if (columns > most)
    throw InvalidArgument(
        fmt::format("{}: {} columns, expected at most {} on CUDA", what, columns, most));
}

/// Blocks for each multiprocessor that rows are split for, as measured. The parts of statistics, of
/// JSD's sums and of known teachers' shares are merged by a kernel of their own: the first two keep
/// whole rows as soon as these make one to two waves of blocks. Gradients are split further, for an
/// even end: JSD's, bound by arithmetic of which smaller blocks waste more, the least.
constexpr int merged_blocks = 6, kl_gradient_blocks = 36, known_gradient_blocks = 24,
              jsd_gradient_blocks = 12;

std::int64_t quotient_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

cuda::TypedKernels const& kernels_of(RowJob const& job) {
  return cuda::typed_kernels(job.student.type, job.teacher.type);
}

}  // namespace

template <>
void teacher_statistics(Kokkos::Cuda const& exec, ConstRows const& teacher, std::int64_t columns,
                        ElementType type, double temperature, RowStatistics* records) {
  if (teacher.index.count == 0) return;
  check_columns("teacher statistics", columns);
  Labelled const label(exec, "vpkl::TeacherCache::statistics");
  RowJob const job = RowJob::of_teacher(teacher, columns, type, temperature);
  cuda::typed_kernels(teacher.type, type).statistics(exec.cuda_stream(), job, 1, nullptr, records);
}

DivergenceKernels<Kokkos::Cuda>::DivergenceKernels(Kokkos::Cuda const& exec, std::int64_t max_rows,
                                                   std::int64_t max_columns) {
  check_columns("divergence plan", max_columns);
  int device = 0;
  VPKL_CHECK_CUDA(cudaGetDevice(&device));
  VPKL_CHECK_CUDA(
      cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device));
  cuda::load_common();
  bool const clusters = cuda::hopper();
  for (auto const* kernels :
       {&cuda::fp32_kernels, &cuda::bf16_kernels, &cuda::fp16_kernels, &cuda::mixed_kernels})
    kernels->load(clusters);
  resident_ = std::make_shared<cuda::ResidentClusters>(clusters ? cuda::ResidentClusters::query()
                                                                : cuda::ResidentClusters{});
  auto const split_bytes = [&](int blocks, std::size_t record) {
    std::int64_t const rows =
        std::min<std::int64_t>(max_rows, std::int64_t(multiprocessors_) * blocks);
    return static_cast<std::size_t>(rows * cuda::segments_of(max_columns)) * record;
  };
  partials_ = allocate_bytes(
      exec, "vpkl::DivergencePlan::partials",
      std::max(split_bytes(merged_blocks, std::max(sizeof(cuda::SegmentRecord), sizeof(JsdSums))),
               split_bytes(known_gradient_blocks, sizeof(double))));
}

int DivergenceKernels<Kokkos::Cuda>::parts(RowJob const& job, std::int64_t columns,
                                           int blocks) const {
  std::int64_t const wanted = std::int64_t(multiprocessors_) * blocks;
  std::int64_t const segments = cuda::segments_of(columns);
  if (job.rows() >= wanted || segments < 2 * cuda::block_warps) return 1;
  std::int64_t const most = quotient_up(wanted, job.rows());
  std::int64_t const turns = quotient_up(segments, cuda::block_warps * most);
  // The fewest blocks in which no warp has more turns.
  return static_cast<int>(quotient_up(segments, cuda::block_warps * turns));
}

int DivergenceKernels<Kokkos::Cuda>::statistics(Kokkos::Cuda const& exec, RowJob const& job,
                                                RowStatistics* out) const {
  if (job.rows() == 0) return 0;
  Labelled const label(exec, "vpkl::DivergencePlan::statistics");
  auto const& kernels =
      job.known.records ? cuda::typed_kernels(job.student.type, job.student.type) : kernels_of(job);
  int const split = parts(job, job.columns, merged_blocks);
  kernels.statistics(exec.cuda_stream(), job, split, partials_.data(), out);
  return split > 1 ? 2 : 1;
}

int DivergenceKernels<Kokkos::Cuda>::combine(Kokkos::Cuda const& exec, RowJob const& job,
                                             RowStatistics const* gathered, int ranks,
                                             std::int64_t stride, RowStatistics* merged) const {
  if (job.rows() == 0) return 0;
  Labelled const label(exec, "vpkl::DivergencePlan::combine");
  cuda::combine(exec.cuda_stream(), job, gathered, ranks, stride, merged);
  return 1;
}

int DivergenceKernels<Kokkos::Cuda>::jsd_sums(Kokkos::Cuda const& exec, RowJob const& job,
                                              RowStatistics const* merged, JsdSums* out) const {
  if (job.rows() == 0) return 0;
  Labelled const label(exec, "vpkl::DivergencePlan::jsd_sums");
  int const split = parts(job, job.columns, merged_blocks);
  kernels_of(job).jsd_sums(exec.cuda_stream(), job, split, partials_.data(), merged, out);
  return split > 1 ? 2 : 1;
}

int DivergenceKernels<Kokkos::Cuda>::finish(Kokkos::Cuda const& exec, RowJob const& job,
                                            RowStatistics const* merged, JsdSums const* sums,
                                            int ranks, std::int64_t stride, float* value,
                                            Rows gradient) const {
  if (job.rows() == 0) return 0;
  Labelled const label(exec, "vpkl::DivergencePlan::gradient");
  int const blocks =
      job.options.divergence == Divergence::jsd ? jsd_gradient_blocks : kl_gradient_blocks;
  kernels_of(job).finish(exec.cuda_stream(), job, parts(job, gradient.width, blocks), merged, sums,
                         ranks, stride, value, gradient);
  return 1;
}

int DivergenceKernels<Kokkos::Cuda>::finish_known(Kokkos::Cuda const& exec, RowJob const& job,
                                                  RowStatistics const* merged, bool first,
                                                  double* share, Rows gradient) const {
  if (job.rows() == 0) return 0;
  Labelled const label(exec, "vpkl::DivergencePlan::gradient");
  int const split = parts(job, std::max(job.columns, gradient.width), known_gradient_blocks);
  kernels_of(job).finish_known(exec.cuda_stream(), job, split, partials_.data(), merged, first,
                               share, gradient);
  return split > 1 ? 2 : 1;
}

int DivergenceKernels<Kokkos::Cuda>::add_shares(Kokkos::Cuda const& exec, std::int64_t rows,
                                                double const* shares, int ranks, double temperature,
                                                float* value) const {
  if (rows == 0) return 0;
  Labelled const label(exec, "vpkl::DivergencePlan::values");
  cuda::add_shares(exec.cuda_stream(), rows, shares, ranks, temperature, value);
  return 1;
}

int DivergenceKernels<Kokkos::Cuda>::fused(Kokkos::Cuda const& exec, RowJob const& job,
                                           RowStatistics* merged, JsdSums* sums, float* value,
                                           Rows gradient) const {
  if (job.rows() == 0) return 0;
  if (int const cluster = kernels_of(job).fused_cluster(*resident_, job)) {
    Labelled const label(exec, "vpkl::DivergencePlan::fused");
    return kernels_of(job).fused(exec.cuda_stream(), cluster, *resident_, job, value, gradient);
  }
  bool const jsd = job.options.divergence == Divergence::jsd;
  int launched = statistics(exec, job, merged);
  if (jsd) launched += jsd_sums(exec, job, merged, sums);
  return launched + finish(exec, job, merged, jsd ? sums : nullptr, 1, 0, value, gradient);
}

}  // namespace vpkl::impl
