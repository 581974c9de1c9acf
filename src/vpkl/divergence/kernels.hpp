// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief The kernels a divergence plan is made of, one implementation for each kind of backend.
#pragma once

#include <vpkl/core/rows.hpp>
#include <vpkl/divergence/row_constants.hpp>

#include <cstdint>
#include <memory>

namespace vpkl {

/// Statistics of the teacher's rows that are known already: of the columns of this rank, at the
/// divergence's temperature.
struct KnownTeacher {
  RowStatistics const* records = nullptr;  ///< of a teacher alone; null: nothing is known
  std::int64_t const* index = nullptr;     ///< the record of each row; null: in the rows' order
};

}  // namespace vpkl

namespace vpkl::impl {

/// Rows and columns that a kernel works on. Rows of weight 0 are never read.
struct RowJob {
  ConstRows student;
  ConstRows teacher;
  std::int64_t teacher_first = 0;  ///< teacher column that pairs with student column 0
  std::int64_t columns = 0;        ///< columns that count
  float const* weight = nullptr;   ///< null: every weight is 1
  KernelOptions options;
  KnownTeacher known;
  bool teacher_alone = false;  ///< the student's rows are a teacher's, and there is no other model
  ElementType read_as = ElementType::fp32;  ///< teacher_alone: what logits are rounded to

  /// \brief Statistics of a teacher's rows alone; see teacher_statistics().
  static RowJob of_teacher(ConstRows const& teacher, std::int64_t columns, ElementType type,
                           double temperature) {
    RowJob job;
    job.student = teacher;
    job.columns = columns;
    job.options = KernelOptions::of_teacher(temperature);
    job.teacher_alone = true;
    job.read_as = type;
    return job;
  }
  std::int64_t rows() const { return student.index.count; }
  /// \brief Element of a teacher's row that pairs with the student's column 0.
  KOKKOS_INLINE_FUNCTION std::int64_t teacher_element(std::int64_t row) const {
    return teacher.index(row) + teacher_first;
  }
  /// \brief Whether statistics are made of the student's rows without a teacher's.
  KOKKOS_INLINE_FUNCTION bool one_model() const {
    return teacher_alone || known.records != nullptr;
  }
  /// \brief A row's record from that of the student's row without a teacher's.
  KOKKOS_INLINE_FUNCTION RowStatistics completed(std::int64_t row, RowStatistics r) const {
    if (teacher_alone) {
      r.sum_teacher = r.sum_student;
      r.max_teacher = r.max_student;
      r.sum_student = 0;
      r.max_student = -infinity;
      return r;
    }
    RowStatistics const& teacher = known.records[known.index ? known.index[row] : row];
    r.sum_teacher = teacher.sum_teacher;
    r.max_teacher = teacher.max_teacher;
    r.flags |= teacher.flags;
    return r;
  }
};

/// \brief Statistics for KnownTeacher, enqueued on `exec`.
/// \param[in] teacher its rows; `index.offsets` in memory that the instance can read
/// \param[in] columns that count, from the first
/// \param[in] type that the logits are rounded to before
/// \param[out] records one a row
template <class ExecutionSpace>
void teacher_statistics(ExecutionSpace const& exec, ConstRows const& teacher, std::int64_t columns,
                        ElementType type, double temperature, RowStatistics* records);

/// Kernels over the rows of a job. All are enqueued on `exec`; pointers are to its memory. Each
/// call returns the number of kernels it launched.
template <class ExecutionSpace>
class DivergenceKernels {
 public:
  DivergenceKernels() = default;
  /// \param[in] max_columns, max_rows sizes of the largest job
  DivergenceKernels(ExecutionSpace const& exec, std::int64_t max_rows, std::int64_t max_columns);

  /// \brief Statistics of each row over the job's columns; reads the student alone where the
  /// teacher's are known.
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

  /// \brief finish() of forward KL where the teacher's statistics were known: the gradient with
  /// the same bits, and this rank's share of the values.
  /// \param[in] first whether this rank adds what is not a sum over columns
  /// \param[out] share of each row; add_shares() makes values of them
  int finish_known(ExecutionSpace const& exec, RowJob const& job, RowStatistics const* merged,
                   bool first, double* share, Rows gradient) const;

  /// \brief Values from the shares of `ranks` ranks, `rows` apart, added in rank order.
  int add_shares(ExecutionSpace const& exec, std::int64_t rows, double const* shares, int ranks,
                 double temperature, float* value) const;

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

template <>
void teacher_statistics(Kokkos::Cuda const&, ConstRows const&, std::int64_t, ElementType, double,
                        RowStatistics*);

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
  int finish_known(Kokkos::Cuda const& exec, RowJob const& job, RowStatistics const* merged,
                   bool first, double* share, Rows gradient) const;
  int add_shares(Kokkos::Cuda const& exec, std::int64_t rows, double const* shares, int ranks,
                 double temperature, float* value) const;
  int fused(Kokkos::Cuda const& exec, RowJob const& job, RowStatistics* merged, JsdSums* sums,
            float* value, Rows gradient) const;

  std::size_t workspace_bytes() const { return partials_.size(); }

 private:
  int parts(RowJob const& job, std::int64_t columns, int blocks) const;

  int multiprocessors_ = 1;
  std::shared_ptr<cuda::ResidentClusters const> resident_;
  ByteView<Kokkos::Cuda> partials_;  ///< segment records of rows that are split over blocks
};

#endif

}  // namespace vpkl::impl
