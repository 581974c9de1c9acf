// SPDX-License-Identifier: Apache-2.0
#include "session.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace vpkl::test {

namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

VocabShard::Spec spec_of(Setup const& setup, Communicator const& comm, std::int64_t vocabulary) {
  auto const bounds = setup.bounds.empty() ? even_bounds(vocabulary, comm.size()) : setup.bounds;
  bool const dense = setup.route == Route::dense;
  VocabShard::Spec spec;
  spec.vocabulary = vocabulary;
  spec.begin = dense ? 0 : bounds[comm.rank()];
  spec.end = dense ? vocabulary : bounds[comm.rank() + 1];
  spec.student_width = spec.end - spec.begin + setup.student_padding;
  spec.teacher_width = spec.end - spec.begin + setup.teacher_padding;
  return spec;
}

VocabShard make_shard(Setup const& setup, Communicator const& comm, std::int64_t vocabulary) {
  return VocabShard::make(setup.route == Route::dense ? Communicator::self() : comm,
                          spec_of(setup, comm, vocabulary));
}

template <class Exec>
typename TeacherCache<Exec>::Options cache_options(Setup const& setup, VocabShard const& shard,
                                                   double temperature) {
  typename TeacherCache<Exec>::Options options;
  options.mode = setup.cache;
  options.store_type = setup.store_type;
  if (setup.statistics)
    options.statistics = TeacherStatistics{
        temperature, setup.route == Route::gathered ? shard.vocabulary() : shard.width()};
  return options;
}

template <class Exec>
typename StreamedLoss<Exec>::Options loss_options(Setup const& setup,
                                                  DivergenceOptions divergence) {
  typename StreamedLoss<Exec>::Options options;
  options.divergence = divergence;
  options.route = setup.route;
  options.plan = setup.plan;
  options.chunk_width = setup.chunk_width;
  options.skip_empty_chunks = setup.skip;
  return options;
}

/// Columns [begin, end) of whole rows; padding holds what would show if it were read.
template <class Set>
void fill_rows(std::vector<float> const& whole, std::int64_t rows, std::int64_t vocabulary,
               std::int64_t begin, std::int64_t end, std::int64_t width, Set&& set) {
  constexpr float poison[] = {nan_value, 1e4f, 0.0f, std::numeric_limits<float>::infinity()};
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < width; ++c)
      set(r, c, c < end - begin ? whole[r * vocabulary + begin + c] : poison[c % 4]);
}

CommunicationCounters since(CommunicationCounters const& before, CommunicationCounters const& now) {
  CommunicationCounters d;
  d.all_gathers = now.all_gathers - before.all_gathers;
  d.all_gather_bytes = now.all_gather_bytes - before.all_gather_bytes;
  d.all_reduces = now.all_reduces - before.all_reduces;
  d.records = now.records - before.records;
  return d;
}

OperatorCounters since(OperatorCounters const& before, OperatorCounters const& now) {
  return {now.calls - before.calls, now.rows - before.rows, now.kernels - before.kernels,
          now.collectives - before.collectives};
}

CacheCounters since(CacheCounters const& before, CacheCounters now) {
  now.fetches -= before.fetches;
  now.fetched_rows -= before.fetched_rows;
  now.fetched_bytes -= before.fetched_bytes;
  return now;
}

}  // namespace

std::int64_t MicroBatch::tokens() const {
  std::int64_t n = 0;
  for (std::int64_t row = 0; row < batch * length; ++row)
    n += counts(row) ? 1 : 0;
  return n;
}

double MicroBatch::loss_factor() const {
  if (normalization.kind == Normalization::Kind::global_divisor) return 1 / normalization.divisor;
  return tokens() == 0 ? 0 : 1.0 / static_cast<double>(tokens());
}

double MicroBatch::gradient_factor() const {
  bool const mean = normalization.kind == Normalization::Kind::token_mean;
  double const steps = mean ? static_cast<double>(normalization.gradient_accumulation_steps) : 1.0;
  return loss_factor() * normalization.loss_scale / steps;
}

MicroBatch random_batch(Random& random, std::int64_t batch, std::int64_t length,
                        std::int64_t vocabulary) {
  MicroBatch out(batch, length, vocabulary, {});
  for (float& x : out.problem.student)
    x = static_cast<float>(2 * normal(random));
  for (float& x : out.problem.teacher)
    x = static_cast<float>(2 * normal(random));
  std::int64_t const density = uniform(random, 0, 10);
  for (std::int64_t i = 0; i < batch * length; ++i)
    out.mask.push_back(uniform(random, 0, 9) < density ? 1 : 0);
  return out;
}

