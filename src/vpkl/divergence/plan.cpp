// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/allocate.hpp>
#include <vpkl/core/error.hpp>
#include <vpkl/divergence/plan.hpp>
#include <vpkl/parallel/agreement.hpp>
#include <vpkl/trace/range.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace vpkl {

namespace {

using trace::Category;
using trace::Phase;

void check_type(char const* who, ElementType type) {
  if (type < ElementType::fp32 || type > ElementType::fp16)
    throw InvalidArgument(fmt::format("divergence plan: {} type is {}, expected fp32, bf16 or fp16",
                                      who, static_cast<int>(type)));
}

void check_plan(Communicator const& comm, VocabShard const& shard, Route route,
                DivergenceOptions const& divergence, std::int64_t max_rows) {
  check_options(divergence);
  if (route < Route::dense || route > Route::vocab_parallel)
    throw InvalidArgument(
        fmt::format("divergence plan: route is {}, expected dense, gathered or vocab_parallel",
                    static_cast<int>(route)));
  if (max_rows < 0)
    throw InvalidArgument(
        fmt::format("divergence plan: max_rows is {}, expected at least 0", max_rows));
  if (route == Route::dense && shard.ranks() != 1)
    throw InvalidArgument(fmt::format(
        "divergence plan: route dense with a shard of {} ranks, expected VocabShard::whole",
        shard.ranks()));
  if (shard.ranks() != comm.size() || shard.rank() != comm.rank())
    throw InvalidArgument(
        fmt::format("divergence plan: the shard is rank {} of {}, the communicator's rank {} of {}",
                    shard.rank(), shard.ranks(), comm.rank(), comm.size()));
  double const width = route == Route::gathered ? static_cast<double>(shard.vocabulary()) : 0;
  double const bytes =
      static_cast<double>(max_rows) * (comm.size() + 2) * (4 * width + sizeof(RowStatistics));
  if (bytes > 0x1p62)
    throw OutOfMemory(fmt::format("divergence plan: max_rows is {}, which takes about {:.3g} bytes",
                                  max_rows, bytes));
}

}  // namespace

template <class ExecutionSpace>
DivergencePlan<ExecutionSpace>::DivergencePlan(ExecutionSpace const& exec, Communicator comm,
                                               VocabShard shard, Options options)
    : comm_(options.route == Route::dense ? Communicator::self() : std::move(comm)),
      shard_(std::move(shard)),
      options_(options) {
  // Memory is taken before the exchange, so that a rank that has none takes all with it.
  Agreement agreement("divergence plan");
  agreement
      .check([&] {
        check_type("student", options_.student_type);
        check_type("teacher", options_.teacher_type);
        check_plan(comm_, shard_, options_.route, options_.divergence, options_.max_rows);
        allocate(exec);
      })
      .equal("routes", options_.route)
      .equal("divergences", options_.divergence.divergence)
      .equal("temperatures", options_.divergence.temperature)
      .equal("betas", options_.divergence.beta)
      .equal("vocabularies", shard_.vocabulary())
      .equal("student types", options_.student_type)
      .equal("teacher types", options_.teacher_type)
      .equal("maximum rows", options_.max_rows);
  try {
    agreement.exchange(comm_);
  } catch (CommunicationError const&) {
    impl::leak<ExecutionSpace>(kernels_);
    impl::leak<ExecutionSpace>(gather_);
    impl::leak<ExecutionSpace>(workspace_);
    throw;
  }
}

