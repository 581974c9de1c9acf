// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Kernels that read a row once each: statistics, JSD's sums, gradient.
#pragma once

#include <vpkl/divergence/cuda/joined_launch.hpp>
#include <vpkl/divergence/cuda/launch.hpp>
#include <vpkl/divergence/cuda/segment.hpp>

namespace vpkl::impl::cuda {

constexpr int block_threads = block_warps * lanes;

/// \brief Blocks that a multiprocessor shall hold at once, which limits their registers: `two_byte`
/// where the student's elements are of two bytes, else 2.
template <class S>
constexpr int resident_blocks(int two_byte) {
  return sizeof(Vector<S>) == 16 ? two_byte : 2;
}

__device__ __forceinline__ float weight_of(RowJob const& job, std::int64_t row) {
  return job.weight ? job.weight[row] : 1.0f;
}

template <class S>
__device__ __forceinline__ RowPointer<S> student_row(RowJob const& job, std::int64_t row) {
  return RowPointer<S>::make(const_cast<void*>(job.student.data), job.student.type,
                             job.student.index(row));
}

template <class T>
__device__ __forceinline__ RowPointer<T> teacher_row(RowJob const& job, std::int64_t row) {
  return RowPointer<T>::make(const_cast<void*>(job.teacher.data), job.teacher.type,
                             job.teacher_element(row));
}

__device__ __forceinline__ RowStatistics empty_statistics() {
  RowStatistics r;
  r.sum_student = r.sum_teacher = 0;
  r.max_student = r.max_teacher = minus_infinity();
  r.difference = 0;
  r.flags = 0;
  return r;
}

/// \brief The row's value from its merged records.
__device__ __forceinline__ float row_value(RowJob const& job, RowStatistics const& merged,
                                           JsdSums const& sums) {
  return divergence_value(merged, sums, row_state(merged), job.options);
}

/// Grid (parts, rows): a block's warps take the segments of its part in turn. Whole rows
/// (parts 1) are merged in the block, others leave their records for fold_statistics.
/// \tparam T Absent in jobs of one model
template <Weighting weighting, class S, class T>
__global__ void __launch_bounds__(block_threads,
                                  resident_blocks<S>(weighting == Weighting::none ? 4 : 3))
    statistics_kernel(RowJob const job, SegmentOptions const options, std::int64_t segments,
                      std::int64_t first_row, SegmentRecord* partial, RowStatistics* out) {
  extern __shared__ SegmentRecord shared_records[];
  join_launches();
  std::int64_t const row = first_row + blockIdx.y;
  if (weight_of(job, row) == 0) {
    if (gridDim.x == 1 && threadIdx.x == 0) out[row] = empty_statistics();
    return;
  }
  bool const whole = gridDim.x == 1;
  SegmentRecord* const records = whole ? shared_records : partial + row * segments;
  int const lane = threadIdx.x % lanes;
  RowPointer<S> student = student_row<S>(job, row);
  if constexpr (std::is_same<S, AnyType>::value && std::is_same<T, Absent>::value)
    student.as = job.read_as;
  RowPointer<T> const teacher = teacher_row<T>(job, row);
  std::int64_t const step = gridDim.x * block_warps;
  for (std::int64_t i = blockIdx.x * block_warps + threadIdx.x / lanes; i < segments; i += step) {
    typename RowPointer<S>::Loaded s[vectors];
    typename RowPointer<T>::Loaded t[vectors];
    std::int64_t const first = i * segment_columns;
    student.load(first, job.columns, lane, s);
    teacher.load(first, job.columns, lane, t);
    SegmentRecord const record =
        segment_statistics<weighting, vectors, typename RowPointer<S>::Loaded,
                           typename RowPointer<T>::Loaded>(
            options, job.columns - first,
            [&](int v, auto& to_s, auto& to_t) {
              to_s = s[v];
              to_t = t[v];
            },
            [&](int v, auto& to_s, auto& to_t) {
              student.load_one(first, job.columns, lane, v, to_s);
              teacher.load_one(first, job.columns, lane, v, to_t);
            });
    if (lane == 0) records[i] = record;
  }
  if (!whole) return;
  __syncthreads();
  if (threadIdx.x >= lanes) return;
  RowStatistics const r = merge_segments(records, static_cast<int>(segments), weighting, options);
  if (lane == 0) {
    if constexpr (std::is_same<T, Absent>::value)
      out[row] = job.completed(row, r);
    else
      out[row] = r;
  }
}

template <class S, class T>
__global__ void __launch_bounds__(block_threads, resident_blocks<S>(4))
    jsd_sums_kernel(RowJob const job, SegmentOptions const options, std::int64_t segments,
                    std::int64_t first_row, RowStatistics const* merged, JsdSums* partial,
                    JsdSums* out) {
  extern __shared__ JsdSums shared_sums[];
  join_launches();
  std::int64_t const row = first_row + blockIdx.y;
  bool const whole = gridDim.x == 1;
  JsdSums* const sums = whole ? shared_sums : partial + row * segments;
  int const lane = threadIdx.x % lanes;
  bool regular = weight_of(job, row) != 0;
  GradientConstants constants;
  if (regular) {
    constants = gradient_constants<Divergence::jsd>(merged[row], job.options, 0, 1);
    regular = constants.state == RowState::regular;
  }
  if (whole && !regular) {
    if (threadIdx.x == 0) out[row] = JsdSums{};
    return;
  }
  RowPointer<S> const student = student_row<S>(job, row);
  RowPointer<T> const teacher = teacher_row<T>(job, row);
  std::int64_t const step = gridDim.x * block_warps;
  for (std::int64_t i = blockIdx.x * block_warps + threadIdx.x / lanes; i < segments; i += step) {
    JsdSums part;
    if (regular) {
      typename RowPointer<S>::Loaded s[vectors];
      typename RowPointer<T>::Loaded t[vectors];
      student.load(i * segment_columns, job.columns, lane, s);
      teacher.load(i * segment_columns, job.columns, lane, t);
      using VS = typename RowPointer<S>::Loaded;
      using VT = typename RowPointer<T>::Loaded;
      part = any_jsd_sums<vectors, VS, VT>(
          constants, options,
          [&](int v, VS& to_s, VT& to_t) {
            to_s = s[v];
            to_t = t[v];
          },
          [](int, float const(&)[vector_columns]) {});
    }
    if (lane == 0) sums[i] = part;
  }
  if (!whole) return;
  __syncthreads();
  if (threadIdx.x >= lanes) return;
  JsdSums const total = merge_sums(sums, segments);
  if (lane == 0) out[row] = total;
}

/// Grid (parts, rows). Writes the value and the block's part of the gradient.
template <Divergence divergence, class S, class T>
__global__ void __launch_bounds__(block_threads, resident_blocks<S>(4))
    finish_kernel(RowJob const job, SegmentOptions const options, std::int64_t first_row,
                  RowStatistics const* merged, JsdSums const* sums, int ranks, std::int64_t stride,
                  float* value, Rows const gradient) {
  join_launches();
  std::int64_t const row = first_row + blockIdx.y;
  int const lane = threadIdx.x % lanes;
  bool const counts = weight_of(job, row) != 0;
  __shared__ GradientConstants shared_constants;
  if (threadIdx.x == 0) {
    float result = 0;
    if (counts) {
      JsdSums total;
      if (sums)
        for (int r = 0; r < ranks; ++r) {
          total.student = __dadd_rn(total.student, sums[r * stride + row].student);
          total.teacher = __dadd_rn(total.teacher, sums[r * stride + row].teacher);
        }
      shared_constants = gradient_constants<divergence>(merged[row], job.options, total.student,
                                                        weight_of(job, row));
      if (blockIdx.x == 0) result = row_value(job, merged[row], total);
    }
    if (blockIdx.x == 0) value[row] = result;
  }
  if (!gradient.data) return;
  __syncthreads();
  GradientConstants const constants = shared_constants;
  RowPointer<S> const student = student_row<S>(job, row);
  RowPointer<T> const teacher = teacher_row<T>(job, row);
  RowPointer<S> const to = RowPointer<S>::make(gradient.data, gradient.type, gradient.index(row));
  std::int64_t const segments = segments_of(gradient.width);
  std::int64_t const columns = counts ? job.columns : 0;
  std::int64_t const step = gridDim.x * block_warps;
  for (std::int64_t i = blockIdx.x * block_warps + threadIdx.x / lanes; i < segments; i += step) {
    std::int64_t const first = i * segment_columns;
    typename RowPointer<S>::Loaded s[vectors];
    typename RowPointer<T>::Loaded t[vectors];
    if (first < columns) {
      student.load(first, columns, lane, s);
      teacher.load(first, columns, lane, t);
      if (ordinary<divergence>(constants)) {
#pragma unroll
        for (int v = 0; v < vectors; ++v)
          s[v] = vector_gradient<divergence>(s[v], t[v], constants, options);
      } else {
#pragma unroll
        for (int v = 0; v < vectors; ++v)
          s[v] = any_gradient<divergence>(s[v], t[v], constants, options);
      }
    }
    to.store(first, columns, gradient.width, lane, s);
  }
}

/// Grid (parts, rows). Forward KL's gradient, and the row's share of the value; of split rows the
/// segments' sums, for fold_shares.
template <class S, class T>
__global__ void __launch_bounds__(block_threads, resident_blocks<S>(3))
    finish_known_kernel(RowJob const job, SegmentOptions const options, std::int64_t segments,
                        std::int64_t first_row, RowStatistics const* merged, bool first_rank,
                        double* partial, double* share, Rows const gradient) {
  extern __shared__ double shared_weighted[];
  join_launches();
  std::int64_t const row = first_row + blockIdx.y;
  int const lane = threadIdx.x % lanes;
  bool const whole = gridDim.x == 1, counts = weight_of(job, row) != 0;
  double* const weighted = whole ? shared_weighted : partial + row * segments;
  __shared__ GradientConstants shared_constants;
  if (counts && threadIdx.x == 0)
    shared_constants = gradient_constants<Divergence::forward_kl>(merged[row], job.options, 0,
                                                                  weight_of(job, row));
  __syncthreads();
  GradientConstants const constants = shared_constants;
  bool const ordinary_row = counts && ordinary<Divergence::forward_kl>(constants);
  RowPointer<S> const student = student_row<S>(job, row);
  RowPointer<T> const teacher = teacher_row<T>(job, row);
  RowPointer<S> const to =
      RowPointer<S>::make(gradient.data, gradient.type, gradient.data ? gradient.index(row) : 0);
  std::int64_t const columns = counts ? job.columns : 0;
  std::int64_t const all = gradient.data ? segments_of(gradient.width) : segments;
  std::int64_t const step = gridDim.x * block_warps;
  for (std::int64_t i = blockIdx.x * block_warps + threadIdx.x / lanes; i < all; i += step) {
    std::int64_t const first = i * segment_columns;
    typename RowPointer<S>::Loaded s[vectors];
    typename RowPointer<T>::Loaded t[vectors];
    double sum = 0;
    if (first < columns) {
      student.load(first, columns, lane, s);
      teacher.load(first, columns, lane, t);
      if (ordinary_row) {
        sum = segment_forward_kl(s, t, constants, options);
        if (options.narrow)
          sum = narrow_forward_kl<typename RowPointer<S>::Loaded, typename RowPointer<T>::Loaded>(
              [&](int v, auto& to_s, auto& to_t) {
                student.load_one(first, columns, lane, v, to_s);
                teacher.load_one(first, columns, lane, v, to_t);
              },
              constants, options);
      } else {
#pragma unroll
        for (int v = 0; v < vectors; ++v)
          s[v] = special_gradient(s[v], constants.state);
      }
    }
    if (lane == 0 && i < segments) weighted[i] = sum;
    if (gradient.data) to.store(first, columns, gradient.width, lane, s);
  }
  if (!whole) return;
  __syncthreads();
  if (threadIdx.x >= lanes) return;
  double const total = add_segments(weighted, segments);
  if (lane == 0)
    share[row] = counts ? forward_kl_share(merged[row], total, first_rank, job.options) : 0.0;
}

/// Rows that one launch takes: the y extent of a grid.
constexpr std::int64_t launch_rows = 65535;

template <class F>
void for_row_ranges(std::int64_t rows, F&& f) {
  for (std::int64_t first = 0; first < rows; first += launch_rows)
    f(first, static_cast<unsigned>(rows - first < launch_rows ? rows - first : launch_rows));
}

template <class S, class T>
class TwoPhase : public TypedKernels {
 public:
  void load(bool) const override {
    cudaFuncAttributes attributes;
    for (void const* kernel :
         {reinterpret_cast<void const*>(statistics_kernel<Weighting::teacher, S, T>),
          reinterpret_cast<void const*>(statistics_kernel<Weighting::student, S, T>),
          reinterpret_cast<void const*>(statistics_kernel<Weighting::none, S, T>),
          reinterpret_cast<void const*>(statistics_kernel<Weighting::none, S, Absent>),
          reinterpret_cast<void const*>(jsd_sums_kernel<S, T>),
          reinterpret_cast<void const*>(finish_known_kernel<S, T>),
          reinterpret_cast<void const*>(finish_kernel<Divergence::forward_kl, S, T>),
          reinterpret_cast<void const*>(finish_kernel<Divergence::reverse_kl, S, T>),
          reinterpret_cast<void const*>(finish_kernel<Divergence::jsd, S, T>)})
      VPKL_CHECK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  }

