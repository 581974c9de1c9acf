// SPDX-License-Identifier: Apache-2.0
// Value and gradient on one GPU against the time that its bytes take in a device copy.
//
// `floor` is the least number of passes over one tensor (fused: both models read, the gradient
// written; two-phase: both read twice, the teacher once where its statistics are known; JSD in two
// phases: three times) at the bandwidth of a large device-to-device copy measured first in the same
// run; `ratio` is the time over that.
#include "cuda_bench.hpp"

#include <vpkl/divergence/plan.hpp>

#include <benchmark/benchmark.h>

#include <Kokkos_Core.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace {

using namespace vpkl;
using namespace vpkl::bench;

enum class Form { fused, two_phase, known_teacher };

template <class T>
void divergence(benchmark::State& state, Divergence which, Form form, std::int64_t rows,
                std::int64_t columns) {
  Exec const exec;
  ElementType const type = ElementTraits<T>::type;
  std::size_t const bytes = static_cast<std::size_t>(rows * columns) * sizeof(T);
  // More sets than the L2 cache holds, so that every call reads from memory.
  int const sets = static_cast<int>(std::clamp<std::size_t>((400u << 20) / (3 * bytes) + 1, 1, 64));
  ByteView<Exec> memory(Kokkos::view_alloc("vpkl_bench::tensors", Kokkos::WithoutInitializing),
                        3 * bytes * static_cast<std::size_t>(sets));
  auto const tensor = [&](int set, int i) {
    return Rows{memory.data() + (3 * static_cast<std::size_t>(set) + i) * bytes, type, columns,
                RowIndex::strided(rows, columns)};
  };
  for (int set = 0; set < sets; ++set)
    for (int i = 0; i < 2; ++i)
      Kokkos::parallel_for("vpkl_bench::fill", impl::RangePolicy64<Exec>(exec, 0, rows * columns),
                           FillLogits<T>{static_cast<T*>(tensor(set, i).data),
                                         static_cast<std::uint64_t>(2 * set + i) << 40});
  Kokkos::View<float*, Kokkos::CudaSpace> value("vpkl_bench::value", rows);

  typename DivergencePlan<Exec>::Options options;
  options.divergence.divergence = which;
  options.route = Route::dense;
  options.student_type = options.teacher_type = type;
  options.max_rows = rows;
  DivergencePlan<Exec> plan(exec, Communicator::self(),
                            VocabShard::whole(columns, columns, columns), options);
  // The form that several ranks use: phases apart, the all-gather left out.
  impl::DivergenceKernels<Exec> const kernels(exec, rows, columns);
  Kokkos::View<RowStatistics*, Kokkos::CudaSpace> records("vpkl_bench::records", rows);
  Kokkos::View<impl::JsdSums*, Kokkos::CudaSpace> sums("vpkl_bench::sums", rows);
  bool const jsd = which == Divergence::jsd;
  Kokkos::View<double*, Kokkos::CudaSpace> shares("vpkl_bench::shares", rows);
  Kokkos::View<RowStatistics*, Kokkos::CudaSpace> known("vpkl_bench::known", sets * rows);
  for (int set = 0; set < sets; ++set)
    impl::teacher_statistics(exec, tensor(set, 1), columns, type, options.divergence.temperature,
                             known.data() + set * rows);

  auto const call = [&](int set) {
    if (form == Form::fused) {
      plan.execute(exec, tensor(set, 0), tensor(set, 1), nullptr, value.data(), tensor(set, 2));
      return;
    }
    impl::RowJob job;
    job.student = tensor(set, 0);
    job.teacher = tensor(set, 1);
    job.columns = columns;
    job.options = impl::KernelOptions::make(options.divergence);
    if (form == Form::known_teacher) {
      job.known.records = known.data() + set * rows;
      kernels.statistics(exec, job, records.data());
      kernels.finish_known(exec, job, records.data(), true, shares.data(), tensor(set, 2));
      kernels.add_shares(exec, rows, shares.data(), 1, options.divergence.temperature,
                         value.data());
      return;
    }
    kernels.statistics(exec, job, records.data());
    if (jsd) kernels.jsd_sums(exec, job, records.data(), sums.data());
    kernels.finish(exec, job, records.data(), jsd ? sums.data() : nullptr, 1, 0, value.data(),
                   tensor(set, 2));
  };
  // Several calls a sample where one is short against the launch itself.
  int const calls = static_cast<int>(std::clamp<std::int64_t>((1 << 27) / (rows * columns), 1, 64));
  Timer timer;
  int set = 0;
  auto const sample = [&] {
    return timer.milliseconds(exec.cuda_stream(), [&] {
      for (int c = 0; c < calls; ++c)
        call(set++ % sets);
    });
  };
  sample();
  sample();
  std::vector<double> times;
  for (auto _ : state) {
    double const seconds = sample() * 1e-3 / calls;
    times.push_back(seconds);
    state.SetIterationTime(seconds);
  }
  double const typical = median(times);
  int const passes = form == Form::fused ? 3 : form == Form::known_teacher ? 4 : jsd ? 7 : 5;
  double const floor = passes * static_cast<double>(bytes) / copy_bandwidth();
  state.counters["median_us"] = typical * 1e6;
  state.counters["passes"] = passes;
  state.counters["floor_us"] = floor * 1e6;
  state.counters["ratio"] = typical / floor;
  state.counters["copy_TBps"] = copy_bandwidth() * 1e-12;
  state.counters["kernels"] =
      form == Form::fused ? static_cast<double>(plan.counters().kernels / plan.counters().calls)
                          : 0.0;
  state.counters["workspace_bytes"] = static_cast<double>(plan.workspace_bytes());
}

template <class T>
void add(Divergence which, Form form, std::int64_t rows, std::int64_t columns) {
  std::string const name = std::string("divergence/") + to_string(which) +
                           (form == Form::fused       ? "/one_rank/"
                            : form == Form::two_phase ? "/two_phase/"
                                                      : "/known_teacher/") +
                           to_string(ElementTraits<T>::type) + "/" + std::to_string(rows) + "x" +
                           std::to_string(columns);
  benchmark::RegisterBenchmark(
      name.c_str(),
      [=](benchmark::State& state) { divergence<T>(state, which, form, rows, columns); })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->MinTime(0.05);
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  Kokkos::ScopeGuard const kokkos(argc, argv);
  add_context();
  for (std::int64_t columns : {75968, 151936})
    for (std::int64_t rows : {64, 1024, 4096})
      for (Divergence which : {Divergence::forward_kl, Divergence::reverse_kl, Divergence::jsd})
        for (Form form : {Form::fused, Form::two_phase, Form::known_teacher})
          if (form != Form::known_teacher || which == Divergence::forward_kl)
            add<bfloat16>(which, form, rows, columns);
  for (Divergence which : {Divergence::forward_kl, Divergence::jsd})
    for (Form form : {Form::fused, Form::two_phase, Form::known_teacher})
      if (form != Form::known_teacher || which == Divergence::forward_kl) {
        add<vpkl::half>(which, form, 1024, 75968);
        add<float>(which, form, 1024, 75968);
      }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
