// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/allocate.hpp>
#include <vpkl/core/copy_rows.hpp>
#include <vpkl/core/error.hpp>
#include <vpkl/parallel/agreement.hpp>
#include <vpkl/teacher/row_store.hpp>
#include <vpkl/trace/range.hpp>
#include <vpkl/training/fetch_lane.hpp>
#include <vpkl/training/streamed_loss.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

namespace vpkl {

namespace {

std::size_t aligned(std::size_t bytes) { return (bytes + 15) / 16 * 16; }

void grow(OperatorCounters& to, OperatorCounters const& by) {
  to.calls += by.calls;
  to.rows += by.rows;
  to.kernels += by.kernels;
  to.collectives += by.collectives;
}

/// What a rank tells about its gradient, besides false and true.
constexpr std::int64_t unknown = -1;

void check_gradients_asked(std::vector<std::vector<std::int64_t>> const& told) {
  std::size_t first = 0;
  for (std::size_t r = 0; r < told.size(); ++r) {
    std::int64_t const asked = told[r].back();
    if (told[first].back() == unknown) first = r;
    if (asked != unknown && asked != told[first].back())
      throw AgreementError(
          fmt::format("streamed loss: gradients asked differ: {} on rank {}, {} on rank {}",
                      told[first].back() != 0, first, asked != 0, r));
  }
}

trace::Range chunk_range(std::size_t chunk) {
  return {trace::Phase::chunk, trace::Category::phase, static_cast<std::int64_t>(chunk)};
}

bool same_positions(RowIndex const& a, RowIndex const& b) {
  if (a.count != b.count) return false;
  for (std::int64_t row = 0; row < a.count; ++row)
    if (a(row) != b(row)) return false;
  return true;
}

void check_offsets(char const* what, ConstRows const& rows) {
  if (rows.index.offsets != nullptr)
    throw InvalidArgument(
        fmt::format("{}: rows have explicit offsets, expected regular strides", what));
}

/// `[B, T]` rows, or all at one stride.
void check_batches(char const* what, ConstRows const& rows, ResponseMask const& mask) {
  if (rows.index.count > 0 && rows.index.inner != mask.length &&
      rows.index.inner < rows.index.count)
    throw InvalidArgument(fmt::format("{}: {} rows per outer step, expected the {} positions", what,
                                      rows.index.inner, mask.length));
}

/// \return whether it has the counted rows alone
bool check_gradient(Rows const& gradient, ConstRows const& student, ResponseMask const& mask,
                    ChunkPlan const& plan) {
  check_rows(gradient, "gradient");
  bool const packed = gradient.index.count != student.index.count;
  bool const may_pack = plan.kind() == PlanKind::rows;
  if ((packed && !(may_pack && gradient.index.count == plan.tokens())) ||
      gradient.width != student.width)
    throw InvalidArgument(fmt::format(
        "gradient: shape is [{}, {}], expected [{} · {}, {}]{}", gradient.index.count,
        gradient.width, mask.batch, mask.length, student.width,
        may_pack ? fmt::format(" or the counted rows [{}, {}]", plan.tokens(), student.width)
                 : ""));
  check_offsets("gradient", gradient);
  if (!packed) check_batches("gradient", gradient, mask);
  if (gradient.type != student.type)
    throw InvalidArgument(fmt::format("gradient: type is {}, expected the student's {}",
                                      to_string(gradient.type), to_string(student.type)));
  if (gradient.data == student.data && gradient.width > 0 &&
      !same_positions(student.index, gradient.index))
    throw InvalidArgument(
        "gradient: starts at the student's logits but has other row positions; expected the same "
        "rows (in place) or other memory");
  return packed;
}

}  // namespace

/// One micro-batch on its way through: what is asked, the plan for it, and its small arrays in
/// device memory, one entry a row of the plan.
template <class ExecutionSpace>
struct StreamedLoss<ExecutionSpace>::Batch {
  ConstRows student;
  Rows gradient;
  bool packed = false;  ///< the gradient has the counted rows alone
  ElementType teacher_type = ElementType::fp32;
  std::int64_t batch = 0, length = 0;
  std::optional<ChunkPlan> plan;
  float row_weight = 0;
  std::size_t chunk_bytes = 0;  ///< of one teacher buffer

