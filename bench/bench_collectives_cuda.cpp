// SPDX-License-Identifier: Apache-2.0
// The operator's collective over NCCL, alone and inside the call, one GPU a rank:
//
//   mpirun -n 2 bench_collectives_cuda
//
// `collective_us` is an all-gather of the call's messages as one, measured beside each case;
// `share` is that over the whole call. With `known_teacher` the teacher's statistics are, and the
// values come by a second message. Shards of a vocabulary of 151,936, bf16, forward KL.
#include "cuda_bench.hpp"
#include "runtime.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/divergence/plan.hpp>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace vpkl;
using namespace vpkl::bench;

constexpr std::int64_t vocabulary = 151936;
// Every rank makes the same calls, so that their number cannot be left to the clock.
constexpr int iterations = 40, warm_up = 5;

Rows logits(Exec const& exec, ByteView<Exec>& memory, std::int64_t rows, std::int64_t width,
            std::uint64_t seed) {
  memory = impl::allocate_bytes(exec, "vpkl_bench::logits",
                                static_cast<std::size_t>(rows * width) * sizeof(bfloat16));
  Kokkos::parallel_for(
      "vpkl_bench::fill", impl::RangePolicy64<Exec>(exec, 0, rows * width),
      FillLogits<bfloat16>{reinterpret_cast<bfloat16*>(memory.data()), seed << 40});
  return {memory.data(), ElementType::bf16, width, RowIndex::strided(rows, width)};
}

/// Median microseconds of an all-gather of `bytes` a rank.
double all_gather(Communicator const& comm, std::size_t bytes) {
  Exec const exec;
  auto const gathered = impl::allocate_bytes(exec, "vpkl_bench::gathered",
                                             bytes * static_cast<std::size_t>(comm.size()));
  void* const own = gathered.data() + bytes * static_cast<std::size_t>(comm.rank());
  Timer timer;
  std::vector<double> times;
  for (int i = 0; i < warm_up + iterations; ++i)
    times.push_back(timer.milliseconds(
        exec.cuda_stream(), [&] { comm.all_gather(exec, own, gathered.data(), bytes); }));
  times.erase(times.begin(), times.begin() + warm_up);
  return median(times) * 1e3;
}

/// \param[in] known whether the teacher's statistics are: values then take one more message
void operation(benchmark::State& state, Communicator const& comm, Route route, bool known,
               std::int64_t rows) {
  Exec const exec;
  auto const [begin, end] = even_range(vocabulary, comm.size(), comm.rank());
  VocabShard const shard =
      VocabShard::make(comm, {vocabulary, begin, end, end - begin, end - begin, {}});
  std::int64_t const width = shard.student_width();
  DivergencePlan<Exec>::Options options;
  options.route = route;
  options.student_type = options.teacher_type = ElementType::bf16;
  options.max_rows = rows;
  DivergencePlan<Exec> plan(exec, comm, shard, options);
  ByteView<Exec> memory[3];
  Rows const student = logits(exec, memory[0], rows, width, 1);
  Rows const teacher =
      logits(exec, memory[1], rows, route == Route::gathered ? vocabulary : width, 2);
  Rows const gradient = logits(exec, memory[2], rows, width, 3);
  ByteView<Exec> const value = impl::allocate_bytes(exec, "vpkl_bench::value",
                                                    static_cast<std::size_t>(rows) * sizeof(float));

  ByteView<Exec> const shares = impl::allocate_bytes(
      exec, "vpkl_bench::shares", static_cast<std::size_t>(rows * comm.size()) * sizeof(double));
  ByteView<Exec> const records = impl::allocate_bytes(
      exec, "vpkl_bench::records", static_cast<std::size_t>(rows) * sizeof(RowStatistics));
  KnownTeacher const teacher_known{reinterpret_cast<RowStatistics const*>(records.data()), nullptr};
  impl::teacher_statistics(exec, teacher, teacher.width, ElementType::bf16, 1,
                           reinterpret_cast<RowStatistics*>(records.data()));
  auto* const values = reinterpret_cast<float*>(value.data());
  auto* const parts = reinterpret_cast<double*>(shares.data());

  auto const before = comm.counters();
  impl::HeaderLog<Exec> log(comm, 1);
  Timer timer;
  auto const sample = [&] {
    double const ms = timer.milliseconds(exec.cuda_stream(), [&] {
      if (!known)
        return plan.execute(exec, student, teacher, nullptr, values, gradient, nullptr, &log);
      plan.execute_known(exec, student, teacher, teacher_known, nullptr, parts + comm.rank() * rows,
                         gradient, nullptr, &log);
      plan.add_shares(exec, rows, parts, values);
    });
    log.check();
    log.clear();
    return ms * 1e-3;
  };
  for (int i = 0; i < warm_up; ++i)
    sample();
  std::int64_t const bytes = (comm.counters().all_gather_bytes - before.all_gather_bytes) / warm_up;
  double const collective = all_gather(comm, static_cast<std::size_t>(bytes));
  std::vector<double> times;
  for (auto _ : state) {
    times.push_back(sample());
    state.SetIterationTime(times.back());
  }
  double const typical = median(times) * 1e6;
  state.counters["median_us"] = typical;
  state.counters["bytes"] = static_cast<double>(bytes);
  state.counters["collective_us"] = collective;
  state.counters["share"] = collective / typical;
  state.counters["received_GBps"] =
      static_cast<double>(bytes * (comm.size() - 1)) / (collective * 1e3);
}

/// Registered benchmarks hold the communicator: they go before MPI and Kokkos end.
struct Registered {
  ~Registered() { benchmark::ClearRegisteredBenchmarks(); }
};

/// The others measure as rank 0 does, without a word.
class Silent : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(Context const&) override { return true; }
  void ReportRuns(std::vector<Run> const&) override {}
};

}  // namespace

int main(int argc, char** argv) {
  // Results are rank 0's to write; what runs is for all.
  std::vector<char*> arguments(argv, argv + argc);
  if (apps::launcher_rank() > 0)
    arguments.erase(std::remove_if(arguments.begin() + 1, arguments.end(),
                                   [](std::string const& argument) {
                                     return argument.rfind("--benchmark_out", 0) == 0;
                                   }),
                    arguments.end());
  int count = static_cast<int>(arguments.size());
  arguments.push_back(nullptr);
  benchmark::Initialize(&count, arguments.data());
  return apps::run_parallel(argc, argv, "bench_collectives_cuda", [&](Communicator const& world) {
    if (world.size() < 2)
      throw InvalidArgument("number of ranks is 1, expected at least 2: nothing is exchanged");
    Communicator const comm = Communicator::nccl(world);
    Registered const registered;
    for (auto const& [route, known] :
         {std::pair(Route::vocab_parallel, false), std::pair(Route::vocab_parallel, true),
          std::pair(Route::gathered, false)})
      for (std::int64_t rows : {64, 256, 1024, 4096}) {
        std::string const name = std::string("operator/") + to_string(route) +
                                 (known ? "_known_teacher/" : "/") + std::to_string(rows);
        benchmark::RegisterBenchmark(name.c_str(),
                                     [=, route = route, known = known](benchmark::State& state) {
                                       operation(state, comm, route, known, rows);
                                     })
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond)
            ->Iterations(iterations);
      }
    if (comm.rank() == 0) {
      add_context();
      benchmark::AddCustomContext("ranks", std::to_string(comm.size()));
      benchmark::RunSpecifiedBenchmarks();
    } else {
      Silent silent;
      benchmark::RunSpecifiedBenchmarks(&silent);
    }
    benchmark::Shutdown();
  });
}