std::string Setup::describe() const {
  return fmt::format(
      "route {} plan {} width {} skip {} cache {} store type {} bounds [{}] padding {} {} gaps {} "
      "{} "
      "batch gaps {} {} mask gap {}{}{}{}{}{}",
      to_string(route), to_string(plan), chunk_width, skip, to_string(cache),
      store_type ? to_string(*store_type) : "same", fmt::join(bounds, ", "), student_padding,
      teacher_padding, student_gap, gradient_gap, student_batch_gap, gradient_batch_gap, mask_gap,
      statistics ? " statistics" : "", flat ? " flat" : "", in_place ? " in place" : "",
      packed ? " packed" : "", values_only ? " values only" : "");
}

template <class Exec>
BatchTensor<Exec>::BatchTensor(ElementType type, std::int64_t batch, std::int64_t length,
                               std::int64_t width, std::int64_t gap, std::int64_t batch_gap,
                               bool flat)
    : batch_(batch),
      length_(length),
      batch_gap_(flat ? 0 : batch_gap),
      flat_(flat),
      tensor_(type, {batch * (length + batch_gap_), width, gap, 1}) {
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t t = length; t < length + batch_gap_; ++t)
      for (std::int64_t c = 0; c < width; ++c)
        tensor_.set(b * (length + batch_gap_) + t, c, 7);
}

template <class Exec>
Rows BatchTensor<Exec>::rows() const {
  Rows rows = tensor_.rows(0, batch_ * (length_ + batch_gap_));
  std::int64_t const stride = rows.index.inner_stride;
  rows.index = flat_ ? RowIndex::strided(batch_ * length_, stride)
                     : RowIndex{batch_ * length_, std::max<std::int64_t>(length_, 1),
                                (length_ + batch_gap_) * stride, stride, nullptr};
  return rows;
}

template <class Exec>
bool BatchTensor<Exec>::untouched() const {
  for (std::int64_t b = 0; b < batch_; ++b)
    for (std::int64_t t = length_; t < length_ + batch_gap_; ++t)
      for (std::int64_t c = 0; c < width(); ++c)
        if (tensor_.get(b * (length_ + batch_gap_) + t, c) != 7) return false;
  return tensor_.untouched();
}

template <class Exec>
Session<Exec>::Session(Exec const& exec, Communicator comm, MicroBatch batch, Setup setup)
    : shard(make_shard(setup, comm, batch.problem.vocabulary)),
      cache(setup.route == Route::dense ? Communicator::self() : comm,
            cache_options<Exec>(setup, shard, batch.problem.options.temperature)),
      loss(comm, shard, loss_options<Exec>(setup, batch.problem.options)),
      normalization(batch.normalization),
      exec_(exec),
      comm_(std::move(comm)),
      batch_(std::move(batch)),
      setup_(std::move(setup)),
      student_(batch_.problem.student_type, batch_.batch, batch_.length, shard.student_width(),
               setup_.student_gap, setup_.student_batch_gap, setup_.flat),
      gradient_(batch_.problem.student_type,
                setup_.in_place ? 0
                : setup_.packed ? 1
                                : batch_.batch,
                setup_.packed ? batch_.tokens() : batch_.length, shard.student_width(),
                setup_.gradient_gap, setup_.gradient_batch_gap, setup_.flat) {
  std::int64_t const stride = batch_.length + setup_.mask_gap;
  mask_bytes_.assign(static_cast<std::size_t>(batch_.batch * stride), 1);
  for (std::int64_t b = 0; b < batch_.batch; ++b)
    std::copy_n(batch_.mask.begin() + b * batch_.length, batch_.length,
                mask_bytes_.begin() + b * stride);
  mask = {mask_bytes_.data(), batch_.batch, batch_.length, setup_.mask_gap ? stride : 0};
  student = student_.rows();
  if (!setup_.values_only) gradient = setup_.in_place ? student_.rows() : gradient_.rows();
}

template <class Exec>
void Session<Exec>::fill() {
  std::int64_t const rows = batch_.batch * batch_.length;
  fill_rows(batch_.problem.student, rows, batch_.problem.vocabulary, shard.begin(), shard.end(),
            student_.width(),
            [&](std::int64_t r, std::int64_t c, float v) { student_.set(r, c, v); });
  std::int64_t const written = setup_.in_place ? 0 : setup_.packed ? batch_.tokens() : rows;
  for (std::int64_t r = 0; r < written; ++r)
    for (std::int64_t c = 0; c < gradient_.width(); ++c)
      gradient_.set(r, c, nan_value);
  student_.to_device();
  gradient_.to_device();
}