template <class ExecutionSpace>
void DivergencePlan<ExecutionSpace>::allocate(ExecutionSpace const& exec) {
  std::int64_t const rows = options_.max_rows;
  bool const gathered = options_.route == Route::gathered && comm_.size() > 1;
  kernels_ = impl::DivergenceKernels<ExecutionSpace>(
      exec, rows, gathered ? shard_.vocabulary() : shard_.width());
  std::size_t bytes = static_cast<std::size_t>(rows) * sizeof(RowStatistics);
  if (gathered) {
    gather_ = std::make_unique<VocabularyGather<ExecutionSpace>>(exec, comm_, shard_,
                                                                 options_.student_type, rows);
    bytes += static_cast<std::size_t>(rows) * sizeof(impl::JsdSums) +
             static_cast<std::size_t>(rows * shard_.vocabulary()) * size_of(options_.student_type);
  } else {
    bytes += static_cast<std::size_t>(comm_.size() * (rows + 1)) * sizeof(RowStatistics);
    log_.emplace(comm_, 1);
  }
  workspace_ = impl::allocate_bytes(exec, "vpkl::DivergencePlan::workspace", bytes);
}

template <class ExecutionSpace>
std::size_t DivergencePlan<ExecutionSpace>::workspace_bytes() const {
  return workspace_.size() + kernels_.workspace_bytes() +
         (gather_ ? gather_->workspace_bytes() : 0);
}

template <class ExecutionSpace>
RowStatistics* DivergencePlan<ExecutionSpace>::merged() const {
  return reinterpret_cast<RowStatistics*>(workspace_.data());
}

template <class ExecutionSpace>
void DivergencePlan<ExecutionSpace>::check_call(ConstRows const& student, ConstRows const& teacher,
                                                char const* result, void const* value,
                                                Rows const& gradient) const {
  std::int64_t const rows = student.index.count;
  check_rows(student, "student logits");
  check_rows(teacher, "teacher logits");
  if (rows > options_.max_rows)
    throw InvalidArgument(fmt::format("student logits: {} rows, expected at most the plan's {}",
                                      rows, options_.max_rows));
  auto const expect = [rows](char const* what, ConstRows const& got, ElementType type,
                             std::int64_t width) {
    if (got.type != type)
      throw InvalidArgument(
          fmt::format("{}: type is {}, expected {}", what, to_string(got.type), to_string(type)));
    if (got.index.count != rows || got.width != width)
      throw InvalidArgument(fmt::format("{}: shape is [{}, {}], expected [{}, {}]", what,
                                        got.index.count, got.width, rows, width));
  };
  bool const whole_teacher = options_.route == Route::gathered;
  expect("student logits", student, options_.student_type, shard_.student_width());
  expect("teacher logits", teacher, options_.teacher_type,
         whole_teacher ? shard_.vocabulary() : shard_.teacher_width());
  if (rows > 0 && value == nullptr)
    throw InvalidArgument(fmt::format("{}: pointer is null, expected {} numbers", result, rows));
  if (gradient.data == nullptr) return;
  check_rows(gradient, "gradient");
  expect("gradient", gradient, options_.student_type, shard_.student_width());
  RowIndex const &g = gradient.index, &s = student.index;
  if (gradient.data == student.data &&
      (g.offsets != s.offsets ||
       (!g.offsets && (g.inner != s.inner || g.outer_stride != s.outer_stride ||
                       g.inner_stride != s.inner_stride))))
    throw InvalidArgument(
        "gradient: starts at the student's logits but has other row positions; "
        "expected the same rows (in place) or other memory");
}

template <class ExecutionSpace>
void DivergencePlan<ExecutionSpace>::execute(ExecutionSpace const& exec, ConstRows const& student,
                                             ConstRows const& teacher, float const* row_weight,
                                             float* value, Rows const& gradient,
                                             std::exception_ptr error,
                                             impl::HeaderLog<ExecutionSpace>* log) {
  if (!error) try {
      check_call(student, teacher, "value", value, gradient);
    } catch (...) {
      error = std::current_exception();
    }
  if (error && comm_.size() == 1) std::rethrow_exception(error);
  impl::RowJob const job = begin_call(student, teacher, row_weight);
  if (comm_.size() == 1)
    execute_local(exec, job, value, gradient);
  else if (options_.route == Route::gathered)
    execute_gathered(exec, job, value, gradient, error, log);
  else
    execute_parallel(exec, job, value, gradient, error, log);
}