  float* values = nullptr;
  float* weights = nullptr;
  std::uint8_t* uncounted = nullptr;  ///< one entry a row of [B, T]
  std::int64_t* student_offsets = nullptr;
  std::int64_t* gradient_offsets = nullptr;
  // Where the teacher's statistics are used; else null.
  double* shares = nullptr;         ///< `[ranks, rows of the plan]`
  std::int64_t* records = nullptr;  ///< of the rows' statistics
};

template <class ExecutionSpace>
StreamedLoss<ExecutionSpace>::StreamedLoss(Communicator comm, VocabShard shard, Options options)
    : comm_(options.route == Route::dense ? Communicator::self() : std::move(comm)),
      shard_(std::move(shard)),
      options_(options) {
  Agreement("streamed loss")
      .check([&] {
        check_options(options_.divergence);
        if (options_.chunk_width < 1)
          throw InvalidArgument(
              fmt::format("chunk width is {}, expected at least 1", options_.chunk_width));
      })
      .exchange(comm_);
}

template <class ExecutionSpace>
void StreamedLoss<ExecutionSpace>::check_batch(std::int32_t const* tokens,
                                               ResponseMask const& mask) const {
  Agreement agreement("micro-batch");
  agreement.check([&] {
    check_mask(mask);
    if (mask.batch * mask.length > 0 && tokens == nullptr)
      throw InvalidArgument(
          fmt::format("tokens: pointer is null, expected [{}, {}]", mask.batch, mask.length));
    std::size_t const count = static_cast<std::size_t>(mask.batch * mask.length);
    agreement.equal("batch sizes", mask.batch)
        .equal("sequence lengths", mask.length)
        .equal_hash("tokens", hash_bytes(tokens, count * sizeof tokens[0]))
        .equal_hash("masks", hash_mask(mask));
  });
  agreement.exchange(comm_);
}

template <class ExecutionSpace>
bool StreamedLoss<ExecutionSpace>::uses_statistics(
    TeacherCache<ExecutionSpace> const& cache) const {
  return cache.options().statistics && comm_.size() > 1 &&
         options_.route == Route::vocab_parallel &&
         options_.divergence.divergence == Divergence::forward_kl;
}

template <class ExecutionSpace>
void StreamedLoss<ExecutionSpace>::check_call(ConstRows const& student,
                                              TeacherCache<ExecutionSpace> const& cache,
                                              ResponseMask const& mask,
                                              Normalization const& normalization) const {
  check_mask(mask);
  check_normalization(normalization);
  check_rows(student, "student logits");
  if (student.index.count != mask.batch * mask.length || student.width != shard_.student_width())
    throw InvalidArgument(fmt::format("student logits: shape is [{}, {}], expected [{} · {}, {}]",
                                      student.index.count, student.width, mask.batch, mask.length,
                                      shard_.student_width()));
  check_offsets("student logits", student);
  check_batches("student logits", student, mask);
  if (!cache.holds_rows())
    throw InvalidArgument("teacher cache: it is empty, expected this micro-batch's rows");
  std::int64_t const width = teacher_width();
  if (cache.batch() != mask.batch || cache.length() != mask.length || cache.width() != width)
    throw InvalidArgument(fmt::format("teacher cache: shape is [{}, {}, {}], expected [{}, {}, {}]",
                                      cache.batch(), cache.length(), cache.width(), mask.batch,
                                      mask.length, width));
  if (!uses_statistics(cache)) return;
  TeacherStatistics const& statistics = *cache.options().statistics;
  if (statistics.temperature != options_.divergence.temperature)
    throw InvalidArgument(
        fmt::format("teacher cache: its statistics are of temperature {}, expected the loss's {}",
                    statistics.temperature, options_.divergence.temperature));
  std::int64_t const columns = statistics.columns < 0 ? width : statistics.columns;
  if (columns != shard_.width())
    throw InvalidArgument(
        fmt::format("teacher cache: its statistics are of {} columns, expected the shard's {}",
                    columns, shard_.width()));
}

template <class ExecutionSpace>
LossResult StreamedLoss<ExecutionSpace>::compute(
    ExecutionSpace const& exec, ConstRows const& student, TeacherCache<ExecutionSpace>& cache,
    ResponseMask const& mask, Normalization const& normalization, Rows const& gradient) {
  try {
    Batch batch;
    batch.student = student;
    batch.gradient = gradient;
    batch.teacher_type = cache.type();
    batch.batch = mask.batch;
    batch.length = mask.length;
    std::optional<impl::HeaderLog<ExecutionSpace>> log;
    Agreement agreement("streamed loss");
    agreement.equal("batch sizes", mask.batch).equal("sequence lengths", mask.length);
    agreement.check([&] {
      check_call(student, cache, mask, normalization);
      batch.plan.emplace(mask, options_.plan, options_.chunk_width, options_.skip_empty_chunks);
      if (gradient.data) batch.packed = check_gradient(gradient, student, mask, *batch.plan);
      if (gradient.data == student.data) batch.gradient.index = student.index;
      batch.row_weight = static_cast<float>(normalization.row_weight(batch.plan->tokens()));
      // A weight of 0 would mean "does not count".
      if (batch.plan->tokens() > 0 && !std::isnormal(batch.row_weight))
        throw InvalidArgument(fmt::format(
            "normalization: the weight of a row is {}, expected a normal single-precision number",
            normalization.row_weight(batch.plan->tokens())));
      prepare(exec, cache, batch);
      log.emplace(comm_, static_cast<std::int64_t>(batch.plan->chunks().size()));
      agreement.equal_hash("masks", hash_mask(mask));
    });
    // Without elements, also of a packed gradient, there is no telling whether a null pointer asks
    // for one.
    bool const nothing_counts = !batch.plan || batch.plan->tokens() == 0 || student.width == 0;
    agreement.equal("plans", options_.plan)
        .equal("chunk widths", options_.chunk_width)
        .equal("skipping", options_.skip_empty_chunks)
        .equal("routes", options_.route)
        .equal("divergences", options_.divergence.divergence)
        .equal("temperatures", options_.divergence.temperature)
        .equal("betas", options_.divergence.beta)
        .equal("normalizations", normalization.kind)
        .equal("divisors", normalization.divisor)
        .equal("gradient accumulation steps", normalization.gradient_accumulation_steps)
        .equal("loss scales", normalization.loss_scale)
        .equal("student types", student.type)
        .equal("teacher types", cache.type())
        .equal("cache modes", cache.options().mode)
        .equal("use of statistics", uses_statistics(cache))
        .tell("gradients asked", nothing_counts ? unknown : gradient.data != nullptr);
    check_gradients_asked(agreement.exchange(comm_));

    ChunkPlan const& plan = *batch.plan;
    ensure_plan(exec, batch);
    run_chunks(exec, batch, cache, *log);
    if (batch.shares)
      plan_->add_shares(exec, static_cast<std::int64_t>(plan.rows().size()), batch.shares,
                        batch.values);
    std::vector<float> const values =
        copies_->values(exec, const_cast<float const*>(batch.values), plan.rows().size(),
                        [&] { comm_.wait(exec); });
    log->check();
    row_values_.assign(static_cast<std::size_t>(mask.batch * mask.length), 0.0f);
    for (std::size_t i = 0; i < values.size(); ++i)
      row_values_[plan.rows()[i]] = values[i];

    LossResult result;
    result.tokens = plan.tokens();
    result.chunks = static_cast<std::int64_t>(plan.chunks().size());
    result.skipped_chunks = plan.skipped();
    if (plan.tokens() > 0)
      result.loss = tree_sum(row_values_) * normalization.loss_factor(plan.tokens());
    return result;
  } catch (...) {
    cache.free();
    throw;
  }
}

template <class ExecutionSpace>
void StreamedLoss<ExecutionSpace>::prepare(ExecutionSpace const& exec,
                                           TeacherCache<ExecutionSpace> const& cache,
                                           Batch& batch) {
  ChunkPlan const& plan = *batch.plan;
  std::size_t const rows = plan.rows().size();
  std::size_t const all = static_cast<std::size_t>(batch.batch * batch.length);
  bool const listed = plan.kind() == PlanKind::rows;
  bool const in_place = batch.gradient.data == batch.student.data;

  bool const known = uses_statistics(cache);

  // Values and shares come first and are not uploaded: every row of the plan gets them.
  std::size_t const offsets = listed ? rows * sizeof(std::int64_t) : 0;
  std::size_t const values = aligned(rows * sizeof(float));
  std::size_t const shares =
      known ? static_cast<std::size_t>(comm_.size()) * rows * sizeof(double) : 0;
  std::size_t const part[] = {values + aligned(shares),
                              aligned(rows * sizeof(float)),
                              aligned(all),
                              aligned(offsets),
                              batch.gradient.data && !in_place ? aligned(offsets) : 0,
                              known ? aligned(rows * sizeof(std::int64_t)) : 0};
  std::size_t const upload = part[1] + part[2] + part[3] + part[4] + part[5],
                    bytes = part[0] + upload;
  if (small_.size() < bytes) small_ = {};
  if (small_.size() < bytes) small_ = impl::allocate_bytes(exec, "vpkl::StreamedLoss::rows", bytes);
  if (!copies_) copies_ = std::make_shared<impl::SmallCopies<ExecutionSpace>>();
  unsigned char* host = copies_->room(upload, rows * sizeof(float));
  unsigned char* device = small_.data() + part[0];
  batch.values = reinterpret_cast<float*>(small_.data());
  if (known) batch.shares = reinterpret_cast<double*>(small_.data() + values);
  auto const place = [&](std::size_t i, auto*& on_device) {
    using T = typename std::remove_reference<decltype(*on_device)>::type;
    on_device = reinterpret_cast<T*>(device);
    T* const on_host = reinterpret_cast<T*>(host);
    device += part[i];
    host += part[i];
    return on_host;
  };
  float* const weights = place(1, batch.weights);
  std::uint8_t* const uncounted = place(2, batch.uncounted);
  std::int64_t* const student_offsets = place(3, batch.student_offsets);
  std::int64_t* const gradient_offsets = place(4, batch.gradient_offsets);
  std::int64_t* const records = place(5, batch.records);
  if (in_place) batch.gradient_offsets = batch.student_offsets;

  // A chunk's own kernel writes its uncounted rows.
  std::fill_n(uncounted, all, std::uint8_t{1});
  for (std::size_t i = 0; i < rows; ++i) {
    std::int64_t const row = plan.rows()[i];
    weights[i] = plan.counted()[i] ? batch.row_weight : 0.0f;
    uncounted[row] = 0;
    if (known) records[i] = cache.record(row);
    if (!listed) continue;
    student_offsets[i] = batch.student.index(row);
    if (part[4] > 0)
      gradient_offsets[i] = batch.gradient.index(batch.packed ? static_cast<std::int64_t>(i) : row);
  }
  copies_->upload(exec, small_.data() + part[0]);

  if (!lane_) lane_ = std::make_shared<impl::FetchLane<ExecutionSpace>>(exec);
  std::size_t const buffers =
      std::min<std::size_t>(impl::FetchLane<ExecutionSpace>::depth, plan.chunks().size());
  batch.chunk_bytes =
      static_cast<std::size_t>(plan.largest_chunk() *
                               impl::row_pitch(teacher_width(), batch.teacher_type)) *
      size_of(batch.teacher_type);
  if (teacher_.size() < buffers * batch.chunk_bytes) teacher_ = {};
  if (teacher_.size() < buffers * batch.chunk_bytes)
    teacher_ =
        impl::allocate_bytes(exec, "vpkl::StreamedLoss::teacher", buffers * batch.chunk_bytes);
}

template <class ExecutionSpace>
void StreamedLoss<ExecutionSpace>::ensure_plan(ExecutionSpace const& exec, Batch const& batch) {
  typename DivergencePlan<ExecutionSpace>::Options options;
  options.divergence = options_.divergence;
  options.route = options_.route;
  options.student_type = batch.student.type;
  options.teacher_type = batch.teacher_type;
  options.max_rows = batch.plan->largest_chunk();
  if (plan_ && plan_->options().student_type == options.student_type &&
      plan_->options().teacher_type == options.teacher_type &&
      plan_->options().max_rows >= options.max_rows)
    return;
  if (plan_) grow(retired_, plan_->counters());
  plan_.reset();
  plan_ = std::make_unique<DivergencePlan<ExecutionSpace>>(exec, comm_, shard_, options);
}

template <class ExecutionSpace>
ConstRows StreamedLoss<ExecutionSpace>::chunk_rows(Batch const& batch,
                                                   ChunkPlan::Chunk const& chunk,
                                                   ConstRows const& rows,
                                                   std::int64_t const* offsets) const {
  ConstRows part = rows;
  part.index = RowIndex{};
  part.index.count = chunk.rows;
  if (batch.plan->kind() == PlanKind::rows) {
    part.index.offsets = offsets + chunk.first_row;
    return part;
  }
  RowIndex const& index = rows.index;
  part.data = static_cast<unsigned char const*>(rows.data) +
              static_cast<std::size_t>(chunk.begin * index.inner_stride) * size_of(rows.type);
  part.index.inner = chunk.end - chunk.begin;
  part.index.inner_stride = index.inner_stride;
  part.index.outer_stride =
      index.inner == batch.length ? index.outer_stride : batch.length * index.inner_stride;
  return part;
}

/// A chunk's fetch passes over rows that the cache does not hold; only rows that do not count may
/// be among them.
template <class ExecutionSpace>
void StreamedLoss<ExecutionSpace>::check_held(ChunkPlan const& plan, ChunkPlan::Chunk const& chunk,
                                              TeacherCache<ExecutionSpace> const& cache) {
  for (std::int64_t i = chunk.first_row; i < chunk.first_row + chunk.rows; ++i)
    if (plan.counted()[i] && !cache.holds(plan.rows()[i]))
      throw InvalidArgument(fmt::format(
          "teacher cache: row {} counts, but is not held; expected every row that counts",
          plan.rows()[i]));
}

template <class ExecutionSpace>
void StreamedLoss<ExecutionSpace>::run_chunks(ExecutionSpace const& exec, Batch const& batch,
                                              TeacherCache<ExecutionSpace>& cache,
                                              impl::HeaderLog<ExecutionSpace>& log) {
  constexpr int depth = impl::FetchLane<ExecutionSpace>::depth;
  auto const& chunks = batch.plan->chunks();
  std::int64_t const pitch = impl::row_pitch(teacher_width(), batch.teacher_type);
  auto const buffer = [&](std::size_t i) { return static_cast<int>(i % depth); };
  auto const teacher = [&](std::size_t i) {
    return Rows{teacher_.data() + static_cast<std::size_t>(buffer(i)) * batch.chunk_bytes,
                batch.teacher_type, teacher_width(), RowIndex::strided(chunks[i].rows, pitch)};
  };
  RowStatistics const* const statistics = batch.shares ? cache.begin_statistics(exec) : nullptr;
  std::exception_ptr errors[depth];
  auto const start_fetch = [&](std::size_t i) {
    if (i >= chunks.size()) return;
    errors[buffer(i)] = nullptr;
    auto const range = chunk_range(i);
    try {
      fetch(lane_->fetching(buffer(i)), batch, chunks[i], cache, teacher(i));
      lane_->fetched(buffer(i));
    } catch (...) {
      errors[buffer(i)] = std::current_exception();
    }
  };
  for (std::size_t i = 0; i + 1 < depth; ++i)
    start_fetch(i);
  if (batch.gradient.data && !batch.packed)
    impl::zero_rows(exec, "vpkl::StreamedLoss::zero", batch.gradient, batch.uncounted);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    start_fetch(i + depth - 1);
    auto const range = chunk_range(i);
    lane_->computing(exec, buffer(i));
    run_chunk(exec, batch, chunks[i], teacher(i), statistics, errors[buffer(i)], log);
    lane_->computed(exec, buffer(i));
  }
  if (statistics) cache.end_statistics(exec);
}

