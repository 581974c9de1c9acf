// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief StreamedLoss: a micro-batch's distillation loss, a chunk of rows at a time.
#pragma once

#include <vpkl/core/rows.hpp>
#include <vpkl/divergence/plan.hpp>
#include <vpkl/loss/chunk_plan.hpp>
#include <vpkl/loss/normalization.hpp>
#include <vpkl/parallel/communicator.hpp>
#include <vpkl/teacher/cache.hpp>
#include <vpkl/vocab/shard.hpp>

#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

namespace vpkl {

namespace impl {
template <class ExecutionSpace>
class FetchLane;
template <class ExecutionSpace>
class SmallCopies;
}  // namespace impl

/// Result of one micro-batch.
struct LossResult {
  double loss = 0;          ///< without gradient accumulation and loss scale; equal on every rank
  std::int64_t tokens = 0;  ///< rows that counted
  std::int64_t chunks = 0;  ///< operator calls
  std::int64_t skipped_chunks = 0;  ///< without counted rows; neither fetched nor computed
};

/// Distillation loss of `[B, T, V]` student logits against a TeacherCache, value and gradient.
///
/// Ranks first agree on extents, plan, options and mask by one exchange of records; chunks without
/// counted rows are then neither fetched nor computed on any rank. Each chunk is fetched, goes
/// through the operator (one all-gather, JSD two) and is dropped; on a device the next chunk's
/// fetch overlaps this chunk's work, on a stream of the loss's own. Loss and gradient are bitwise
/// the same for every plan, chunk width and skipping.
///
/// Where the cache keeps the teacher's statistics, forward KL over several ranks reads each teacher
/// row once instead of twice; its gradient keeps its bits, and the values' last sums, the same up
/// to rounding, are exchanged in one more message at the end. Elsewhere the statistics are not
/// needed and not used.
template <class ExecutionSpace>
class StreamedLoss {
 public:
  /// Equal on every rank.
  struct Options {
    DivergenceOptions divergence;         ///< divergence, beta and temperature
    Route route = Route::vocab_parallel;  ///< how the vocabulary is brought together
    PlanKind plan = PlanKind::rows;       ///< how the counted rows are cut
    std::int64_t chunk_width = 256;       ///< positions; see ChunkPlan
    bool skip_empty_chunks = true;        ///< false computes chunks without counted rows, too
  };

  /// \brief Collective; one exchange of records over more than one rank.
  /// \param[in] comm the tensor-parallel group (not used with Route::dense)
  /// \param[in] shard ids of this rank's columns; `VocabShard::whole` with Route::dense
  /// \param[in] options equal on every rank
  /// \throws InvalidArgument on every rank for options outside their domain on one
  StreamedLoss(Communicator comm, VocabShard shard, Options options);

  /// \brief Collective. Optional, once a micro-batch: the group holds the same tokens and mask.
  /// \param[in] tokens `[batch, length]` in host memory, contiguous
  /// \param[in] mask response mask, host memory, unshifted
  /// \throws AgreementError naming what differs
  void check_batch(std::int32_t const* tokens, ResponseMask const& mask) const;

  /// \brief Collective. Loss of one micro-batch, and its gradient where asked.
  ///
  /// Returns when the loss is known on the host; the gradient is enqueued on `exec`. On failure the
  /// cache is freed and the gradient's content unspecified.
  /// \param[in] exec instance that made the student's logits; the gradient is there for its later
  /// work
  /// \param[in] student `[batch · length, student_width]`, row b·T + t at regular strides
  /// \param[in] cache the teacher's rows of this micro-batch; with Route::gathered whole rows
  /// \param[in] mask response mask, host memory, unshifted
  /// \param[in] normalization what the sum over rows is divided and multiplied by
  /// \param[out] gradient as `student`, or data null; may be the student's rows. Rows that do not
  /// count are written 0. With PlanKind::rows also `[tokens, student_width]`: the counted rows
  /// alone, in their order.
  /// \throws InvalidArgument, AgreementError, OutOfMemory, CommunicationError on every rank
  LossResult compute(ExecutionSpace const& exec, ConstRows const& student,
                     TeacherCache<ExecutionSpace>& cache, ResponseMask const& mask,
                     Normalization const& normalization, Rows const& gradient);

  /// \brief Values (times T²) of the last micro-batch, one a row of `[B, T]`; 0 where not counted.
  std::vector<float> const& row_values() const { return row_values_; }

  Options const& options() const { return options_; }  ///< as given
  /// \brief Sum over all plans this loss has made.
  OperatorCounters counters() const;
  /// \brief Bytes of device memory owned: the plan's, the fetched chunks', the row lists'.
  std::size_t workspace_bytes() const;

 private:
  struct Batch;
  bool uses_statistics(TeacherCache<ExecutionSpace> const& cache) const;
  void check_call(ConstRows const& student, TeacherCache<ExecutionSpace> const& cache,
                  ResponseMask const& mask, Normalization const& normalization) const;
  void prepare(ExecutionSpace const& exec, TeacherCache<ExecutionSpace> const& cache, Batch& batch);
  void ensure_plan(ExecutionSpace const& exec, Batch const& batch);
  void run_chunks(ExecutionSpace const& exec, Batch const& batch,
                  TeacherCache<ExecutionSpace>& cache, impl::HeaderLog<ExecutionSpace>& log);
  void fetch(ExecutionSpace const& exec, Batch const& batch, ChunkPlan::Chunk const& chunk,
             TeacherCache<ExecutionSpace>& cache, Rows const& teacher) const;
  void run_chunk(ExecutionSpace const& exec, Batch const& batch, ChunkPlan::Chunk const& chunk,
                 Rows const& teacher, RowStatistics const* statistics, std::exception_ptr error,
                 impl::HeaderLog<ExecutionSpace>& log);
  std::int64_t teacher_width() const {
    return options_.route == Route::gathered ? shard_.vocabulary() : shard_.teacher_width();
  }
  static void check_held(ChunkPlan const& plan, ChunkPlan::Chunk const& chunk,
                         TeacherCache<ExecutionSpace> const& cache);
  ConstRows chunk_rows(Batch const& batch, ChunkPlan::Chunk const& chunk, ConstRows const& rows,
                       std::int64_t const* offsets) const;

  Communicator comm_;
  VocabShard shard_;
  Options options_;
  std::unique_ptr<DivergencePlan<ExecutionSpace>> plan_;
  OperatorCounters retired_;
  std::shared_ptr<impl::FetchLane<ExecutionSpace>> lane_;
  std::shared_ptr<impl::SmallCopies<ExecutionSpace>> copies_;
  ByteView<ExecutionSpace> teacher_, small_;
  std::vector<float> row_values_;
};

}  // namespace vpkl
