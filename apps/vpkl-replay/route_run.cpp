// SPDX-License-Identifier: Apache-2.0
#include "route_run.hpp"

#include <vpkl/io/sha256.hpp>
#include <vpkl/parallel/agreement.hpp>
#include <vpkl/trace/range.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace vpkl::replay {

namespace {

struct ScaleAndTest {
  float* gradient;
  float factor;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t& bad) const {
    gradient[i] *= factor;
    if (!std::isfinite(gradient[i])) ++bad;
  }
};

struct WeighWord {
  std::uint16_t const* words;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::uint64_t& sum) const {
    sum += (words[i] + std::uint64_t(1)) * (2 * static_cast<std::uint64_t>(i) + 1);
  }
};

/// Changes with any single word, and needs no copy on the host.
std::uint64_t fingerprint(Exec const& exec, void const* data, std::size_t bytes) {
  std::uint64_t sum = 0;
  Kokkos::parallel_reduce(
      "vpkl::replay::fingerprint",
      impl::RangePolicy64<Exec>(exec, 0, static_cast<std::int64_t>(bytes / sizeof(std::uint16_t))),
      WeighWord{static_cast<std::uint16_t const*>(data)}, sum);
  return sum;
}

VocabShard make_shard(Communicator const& comm, Rollouts const& rollouts, Route route) {
  FixtureInfo const& info = rollouts.fixture().info();
  if (route == Route::dense) return VocabShard::whole(info.vocabulary_size);
  auto const [begin, end] = even_range(info.vocabulary_size, comm.size(), comm.rank());
  VocabShard::Spec spec;
  spec.vocabulary = info.vocabulary_size;
  spec.begin = begin;
  spec.end = end;
  spec.student_width = spec.teacher_width = end - begin;
  spec.tokens = {info.tokenizer_fingerprint, info.bos_token_id, info.eos_token_id,
                 info.pad_token_id};
  return VocabShard::make(comm, spec);
}

CommunicationCounters difference(CommunicationCounters a, CommunicationCounters const& b) {
  a.all_gathers -= b.all_gathers;
  a.all_gather_bytes -= b.all_gather_bytes;
  a.all_reduces -= b.all_reduces;
  a.records -= b.records;
  return a;
}

}  // namespace

RouteRun::RouteRun(Exec const& exec, ProcessGrid const& grid, Rollouts const& rollouts,
                   Options const& options, Route route)
    : exec_(exec),
      grid_(grid),
      rollouts_(rollouts),
      options_(options),
      route_(route),
      tensor_(route == Route::dense ? Communicator::self() : grid.tensor_parallel()),
      shard_(make_shard(tensor_, rollouts, route)) {
  // Heads come from files: one rank's damaged copy must end all.
  Agreement("heads")
      .check([&] {
        student_type_ = rollouts_.fixture().head_type(Side::student);
        teacher_type_ = rollouts_.fixture().head_type(Side::teacher);
        student_head_ = read_head(Side::student);
        teacher_head_ = read_head(Side::teacher);
      })
      .exchange(grid_.world());
  std::int64_t const parameters =
      shard_.width() * rollouts_.fixture().model(Side::student).hidden_size;
  head_gradient_ =
      Kokkos::View<float*, Exec::memory_space>("vpkl::replay::head_gradient", parameters);
  optimizer_ = std::make_unique<apps::AdamW<Exec>>(exec_, options_.optimizer, student_head_.data(),
                                                   student_type_, parameters);
  TeacherCache<Exec>::Options cache;
  cache.mode = options_.cache_mode;
  cache.memory_budget = static_cast<std::size_t>(options_.cache_budget);
  cache.engine = options_.transfer_engine;
  if (options_.teacher_statistics && route_ == Route::vocab_parallel)
    cache.statistics = TeacherStatistics{options_.divergence.temperature, shard_.width()};
  cache_ = std::make_unique<TeacherCache<Exec>>(tensor_, cache);
  StreamedLoss<Exec>::Options loss;
  loss.divergence = options_.divergence;
  loss.route = route_;
  loss.plan = options_.plan;
  loss.chunk_width = options_.chunk_width;
  loss_ = std::make_unique<StreamedLoss<Exec>>(tensor_, shard_, loss);
  if (route_ == Route::gathered && tensor_.size() > 1)
    gather_ = std::make_unique<VocabularyGather<Exec>>(exec_, tensor_, shard_, options_.logits_type,
                                                       options_.batch_size * rollouts_.length());
  before_ = tensor_.counters();
}