template <class Exec>
void Session<Exec>::store() {
  store(cache);
}

template <class Exec>
void Session<Exec>::store(TeacherCache<Exec>& into) {
  std::int64_t const rows = batch_.batch * batch_.length;
  std::int64_t const vocabulary = batch_.problem.vocabulary;
  ElementType const type = batch_.problem.teacher_type;
  Tensor<Exec> local(type, {rows, shard.teacher_width(), 3});
  fill_rows(batch_.problem.teacher, rows, vocabulary, shard.begin(), shard.end(), local.width(),
            [&](std::int64_t r, std::int64_t c, float v) { local.set(r, c, v); });
  local.to_device();
  std::vector<std::int64_t> listed;
  if (setup_.cache == CacheMode::response)
    for (std::int64_t row = 0; row < rows; ++row)
      if (batch_.counts(row)) listed.push_back(row);
  if (setup_.route != Route::gathered) {
    into.store(exec_, local.rows(0, rows), batch_.batch, batch_.length, listed);
    return;
  }
  Tensor<Exec> whole(type, {rows, vocabulary, 1});
  VocabularyGather<Exec> gather(exec_, comm_, shard, type, rows);
  gather.execute(exec_, local.rows(0, rows), whole.rows(0, rows));
  into.store(exec_, whole.rows(0, rows), batch_.batch, batch_.length, listed);
}

template <class Exec>
LossResult Session<Exec>::compute() {
  fill();
  return loss.compute(exec_, student, cache, mask, normalization, gradient);
}

template <class Exec>
Streamed Session<Exec>::run() {
  CommunicationCounters const comm_before = comm_.counters();
  OperatorCounters const loss_before = loss.counters();
  CacheCounters const cache_before = cache.counters();
  Streamed out;
  std::int64_t const waits_before = vpkl::impl::host_waits;
  out.result = compute();
  out.host_waits = vpkl::impl::host_waits - waits_before;
  vpkl::impl::fence(exec_, "vpkl_test::Session::run");
  out.rows.communication = since(comm_before, comm_.counters());
  out.rows.plan = since(loss_before, loss.counters());
  out.cache = since(cache_before, cache.counters());
  out.rows.value = loss.row_values();
  student_.to_host();
  gradient_.to_host();

  std::int64_t const rows = batch_.batch * batch_.length;
  EXPECT_EQ(static_cast<std::int64_t>(out.rows.value.size()), rows);
  EXPECT_TRUE(student_.untouched()) << "memory between rows of the student was written";
  EXPECT_TRUE(gradient_.untouched()) << "memory between rows of the gradient was written";
  BatchTensor<Exec> const& result = setup_.in_place ? student_ : gradient_;
  if (!setup_.in_place)
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < shard.width(); ++c) {
        float const given =
            rounded(batch_.problem.student_type,
                    batch_.problem.student[r * batch_.problem.vocabulary + shard.begin() + c]);
        float const now = student_.get(r, c);
        if (std::memcmp(&now, &given, sizeof now) != 0 && !(std::isnan(now) && std::isnan(given)))
          ADD_FAILURE() << "student logits were written: row " << r << " column " << c;
      }

  // Bring everything together: loss, values and gradient columns in slots of fixed size.
  std::size_t const size = size_of(batch_.problem.student_type);
  std::size_t const values = static_cast<std::size_t>(rows) * sizeof(float);
  std::size_t const heads = sizeof out.result.loss + values;
  std::size_t const row_bytes = static_cast<std::size_t>(shard.largest_width()) * size;
  std::size_t const slot = heads + static_cast<std::size_t>(rows) * row_bytes;
  std::vector<unsigned char> local(slot), all(slot * static_cast<std::size_t>(comm_.size()));
  std::memcpy(local.data(), &out.result.loss, sizeof out.result.loss);
  if (values > 0) std::memcpy(local.data() + sizeof out.result.loss, out.rows.value.data(), values);
  std::int64_t next = 0;
  for (std::int64_t r = 0; r < (setup_.values_only ? 0 : rows); ++r) {
    bool const held = !setup_.packed || batch_.counts(r);
    std::int64_t const at = setup_.packed ? next : r;
    next += held ? 1 : 0;
    auto const row =
        held ? result.bits(at, shard.width())
             : std::vector<unsigned char>(static_cast<std::size_t>(shard.width()) * size);
    std::copy(row.begin(), row.end(), local.begin() + heads + r * row_bytes);
    out.local.insert(out.local.end(), row.begin(), row.end());
    for (std::int64_t c = shard.width(); held && c < result.width(); ++c)
      EXPECT_EQ(result.get(at, c), 0.0f) << "padding column " << c << " of row " << r;
  }
  comm_.exchange_record(local.data(), all.data(), slot);
  std::size_t const common = shard.ranks() == 1 ? slot : heads;
  for (int rank = 1; rank < comm_.size(); ++rank)
    EXPECT_TRUE(std::equal(all.begin(), all.begin() + common, all.begin() + rank * slot))
        << "results differ between rank 0 and rank " << rank;
  if (setup_.values_only) return out;
  for (std::int64_t r = 0; r < rows; ++r)
    for (int rank = 0; rank < shard.ranks(); ++rank) {
      auto const from = all.begin() + rank * slot + heads + r * row_bytes;
      auto const bytes =
          (shard.bounds()[rank + 1] - shard.bounds()[rank]) * static_cast<std::int64_t>(size);
      out.rows.bits.insert(out.rows.bits.end(), from, from + bytes);
    }
  for (std::size_t i = 0; i < out.rows.bits.size(); i += size)
    out.rows.gradient.push_back(
        read_element(batch_.problem.student_type, out.rows.bits.data() + i));
  return out;
}

