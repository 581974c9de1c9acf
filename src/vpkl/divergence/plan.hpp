// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief DivergencePlan: value and gradient of a divergence over a sharded vocabulary.
#pragma once

#include <vpkl/core/rows.hpp>
#include <vpkl/divergence/gather.hpp>
#include <vpkl/divergence/kernels.hpp>
#include <vpkl/divergence/options.hpp>
#include <vpkl/parallel/communicator.hpp>
#include <vpkl/vocab/shard.hpp>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>

namespace vpkl {

/// What a plan has done; proves which path ran.
struct OperatorCounters {
  std::int64_t calls = 0;        ///< of execute
  std::int64_t rows = 0;         ///< over all calls, those of weight 0 included
  std::int64_t kernels = 0;      ///< launched
  std::int64_t collectives = 0;  ///< made with the other ranks
};

/// Value and gradient of a divergence between teacher and student logits, row by row, on the local
/// shard of the vocabulary.
///
/// With z = logits / T, lse over the whole vocabulary, p = e^(z - lse), w = row_weight:
/// - forward KL: value T² Σ pt (log pt - log ps), gradient T w (ps - pt)
/// - reverse KL: value T² Σ ps (log ps - log pt) = T² D, gradient T w ps (log ps - log pt - D)
/// - JSD: value T² (β D(pt‖m) + (1-β) D(ps‖m)), gradient T w (1-β) ps (log(ps/m) - D(ps‖m))
///
/// Statistics, sums and the order they are formed in depend on the row's logits alone: results are
/// bitwise the same for any grouping of rows into calls, and values for every rank. A column that
/// is -inf in both models adds nothing and gets gradient 0; -inf only where the weighing model has
/// support gives value +inf; a row without support in one model NaN with gradient 0; NaN or +inf
/// logits NaN in value and gradient on every rank.
template <class ExecutionSpace>
class DivergencePlan {
 public:
  /// Equal on every rank.
  struct Options {
    DivergenceOptions divergence;                  ///< divergence, beta and temperature
    Route route = Route::vocab_parallel;           ///< how the vocabulary is brought together
    ElementType student_type = ElementType::fp32;  ///< also the gradient's
    ElementType teacher_type = ElementType::fp32;  ///< may be another
    std::int64_t max_rows = 0;                     ///< rows of the largest call
  };

  /// \brief Collective over `comm` (no communication with Route::dense). Owns the workspace:
  /// 32 · (ranks + 1) bytes a row, plus the gathered student rows with Route::gathered.
  /// \param[in] exec instance whose memory holds the workspace; execute may get others there
  /// \param[in] comm the tensor-parallel group
  /// \param[in] shard `VocabShard::whole` with Route::dense
  /// \param[in] options equal on every rank; max_rows bounds the calls
  /// \throws InvalidArgument, AgreementError, OutOfMemory on every rank
  DivergencePlan(ExecutionSpace const& exec, Communicator comm, VocabShard shard, Options options);

  /// \brief One call over `student.index.count` rows; all ranks pass the same rows.
  ///
  /// Makes one all-gather (JSD with Route::vocab_parallel two) over more than one rank. Work is
  /// enqueued on `exec`; over more than one rank the statistics are awaited. A bad argument on one
  /// rank makes every rank throw.
  /// \param[in] exec instance that the work is enqueued on, after what is enqueued there already
  /// \param[in] student `[rows, student_width]` local logits
  /// \param[in] teacher `[rows, teacher_width]`; with Route::gathered `[rows, vocabulary]`
  /// \param[in] row_weight `[rows]`, or null for 1; rows of weight 0 are never read
  /// \param[out] value `[rows]` divergence times T², 0 for rows of weight 0
  /// \param[out] gradient `[rows, student_width]` of Σ row_weight · value, in the student's type;
  /// may be the student's rows; data null: values only
  /// \param[in] error a failure of this rank since the last collective: every rank throws it
  /// \param[in] log where the ranks' failures go if the call is not to wait for them: it then
  /// throws none, and what it has written is worth nothing where the log's check() throws
  /// \throws InvalidArgument, CommunicationError
  void execute(ExecutionSpace const& exec, ConstRows const& student, ConstRows const& teacher,
               float const* row_weight, float* value, Rows const& gradient,
               std::exception_ptr error = nullptr, impl::HeaderLog<ExecutionSpace>* log = nullptr);

  /// \brief execute() of forward KL whose teacher's statistics are known: the same gradient, bit by
  /// bit, for one read of the teacher instead of two.
  ///
  /// Makes one all-gather over more than one rank. The values then lack a sum over columns, which
  /// is left to add_shares(): one message for as many calls as wanted.
  /// \param[in] exec, student, teacher, row_weight as for execute()
  /// \param[in] known of every row that has a weight, of the shard's columns and at the plan's
  /// temperature; without records, statistics are made of both models
  /// \param[out] share `[rows]` this rank's shares of the values
  /// \param[out] gradient as for execute()
  /// \param[in] error, log as for execute()
  /// \throws InvalidArgument, also for another divergence or route; CommunicationError
  void execute_known(ExecutionSpace const& exec, ConstRows const& student, ConstRows const& teacher,
                     KnownTeacher const& known, float const* row_weight, double* share,
                     Rows const& gradient, std::exception_ptr error = nullptr,
                     impl::HeaderLog<ExecutionSpace>* log = nullptr);

  /// \brief Values of calls of execute_known(). Collective; one all-gather over more than one rank.
  /// \param[in] exec instance that the work is enqueued on
  /// \param[in] rows of all calls; equal on every rank
  /// \param[in,out] shares `[ranks, rows]`, of which this rank's row holds its shares
  /// \param[out] value `[rows]` divergence times T², 0 for rows of weight 0
  void add_shares(ExecutionSpace const& exec, std::int64_t rows, double* shares, float* value);

  Options const& options() const { return options_; }             ///< as given
  VocabShard const& shard() const { return shard_; }              ///< as given
  OperatorCounters const& counters() const { return counters_; }  ///< since construction
  /// \brief Bytes of device memory that the plan owns.
  std::size_t workspace_bytes() const;

 private:
  void allocate(ExecutionSpace const& exec);
  void check_call(ConstRows const& student, ConstRows const& teacher, char const* result,
                  void const* value, Rows const& gradient) const;
  impl::RowJob begin_call(ConstRows const& student, ConstRows const& teacher,
                          float const* row_weight);
  bool merge(ExecutionSpace const& exec, impl::RowJob const& job, std::exception_ptr error,
             impl::HeaderLog<ExecutionSpace>* log);
  RowStatistics* merged() const;
  void execute_local(ExecutionSpace const& exec, impl::RowJob const& job, float* value,
                     Rows const& gradient);
  void execute_gathered(ExecutionSpace const& exec, impl::RowJob job, float* value,
                        Rows const& gradient, std::exception_ptr error,
                        impl::HeaderLog<ExecutionSpace>* log);
  void execute_parallel(ExecutionSpace const& exec, impl::RowJob const& job, float* value,
                        Rows const& gradient, std::exception_ptr error,
                        impl::HeaderLog<ExecutionSpace>* log);

  Communicator comm_;
  VocabShard shard_;
  Options options_;
  impl::DivergenceKernels<ExecutionSpace> kernels_;
  std::unique_ptr<VocabularyGather<ExecutionSpace>> gather_;
  ByteView<ExecutionSpace> workspace_;  ///< merged records, then gathered records or sums
  std::optional<impl::HeaderLog<ExecutionSpace>> log_;  ///< of one call that waits
  OperatorCounters counters_;
};

}  // namespace vpkl