  void statistics(cudaStream_t stream, RowJob const& job, int parts, void* partial,
                  RowStatistics* out) const override {
    auto const kernel =
        job.one_model() ? statistics_kernel<Weighting::none, S, Absent>
        : job.options.weighting == Weighting::teacher ? statistics_kernel<Weighting::teacher, S, T>
        : job.options.weighting == Weighting::student ? statistics_kernel<Weighting::student, S, T>
                                                      : statistics_kernel<Weighting::none, S, T>;
    std::int64_t const segments = segments_of(job.columns);
    std::size_t const shared =
        parts == 1 ? static_cast<std::size_t>(segments) * sizeof(SegmentRecord) : 0;
    for_row_ranges(job.rows(), [&](std::int64_t first, unsigned rows) {
      launch_joined(stream, dim3(static_cast<unsigned>(parts), rows), block_threads, shared, kernel,
                    job, SegmentOptions::make(job), segments, first,
                    static_cast<SegmentRecord*>(partial), out);
    });
    if (parts > 1) fold_statistics(stream, job, partial, out);
  }

  void jsd_sums(cudaStream_t stream, RowJob const& job, int parts, void* partial,
                RowStatistics const* merged, JsdSums* out) const override {
    std::int64_t const segments = segments_of(job.columns);
    std::size_t const shared =
        parts == 1 ? static_cast<std::size_t>(segments) * sizeof(JsdSums) : 0;
    for_row_ranges(job.rows(), [&](std::int64_t first, unsigned rows) {
      launch_joined(stream, dim3(static_cast<unsigned>(parts), rows), block_threads, shared,
                    jsd_sums_kernel<S, T>, job, SegmentOptions::make(job), segments, first, merged,
                    static_cast<JsdSums*>(partial), out);
    });
    if (parts > 1) fold_sums(stream, job, partial, out);
  }