Bytes RouteRun::read_head(Side side) {
  RolloutFixture const& fixture = rollouts_.fixture();
  std::size_t const bytes =
      static_cast<std::size_t>(shard_.width() * fixture.model(side).hidden_size) *
      size_of(fixture.head_type(side));
  Bytes weights(Kokkos::view_alloc(exec_, "vpkl::replay::head", Kokkos::WithoutInitializing),
                bytes);
  auto const host = Kokkos::create_mirror_view(weights);
  fixture.read_head(side, shard_.begin(), shard_.width(), host.data());
  Kokkos::deep_copy(exec_, weights, host);
  exec_.fence();
  return weights;
}

apps::Matrix RouteRun::head(Bytes const& weights, ElementType type,
                            std::int64_t hidden_size) const {
  return {weights.data(), type, shard_.width(), hidden_size};
}

void RouteRun::cache_teacher(MicroBatch const& batch) {
  std::int64_t const rows = batch.batch * batch.length;
  trace::Range const range(trace::Phase::teacher, trace::Category::phase, rows);
  ElementType const type = options_.logits_type;
  auto const allocate = [&](std::int64_t width) {
    return Bytes(Kokkos::view_alloc(exec_, "vpkl::replay::logits", Kokkos::WithoutInitializing),
                 static_cast<std::size_t>(rows * width) * size_of(type));
  };
  Bytes logits = allocate(shard_.width());
  std::int64_t width = shard_.width();
  apps::head_forward(exec_, batch.teacher.matrix,
                     head(teacher_head_, teacher_type_, batch.teacher.matrix.columns),
                     {logits.data(), type, rows, width});
  if (gather_) {
    Bytes const whole = allocate(shard_.vocabulary());
    gather_->execute(exec_, ConstRows{logits.data(), type, width, RowIndex::strided(rows, width)},
                     Rows{whole.data(), type, shard_.vocabulary(),
                          RowIndex::strided(rows, shard_.vocabulary())});
    logits = whole;
    width = shard_.vocabulary();
  }
  cache_->store(exec_, ConstRows{logits.data(), type, width, RowIndex::strided(rows, width)},
                batch.batch, batch.length,
                options_.cache_mode == CacheMode::response ? batch.counted_rows()
                                                           : std::vector<std::int64_t>{});
  exec_.fence();
}

LossResult RouteRun::run(MicroBatch const& batch, Normalization const& normalization,
                         bool backward) {
  loss_->check_batch(batch.tokens.data(), batch.response_mask());
  cache_teacher(batch);
  std::int64_t const rows = batch.batch * batch.length, width = shard_.width();
  ElementType const type = options_.logits_type;
  Bytes const logits(Kokkos::view_alloc(exec_, "vpkl::replay::logits", Kokkos::WithoutInitializing),
                     static_cast<std::size_t>(rows * width) * size_of(type));
  std::int64_t const hidden_size = batch.student.matrix.columns;
  apps::head_forward(exec_, batch.student.matrix, head(student_head_, student_type_, hidden_size),
                     {logits.data(), type, rows, width});
  Rows const student{logits.data(), type, width, RowIndex::strided(rows, width)};
  // The logits become their gradient.
  LossResult const result = loss_->compute(exec_, student, *cache_, batch.response_mask(),
                                           normalization, backward ? student : Rows{});
  if (backward)
    apps::head_backward(exec_, {logits.data(), type, rows, width}, batch.student.matrix,
                        {head_gradient_.data(), ElementType::fp32, width, hidden_size});
  exec_.fence();
  cache_->free();
  return result;
}

