// SPDX-License-Identifier: Apache-2.0
// Value and gradient of the divergence operator on one rank, whole vocabulary resident.
//
// Bytes are the least the operator can move: both tensors read once, the gradient written once.
// `copy_ratio` is the time of a memcpy, spread over the same threads, that moves as many bytes,
// over the operator's: 1 means that arithmetic is hidden behind memory.
#include <vpkl/divergence/plan.hpp>

#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <Kokkos_Core.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using Exec = Kokkos::DefaultHostExecutionSpace;
using Clock = std::chrono::steady_clock;
using vpkl::ElementType;

constexpr std::int64_t rows = 256;
constexpr std::int64_t vocabulary = 75968;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Seconds that a copy takes which reads and writes `bytes` in all.
double copy_seconds(Exec const& exec, std::size_t bytes) {
  std::size_t const half = bytes / 2, threads = static_cast<std::size_t>(exec.concurrency());
  std::vector<char> from(half, 1), to(half, 2);
  double best = HUGE_VAL;
  for (int repeat = 0; repeat < 5; ++repeat) {
    auto const start = Clock::now();
    char* const out = to.data();
    char const* const in = from.data();
    Kokkos::parallel_for(
        "bench::copy", Kokkos::RangePolicy<Exec>(exec, 0, threads), [=](std::size_t i) {
          std::size_t const begin = half * i / threads, end = half * (i + 1) / threads;
          std::memcpy(out + begin, in + begin, end - begin);
        });
    exec.fence();
    benchmark::ClobberMemory();
    best = std::min(best, seconds_since(start));
  }
  return best;
}

template <class T>
std::vector<T> logits(std::uint32_t seed) {
  std::vector<T> out(static_cast<std::size_t>(rows * vocabulary));
  for (T& x : out) {
    // Sum of four uniform numbers: near enough to normal, and quick.
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      seed = seed * 1664525u + 1013904223u;
      sum += static_cast<float>(seed >> 8) * 0x1p-24f;
    }
    x = vpkl::ElementTraits<T>::from_float((sum - 2.0f) * 5.0f);
  }
  return out;
}

template <class T>
void divergence(benchmark::State& state, vpkl::Divergence divergence) {
  Exec const exec;
  auto const student = logits<T>(1), teacher = logits<T>(2);
  std::vector<T> gradient(student.size());
  std::vector<float> value(rows);
  typename vpkl::DivergencePlan<Exec>::Options options;
  options.divergence.divergence = divergence;
  options.route = vpkl::Route::dense;
  options.student_type = options.teacher_type = vpkl::ElementTraits<T>::type;
  options.max_rows = rows;
  vpkl::DivergencePlan<Exec> plan(exec, vpkl::Communicator::self(),
                                  vpkl::VocabShard::whole(vocabulary), options);
  auto const index = vpkl::RowIndex::strided(rows, vocabulary);
  vpkl::ConstRows const s{student.data(), options.student_type, vocabulary, index};
  vpkl::ConstRows const t{teacher.data(), options.teacher_type, vocabulary, index};
  vpkl::Rows const g{gradient.data(), options.student_type, vocabulary, index};
  plan.execute(exec, s, t, nullptr, value.data(), g);
  exec.fence();

  double best = HUGE_VAL;
  for (auto _ : state) {
    auto const start = Clock::now();
    plan.execute(exec, s, t, nullptr, value.data(), g);
    exec.fence();
    best = std::min(best, seconds_since(start));
    benchmark::DoNotOptimize(value.data());
    benchmark::ClobberMemory();
  }
  std::size_t const bytes = 3 * student.size() * sizeof(T);
  double const calls = static_cast<double>(state.iterations());
  state.counters["rows/s"] = benchmark::Counter(calls * rows, benchmark::Counter::kIsRate);
  state.counters["GB/s"] =
      benchmark::Counter(calls * static_cast<double>(bytes) * 1e-9, benchmark::Counter::kIsRate);
  state.counters["copy_ratio"] = copy_seconds(exec, bytes) / best;
  state.counters["threads"] = exec.concurrency();
}

template <class T>
void add() {
  for (auto d : {vpkl::Divergence::forward_kl, vpkl::Divergence::reverse_kl, vpkl::Divergence::jsd})
    benchmark::RegisterBenchmark(
        fmt::format("{}/{}/[{}, {}]", vpkl::to_string(d),
                    vpkl::to_string(vpkl::ElementTraits<T>::type), rows, vocabulary)
            .c_str(),
        [d](benchmark::State& state) { divergence<T>(state, d); })
        ->Unit(benchmark::kMillisecond)
        ->UseRealTime();
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  Kokkos::initialize(argc, argv);
  add<float>();
  add<vpkl::bfloat16>();
  benchmark::RunSpecifiedBenchmarks();
  Kokkos::finalize();
  return 0;
}