template <class ExecutionSpace>
impl::RowJob DivergencePlan<ExecutionSpace>::begin_call(ConstRows const& student,
                                                        ConstRows const& teacher,
                                                        float const* row_weight) {
  impl::RowJob job;
  job.student = student;
  job.teacher = teacher;
  job.columns = shard_.width();
  job.weight = row_weight;
  job.options = impl::KernelOptions::make(options_.divergence);
  ++counters_.calls;
  counters_.rows += student.index.count;
  return job;
}

template <class ExecutionSpace>
void DivergencePlan<ExecutionSpace>::execute_known(
    ExecutionSpace const& exec, ConstRows const& student, ConstRows const& teacher,
    KnownTeacher const& known, float const* row_weight, double* share, Rows const& gradient,
    std::exception_ptr error, impl::HeaderLog<ExecutionSpace>* log) {
  // The same on every rank.
  if (options_.divergence.divergence != Divergence::forward_kl || options_.route == Route::gathered)
    throw InvalidArgument(fmt::format(
        "known teacher: divergence is {}, route {}, expected forward_kl, vocab_parallel or dense",
        to_string(options_.divergence.divergence), to_string(options_.route)));
  if (!error) try {
      check_call(student, teacher, "share", share, gradient);
    } catch (...) {
      error = std::current_exception();
    }
  if (error && comm_.size() == 1) std::rethrow_exception(error);
  impl::RowJob job = begin_call(student, teacher, row_weight);
  job.known = known;
  if (!merge(exec, job, error, log)) return;
  trace::Range const range(Phase::gradient, Category::kernel, job.rows());
  counters_.kernels +=
      kernels_.finish_known(exec, job, merged(), comm_.rank() == 0, share, gradient);
}

template <class ExecutionSpace>
void DivergencePlan<ExecutionSpace>::add_shares(ExecutionSpace const& exec, std::int64_t rows,
                                                double* shares, float* value) {
  if (rows == 0) return;
  trace::Range const range(Phase::combine, Category::comm, rows);
  if (comm_.size() > 1) {
    comm_.all_gather(exec, shares + comm_.rank() * rows, shares,
                     static_cast<std::size_t>(rows) * sizeof(double));
    ++counters_.collectives;
  }
  counters_.kernels +=
      kernels_.add_shares(exec, rows, shares, comm_.size(), options_.divergence.temperature, value);
}

template <class ExecutionSpace>
void DivergencePlan<ExecutionSpace>::execute_local(ExecutionSpace const& exec,
                                                   impl::RowJob const& job, float* value,
                                                   Rows const& gradient) {
  trace::Range const range(Phase::gradient, Category::kernel, job.rows());
  auto* const sums = reinterpret_cast<impl::JsdSums*>(merged() + job.rows());
  counters_.kernels += kernels_.fused(exec, job, merged(), sums, value, gradient);
}

template <class ExecutionSpace>
void DivergencePlan<ExecutionSpace>::execute_gathered(ExecutionSpace const& exec, impl::RowJob job,
                                                      float* value, Rows const& gradient,
                                                      std::exception_ptr error,
                                                      impl::HeaderLog<ExecutionSpace>* log) {
  std::int64_t const max_rows = options_.max_rows;
  std::int64_t const rows = std::clamp<std::int64_t>(job.rows(), 0, max_rows);
  auto* const sums = reinterpret_cast<impl::JsdSums*>(merged() + max_rows);
  ConstRows const local = job.student;
  Rows const whole{sums + max_rows, options_.student_type, shard_.vocabulary(),
                   RowIndex::strided(rows, shard_.vocabulary())};
  {
    trace::Range const range(Phase::combine, Category::comm, rows);
    counters_.kernels += gather_->execute(exec, local, whole, error, job.weight, log);
    ++counters_.collectives;
  }
  if (error) return;
  job.student = whole;
  job.columns = shard_.vocabulary();
  bool const jsd = options_.divergence.divergence == Divergence::jsd;
  {
    trace::Range const range(Phase::statistics, Category::kernel, rows);
    counters_.kernels += kernels_.statistics(exec, job, merged());
    if (jsd) counters_.kernels += kernels_.jsd_sums(exec, job, merged(), sums);
  }
  trace::Range const range(Phase::gradient, Category::kernel, rows);
  job.student = local;
  job.columns = shard_.width();
  job.teacher_first = shard_.begin();
  counters_.kernels +=
      kernels_.finish(exec, job, merged(), jsd ? sums : nullptr, 1, 0, value, gradient);
}