UpdateResult RouteRun::update(std::int64_t update) {
  std::vector<MicroBatch> batches;
  std::int64_t tokens = 0;
  for (std::int64_t step = 0; step < options_.accumulation_steps; ++step) {
    std::int64_t const index =
        (update * options_.accumulation_steps + step) * grid_.data_parallel().size() +
        grid_.data_parallel_index();
    batches.push_back(
        rollouts_.micro_batch(exec_, index * options_.batch_size, options_.batch_size));
    tokens += ChunkPlan(batches.back().response_mask(), PlanKind::rows, 1).tokens();
  }
  UpdateResult result;
  // Also lines the ranks up for the clock.
  for (auto const& told :
       Agreement("update").tell("tokens", tokens).exchange(grid_.data_parallel()))
    result.tokens += told[0];
  Agreement("update").equal("numbers", update).exchange(grid_.world());

  auto const start = std::chrono::steady_clock::now();
  trace::Range const range(trace::Phase::update, trace::Category::phase, update);
  Normalization normalization;
  normalization.kind = options_.normalization;
  normalization.divisor = static_cast<double>(std::max<std::int64_t>(result.tokens, 1));
  normalization.gradient_accumulation_steps = options_.accumulation_steps;
  normalization.loss_scale = options_.loss_scale;
  bool const mean = normalization.kind == Normalization::Kind::token_mean;
  Kokkos::deep_copy(exec_, head_gradient_, 0.0f);
  double loss = 0;
  for (MicroBatch const& batch : batches)
    loss += run(batch, normalization, true).loss /
            (mean ? static_cast<double>(options_.accumulation_steps) : 1.0);

  int const replicas = grid_.data_parallel().size();
  if (replicas > 1) {
    grid_.data_parallel().all_reduce_sum(exec_, head_gradient_.data(),
                                         static_cast<std::int64_t>(head_gradient_.size()));
    grid_.data_parallel().wait(exec_);
  }
  result.loss = shared_loss(loss) / (mean ? replicas : 1);
  result.applied = finite_everywhere(result.loss);
  if (result.applied) optimizer_->step(exec_, head_gradient_.data(), student_head_.data());
  exec_.fence();
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

double RouteRun::evaluate() {
  Normalization normalization;
  normalization.kind = Normalization::Kind::global_divisor;
  normalization.divisor =
      static_cast<double>(std::max<std::int64_t>(rollouts_.response_tokens(), 1));
  double loss = 0;
  for (std::int64_t first = 0; first < rollouts_.samples(); first += options_.batch_size)
    loss += run(rollouts_.micro_batch(exec_, first,
                                      std::min(options_.batch_size, rollouts_.samples() - first)),
                normalization, false)
                .loss;
  return loss;
}

double RouteRun::shared_loss(double local) const {
  std::int64_t bits;
  std::memcpy(&bits, &local, sizeof bits);
  double sum = 0;
  for (auto const& told : Agreement("loss").tell("loss", bits).exchange(grid_.data_parallel())) {
    double value;
    std::memcpy(&value, &told[0], sizeof value);
    sum += value;
  }
  return sum;
}

bool RouteRun::finite_everywhere(double loss) {
  double const factor =
      1.0 / options_.loss_scale /
      (options_.normalization == Normalization::Kind::token_mean ? grid_.data_parallel().size()
                                                                 : 1);
  std::int64_t bad = 0;
  Kokkos::parallel_reduce("vpkl::replay::scale_gradient",
                          Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(
                              exec_, 0, static_cast<std::int64_t>(head_gradient_.size())),
                          ScaleAndTest{head_gradient_.data(), static_cast<float>(factor)}, bad);
  exec_.fence();
  bool const good = bad == 0 && std::isfinite(loss);
  for (auto const& told : Agreement("update").tell("finite", good).exchange(grid_.world()))
    if (!told[0]) return false;
  return true;
}

std::string RouteRun::master_sha256() const {
  auto const masters =
      Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), optimizer_->masters());
  Sha256 hash;
  hash.update(masters.data(), masters.size() * sizeof masters.data()[0]);
  return hash.hex_digest();
}

std::uint64_t RouteRun::master_fingerprint() const {
  auto const masters = optimizer_->masters();
  return fingerprint(exec_, masters.data(), masters.size() * sizeof masters.data()[0]);
}

std::uint64_t RouteRun::teacher_fingerprint() const {
  return fingerprint(exec_, teacher_head_.data(), teacher_head_.size());
}

RouteCounters RouteRun::counters() const {
  return {loss_->counters(), difference(tensor_.counters(), before_), cache_->counters()};
}

}  // namespace vpkl::replay