template <class Exec>
Streamed run_streamed(Exec const& exec, Communicator const& comm, MicroBatch const& batch,
                      Setup const& setup) {
  Session<Exec> session(exec, comm, batch, setup);
  session.store();
  return session.run();
}

void expect_right(Communicator const& comm, MicroBatch const& batch, Streamed const& streamed,
                  std::string const& what, bool with_gradient) {
  Problem problem = batch.problem;
  problem.round();
  std::int64_t const rows = batch.batch * batch.length;
  float const weight = static_cast<float>(batch.gradient_factor());
  problem.weight.clear();
  for (std::int64_t row = 0; row < rows; ++row)
    problem.weight.push_back(batch.counts(row) ? weight : 0.0f);
  expect_close(comm, problem, streamed.rows, what, with_gradient);

  EXPECT_EQ(streamed.result.tokens, batch.tokens()) << what;
  long double const t = problem.options.temperature;
  long double part[2] = {};  // Σ value and its slack over this rank's share of the rows
  for (std::int64_t row = comm.rank(); row < rows; row += comm.size()) {
    OracleRow const o = oracle(problem.student_row(row), problem.teacher_row(row),
                               problem.weight[row], oracle_options(problem.options));
    part[0] += o.value;
    part[1] += 1e-6L * o.value_scale + 0x1p-24L * std::fabs(o.value) + t * t * 0x1p-50L;
  }
  std::vector<long double> parts(2 * static_cast<std::size_t>(comm.size()));
  comm.exchange_record(part, parts.data(), sizeof part);
  long double sum = 0, slack = 0;
  for (std::size_t i = 0; i < parts.size(); i += 2) {
    sum += parts[i];
    slack += parts[i + 1];
  }
  long double const factor = batch.loss_factor(), loss = factor * sum;
  if (batch.tokens() == 0) {
    EXPECT_EQ(streamed.result.loss, 0) << what;
  } else if (std::isfinite(loss)) {
    EXPECT_NEAR(streamed.result.loss, static_cast<double>(loss),
                static_cast<double>(factor * slack + 1e-12L * std::fabs(loss)))
        << what;
  }
}

void expect_same_bits(Streamed const& a, Streamed const& b, std::string const& what) {
  EXPECT_EQ(std::memcmp(&a.result.loss, &b.result.loss, sizeof a.result.loss), 0)
      << what << ": losses " << a.result.loss << " and " << b.result.loss;
  bool const values = a.rows.value.size() == b.rows.value.size() &&
                      std::equal(a.rows.value.begin(), a.rows.value.end(), b.rows.value.begin(),
                                 [](float x, float y) { return std::memcmp(&x, &y, 4) == 0; });
  EXPECT_TRUE(values) << what << ": values differ";
  EXPECT_TRUE(a.local == b.local) << what << ": gradients differ";
}

#define VPKL_INSTANTIATE(Exec)      \
  template class BatchTensor<Exec>; \
  template class Session<Exec>;     \
  template Streamed run_streamed(Exec const&, Communicator const&, MicroBatch const&, Setup const&);
VPKL_FOREACH_EXECUTION_SPACE(VPKL_INSTANTIATE)
#undef VPKL_INSTANTIATE

}  // namespace vpkl::test