  void finish_known(cudaStream_t stream, RowJob const& job, int parts, void* partial,
                    RowStatistics const* merged, bool first_rank, double* share,
                    Rows const& gradient) const override {
    std::int64_t const segments = segments_of(job.columns);
    std::size_t const shared = parts == 1 ? static_cast<std::size_t>(segments) * sizeof(double) : 0;
    for_row_ranges(job.rows(), [&](std::int64_t first, unsigned rows) {
      launch_joined(stream, dim3(static_cast<unsigned>(parts), rows), block_threads, shared,
                    finish_known_kernel<S, T>, job, SegmentOptions::make(job), segments, first,
                    merged, first_rank, static_cast<double*>(partial), share, gradient);
    });
    if (parts > 1) fold_shares(stream, job, partial, merged, first_rank, share);
  }

  void finish(cudaStream_t stream, RowJob const& job, int parts, RowStatistics const* merged,
              JsdSums const* sums, int ranks, std::int64_t stride, float* value,
              Rows const& gradient) const override {
    auto const kernel = job.options.divergence == Divergence::forward_kl
                            ? finish_kernel<Divergence::forward_kl, S, T>
                        : job.options.divergence == Divergence::reverse_kl
                            ? finish_kernel<Divergence::reverse_kl, S, T>
                            : finish_kernel<Divergence::jsd, S, T>;
    for_row_ranges(job.rows(), [&](std::int64_t first, unsigned rows) {
      launch_joined(stream, dim3(static_cast<unsigned>(gradient.data ? parts : 1), rows),
                    block_threads, 0, kernel, job, SegmentOptions::make(job), first, merged, sums,
                    ranks, stride, value, gradient);
    });
  }
};

}  // namespace vpkl::impl::cuda
