// SPDX-License-Identifier: Apache-2.0
// The teacher cache's fetches and the streamed loss on one GPU against what the bus can do.
//
// `limit_us` is a contiguous pinned host-to-device copy of the same bytes, measured beside each
// case; `ratio` is the time over it. [4, 2112, 75968] bf16, chunk 256, 64 response tokens a row.
#include "cuda_bench.hpp"

#include <vpkl/core/cuda/pinned_pool.hpp>
#include <vpkl/teacher/cache.hpp>
#include <vpkl/training/streamed_loss.hpp>

#include <memory>
#include <numeric>
#include <random>

namespace {

using namespace vpkl;
using namespace vpkl::bench;
using Cache = TeacherCache<Exec>;
using Loss = StreamedLoss<Exec>;

constexpr std::int64_t batch = 4, length = 2112, response = 64, chunk = 256;

/// Logits, gradient and mask of one micro-batch, made once a width.
struct MicroBatch {
  std::int64_t width;
  ByteView<Exec> student, teacher, gradient;
  std::vector<std::uint8_t> mask;

  explicit MicroBatch(std::int64_t v) : width(v), mask(batch * length, 0) {
    Exec const exec;
    std::size_t const bytes = static_cast<std::size_t>(batch * length * width) * 2;
    std::uint64_t seed = 0;
    for (ByteView<Exec>* logits : {&student, &teacher, &gradient}) {
      *logits = impl::allocate_bytes(exec, "vpkl_bench::logits", bytes);
      Kokkos::parallel_for(
          "vpkl_bench::fill", impl::RangePolicy64<Exec>(exec, 0, batch * length * width),
          FillLogits<bfloat16>{reinterpret_cast<bfloat16*>(logits->data()), ++seed << 40});
    }
    exec.fence("vpkl_bench::fill");
    for (std::int64_t b = 0; b < batch; ++b)
      std::fill_n(mask.begin() + b * length + length - response, response, std::uint8_t{1});
  }
  Rows rows(ByteView<Exec> const& logits) const {
    return {logits.data(), ElementType::bf16, width, RowIndex::strided(batch * length, width)};
  }
  std::unique_ptr<Cache> cached(Exec const& exec, TransferEngine engine) const {
    Cache::Options options;
    options.engine = engine;
    auto cache = std::make_unique<Cache>(Communicator::self(), options);
    cache->store(exec, rows(teacher), batch, length);
    exec.fence("vpkl_bench::store");
    return cache;
  }
};

std::unique_ptr<MicroBatch> made;  ///< one at a time; main() frees it before Kokkos ends

MicroBatch const& micro_batch(std::int64_t width) {
  if (!made || made->width != width) {
    made.reset();
    made = std::make_unique<MicroBatch>(width);
  }
  return *made;
}

/// Seconds of a contiguous pinned copy of `bytes` to the device.
double contiguous_copy(Exec const& exec, std::size_t bytes) {
  impl::cuda::PinnedBlock const from(bytes, impl::cuda::PinnedBlock::User::host);
  ByteView<Exec> const to = impl::allocate_bytes(exec, "vpkl_bench::contiguous", bytes);
  Timer timer;
  std::vector<double> times;
  for (int i = 0; i < 9; ++i)
    times.push_back(timer.milliseconds(exec.cuda_stream(), [&] {
      VPKL_CHECK_CUDA(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyHostToDevice,
                                      exec.cuda_stream()));
    }));
  return median(times) * 1e-3;
}

/// Times `call`, whose fetches bring `bytes`.
template <class Call>
void against_bus(benchmark::State& state, Exec const& exec, std::size_t bytes, Call&& call) {
  double const limit = contiguous_copy(exec, bytes);
  Timer timer;
  timer.milliseconds(exec.cuda_stream(), call);
  std::vector<double> times;
  for (auto _ : state) {
    times.push_back(timer.milliseconds(exec.cuda_stream(), call) * 1e-3);
    state.SetIterationTime(times.back());
  }
  double const typical = median(times);
  state.counters["median_us"] = typical * 1e6;
  state.counters["limit_us"] = limit * 1e6;
  state.counters["ratio"] = typical / limit;
  state.counters["fetched_bytes"] = static_cast<double>(bytes);
  state.counters["GBps"] = static_cast<double>(bytes) / typical * 1e-9;
}

