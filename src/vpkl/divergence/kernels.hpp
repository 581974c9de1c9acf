// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief The kernels a divergence plan is made of, one implementation for each kind of backend.
#pragma once

#include <vpkl/core/rows.hpp>
#include <vpkl/divergence/row_constants.hpp>

#include <cstdint>
#include <memory>

namespace vpkl::impl {

/// Rows and columns that a kernel works on. Rows of weight 0 are never read.
struct RowJob {
  ConstRows student;
  ConstRows teacher;
  std::int64_t teacher_first = 0;  ///< teacher column that pairs with student column 0
  std::int64_t columns = 0;        ///< columns that count
  float const* weight = nullptr;   ///< null: every weight is 1
  KernelOptions options;

  std::int64_t rows() const { return student.index.count; }
};

/// Kernels over the rows of a job. All are enqueued on `exec`; pointers are to its memory. Each
/// call returns the number of kernels it launched.
template <class ExecutionSpace>
class DivergenceKernels {
 public:
  DivergenceKernels() = default;
  /// \param[in] max_columns, max_rows sizes of the largest job
  DivergenceKernels(ExecutionSpace const& exec, std::int64_t max_rows, std::int64_t max_columns);

  /// \brief Statistics of each row over the job's columns.
  int statistics(ExecutionSpace const& exec, RowJob const& job, RowStatistics* out) const;

  /// \brief Merges the records of `ranks` ranks, `stride` records apart, in rank order.
  int combine(ExecutionSpace const& exec, RowJob const& job, RowStatistics const* gathered,
              int ranks, std::int64_t stride, RowStatistics* merged) const;

  /// \brief JSD's sums of each row over the job's columns.
  int jsd_sums(ExecutionSpace const& exec, RowJob const& job, RowStatistics const* merged,
               JsdSums* out) const;

  /// \brief Values and, where `gradient.data` is set, gradients; zeros beyond the job's columns.
  /// \param[in] sums JSD's, of `ranks` ranks `stride` apart
  int finish(ExecutionSpace const& exec, RowJob const& job, RowStatistics const* merged,
             JsdSums const* sums, int ranks, std::int64_t stride, float* value,
             Rows gradient) const;

  /// \brief statistics, jsd_sums and finish of a whole vocabulary, with the same bits.
  int fused(ExecutionSpace const& exec, RowJob const& job, RowStatistics* merged, JsdSums* sums,
            float* value, Rows gradient) const;

  std::size_t workspace_bytes() const { return partials_.size(); }

 private:
  std::int64_t segments(std::int64_t rows, std::int64_t columns) const;

  int concurrency_ = 1;
  ByteView<ExecutionSpace> partials_;  ///< block records of rows that are split over tasks
};

#if defined(VPKL_ENABLE_CUDA)

namespace cuda {
struct ResidentClusters;
}

/// Plain CUDA kernels on the instance's stream; see cuda/segment.hpp for what fixes their bits.
template <>
class DivergenceKernels<Kokkos::Cuda> {
 public:
  DivergenceKernels() = default;
  /// \brief Also loads every kernel, so that none is loaded while a collective runs.
  DivergenceKernels(Kokkos::Cuda const& exec, std::int64_t max_rows, std::int64_t max_columns);

  int statistics(Kokkos::Cuda const& exec, RowJob const& job, RowStatistics* out) const;
  int combine(Kokkos::Cuda const& exec, RowJob const& job, RowStatistics const* gathered, int ranks,
              std::int64_t stride, RowStatistics* merged) const;
  int jsd_sums(Kokkos::Cuda const& exec, RowJob const& job, RowStatistics const* merged,
               JsdSums* out) const;
  int finish(Kokkos::Cuda const& exec, RowJob const& job, RowStatistics const* merged,
             JsdSums const* sums, int ranks, std::int64_t stride, float* value,
             Rows gradient) const;
  int fused(Kokkos::Cuda const& exec, RowJob const& job, RowStatistics* merged, JsdSums* sums,
            float* value, Rows gradient) const;

  std::size_t workspace_bytes() const { return partials_.size(); }

 private:
  int parts(RowJob const& job, std::int64_t columns) const;

  int multiprocessors_ = 1;
  std::shared_ptr<cuda::ResidentClusters const> resident_;
  ByteView<Kokkos::Cuda> partials_;  ///< segment records of rows that are split over blocks
};

#endif

}  // namespace vpkl::impl