template <class ExecutionSpace>
void StreamedLoss<ExecutionSpace>::fetch(ExecutionSpace const& exec, Batch const& batch,
                                         ChunkPlan::Chunk const& chunk,
                                         TeacherCache<ExecutionSpace>& cache,
                                         Rows const& teacher) const {
  if (batch.plan->kind() == PlanKind::rows) {
    auto const first = batch.plan->rows().begin() + chunk.first_row;
    cache.fetch_rows(exec, std::vector<std::int64_t>(first, first + chunk.rows), teacher);
  } else {
    check_held(*batch.plan, chunk, cache);
    cache.fetch_chunk(exec, chunk.begin, chunk.end, teacher);
  }
}

template <class ExecutionSpace>
void StreamedLoss<ExecutionSpace>::run_chunk(ExecutionSpace const& exec, Batch const& batch,
                                             ChunkPlan::Chunk const& chunk, Rows const& teacher,
                                             RowStatistics const* statistics,
                                             std::exception_ptr error,
                                             impl::HeaderLog<ExecutionSpace>& log) {
  ConstRows const student = chunk_rows(batch, chunk, batch.student, batch.student_offsets);
  Rows gradient;
  if (batch.gradient.data) {
    ConstRows const part = chunk_rows(batch, chunk, batch.gradient, batch.gradient_offsets);
    gradient = {const_cast<void*>(part.data), part.type, part.width, part.index};
  }
  float const* const weights = batch.weights + chunk.first_row;
  if (!batch.shares)
    return plan_->execute(exec, student, teacher, weights, batch.values + chunk.first_row, gradient,
                          error, &log);
  double* const own = batch.shares +
                      static_cast<std::size_t>(comm_.rank()) * batch.plan->rows().size() +
                      chunk.first_row;
  plan_->execute_known(exec, student, teacher, {statistics, batch.records + chunk.first_row},
                       weights, own, gradient, error, &log);
}

template <class ExecutionSpace>
OperatorCounters StreamedLoss<ExecutionSpace>::counters() const {
  OperatorCounters total = retired_;
  if (plan_) grow(total, plan_->counters());
  return total;
}

template <class ExecutionSpace>
std::size_t StreamedLoss<ExecutionSpace>::workspace_bytes() const {
  return teacher_.size() + small_.size() + (plan_ ? plan_->workspace_bytes() : 0);
}

#define VPKL_INSTANTIATE(Exec) template class StreamedLoss<Exec>;
VPKL_FOREACH_EXECUTION_SPACE(VPKL_INSTANTIATE)
#undef VPKL_INSTANTIATE

}  // namespace vpkl