enum class Pattern { chunk, response_rows, random_rows };

void fetch(benchmark::State& state, TransferEngine engine, Pattern pattern, std::int64_t width) {
  Exec const exec;
  auto const cache = micro_batch(width).cached(exec, engine);
  std::vector<std::int64_t> rows(batch * length);
  std::iota(rows.begin(), rows.end(), 0);
  if (pattern == Pattern::random_rows) {
    std::shuffle(rows.begin(), rows.end(), std::mt19937_64(1));
    rows.resize(batch * response);
  } else if (pattern == Pattern::response_rows) {
    rows.clear();
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t t = length - response - 1; t + 1 < length; ++t)
        rows.push_back(b * length + t);
  }
  std::int64_t const count =
      pattern == Pattern::chunk ? batch * chunk : static_cast<std::int64_t>(rows.size());
  std::size_t const bytes = static_cast<std::size_t>(count * width) * 2;
  std::int64_t const pitch = impl::row_pitch(width, ElementType::bf16);
  ByteView<Exec> const out = impl::allocate_bytes(exec, "vpkl_bench::fetched",
                                                  static_cast<std::size_t>(count * pitch) * 2);
  Rows const to{out.data(), ElementType::bf16, width, RowIndex::strided(count, pitch)};
  against_bus(state, exec, bytes, [&] {
    if (pattern == Pattern::chunk)
      cache->fetch_chunk(exec, chunk, 2 * chunk, to);
    else
      cache->fetch_rows(exec, rows, to);
  });
}

void loss(benchmark::State& state, PlanKind plan, TransferEngine engine, std::int64_t width) {
  Exec const exec;
  MicroBatch const& m = micro_batch(width);
  auto const cache = m.cached(exec, engine);
  Loss::Options options;
  options.plan = plan;
  options.chunk_width = chunk;
  Loss loss(Communicator::self(), VocabShard::whole(width, width, width), options);
  auto const call = [&] {
    loss.compute(exec, m.rows(m.student), *cache, ResponseMask{m.mask.data(), batch, length},
                 Normalization{}, m.rows(m.gradient));
  };
  auto const before = cache->counters().fetched_bytes;
  call();
  std::size_t const bytes = static_cast<std::size_t>(cache->counters().fetched_bytes - before);
  against_bus(state, exec, bytes, call);
}

template <class F>
void add(std::string const& name, F run) {
  benchmark::RegisterBenchmark(name.c_str(), run)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->MinTime(0.1);
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  Kokkos::ScopeGuard const kokkos(argc, argv);
  add_context();
  TransferEngine const engines[] = {TransferEngine::automatic,   TransferEngine::pinned_2d,
                                    TransferEngine::pinned_rows, TransferEngine::mapped,
                                    TransferEngine::staged,      TransferEngine::pageable};
  std::pair<Pattern, char const*> const patterns[] = {{Pattern::chunk, "chunk"},
                                                      {Pattern::response_rows, "response_rows"},
                                                      {Pattern::random_rows, "random_rows"}};
  std::pair<PlanKind, char const*> const plans[] = {{PlanKind::rows, "rows"},
                                                    {PlanKind::chunks, "chunks"}};
  for (std::int64_t width : {75968, 151936}) {
    std::string const shape = "/bf16/" + std::to_string(width);
    for (auto const& [pattern, name] : patterns)
      for (TransferEngine engine : engines)
        add(std::string("fetch/") + name + "/" + to_string(engine) + shape,
            [=, p = pattern](benchmark::State& state) { fetch(state, engine, p, width); });
    for (auto const& [plan, name] : plans)
      for (TransferEngine engine : {TransferEngine::automatic, TransferEngine::pageable})
        add(std::string("streamed_loss/") + name + "/" + to_string(engine) + shape,
            [=, p = plan](benchmark::State& state) { loss(state, p, engine, width); });
  }
  benchmark::RunSpecifiedBenchmarks();
  made.reset();
  benchmark::Shutdown();
  return 0;
}