/// Statistics of every row over all ranks, in merged().
/// \return whether this rank may go on
template <class ExecutionSpace>
bool DivergencePlan<ExecutionSpace>::merge(ExecutionSpace const& exec, impl::RowJob const& job,
                                           std::exception_ptr error,
                                           impl::HeaderLog<ExecutionSpace>* log) {
  std::int64_t const max_rows = options_.max_rows;
  std::int64_t const rows = std::clamp<std::int64_t>(job.rows(), 0, max_rows);
  int const ranks = comm_.size();
  if (ranks == 1) {
    trace::Range const range(Phase::statistics, Category::kernel, rows);
    counters_.kernels += kernels_.statistics(exec, job, merged());
    return true;
  }
  RowStatistics* const gathered = merged() + max_rows;
  // As many records as the largest call has: the message is whole even where ranks bring different
  // numbers of rows, and the headers tell it.
  std::int64_t const stride = max_rows + 1;
  RowStatistics* const own = gathered + comm_.rank() * stride;
  {
    trace::Range const range(Phase::statistics, Category::kernel, rows);
    impl::MessageHeader header;
    header.error = static_cast<std::int32_t>(error_kind(error));
    header.rows = rows;
    counters_.kernels += impl::write_header(exec, header, own);
    if (!error) counters_.kernels += kernels_.statistics(exec, job, own + 1);
  }
  {
    trace::Range const range(Phase::combine, Category::comm, rows);
    std::size_t const bytes = static_cast<std::size_t>(stride) * sizeof(RowStatistics);
    void const* const arrived = comm_.all_gather(exec, own, gathered, bytes);
    ++counters_.collectives;
    impl::check_message(exec, comm_, arrived, gathered, bytes, error, log, *log_);
    if (!error)
      counters_.kernels += kernels_.combine(exec, job, gathered + 1, ranks, stride, merged());
  }
  return !error;
}

template <class ExecutionSpace>
void DivergencePlan<ExecutionSpace>::execute_parallel(ExecutionSpace const& exec,
                                                      impl::RowJob const& job, float* value,
                                                      Rows const& gradient,
                                                      std::exception_ptr error,
                                                      impl::HeaderLog<ExecutionSpace>* log) {
  bool const goes_on = merge(exec, job, error, log);
  std::int64_t const max_rows = options_.max_rows;
  std::int64_t const rows = std::clamp<std::int64_t>(job.rows(), 0, max_rows);
  int const ranks = comm_.size();
  auto* const sums = reinterpret_cast<impl::JsdSums*>(merged() + max_rows);
  bool const jsd = options_.divergence.divergence == Divergence::jsd;
  if (jsd) {
    trace::Range const range(Phase::combine, Category::comm, rows);
    impl::JsdSums* const own_sums = sums + comm_.rank() * max_rows;
    if (goes_on) counters_.kernels += kernels_.jsd_sums(exec, job, merged(), own_sums);
    comm_.all_gather(exec, own_sums, sums,
                     static_cast<std::size_t>(max_rows) * sizeof(impl::JsdSums));
    ++counters_.collectives;
  }
  if (!goes_on) return;
  trace::Range const range(Phase::gradient, Category::kernel, rows);
  counters_.kernels +=
      kernels_.finish(exec, job, merged(), jsd ? sums : nullptr, ranks, max_rows, value, gradient);
}

#define VPKL_INSTANTIATE(Exec) template class DivergencePlan<Exec>;
VPKL_FOREACH_EXECUTION_SPACE(VPKL_INSTANTIATE)
#undef VPKL_INSTANTIATE

}  // namespace vpkl
