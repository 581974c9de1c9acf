// SPDX-License-Identifier: Apache-2.0
// vpkl-replay: a rollout fixture through the three routes, measured side by side.
#include "memory_tracker.hpp"
#include "options.hpp"
#include "profiler.hpp"
#include "receipt.hpp"
#include "report.hpp"
#include "route_run.hpp"
#include "runtime.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/io/json_lines.hpp>
#include <vpkl/io/sha256.hpp>
#include <vpkl/parallel/agreement.hpp>
#include <vpkl/parallel/process_grid.hpp>

#include <fmt/format.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>

namespace {

using namespace vpkl;
using namespace vpkl::replay;

std::vector<RankNumbers> gather_numbers(Communicator const& world, RankNumbers const& own) {
  std::vector<RankNumbers> all(static_cast<std::size_t>(world.size()));
  world.exchange_record(&own, all.data(), sizeof own);
  return all;
}

RankNumbers numbers_of(RouteRun const& run) {
  RouteCounters const c = run.counters();
  RankNumbers n;
  n.cache_bytes = static_cast<std::int64_t>(c.cache.high_water_bytes);
  n.peak_bytes = apps::MemoryTracker::peak_bytes();
  n.operator_calls = c.operations.calls;
  n.kernels = c.operations.kernels;
  n.collectives = c.communication.all_gathers;
  n.collective_bytes = c.communication.all_gather_bytes;
  n.records = c.communication.records;
  n.fetches = c.cache.fetches;
  n.fetched_bytes = c.cache.fetched_bytes;
  return n;
}

/// Everything one route does, `repetitions` times from the fixture's state.
class RouteMeasurement {
 public:
  RouteMeasurement(ProcessGrid const& grid, Rollouts const& rollouts, Options const& options,
                   JsonLinesWriter* results, apps::Progress& progress)
      : grid_(grid),
        rollouts_(rollouts),
        options_(options),
        results_(results),
        progress_(progress) {}

  RouteSummary measure(Route route, std::map<std::string, std::string>& state_hashes) {
    RouteSummary summary;
    summary.route = route;
    for (std::int64_t repetition = 0; repetition < options_.repetitions; ++repetition) {
      apps::MemoryTracker::reset_peak();
      RouteRun run(Exec(), grid_, rollouts_, options_, route);
      std::uint64_t const masters = run.master_fingerprint(), teacher = run.teacher_fingerprint();
      double const before = run.evaluate();
      std::vector<double> const losses = repeat(run, route, repetition, summary);
      double const after = run.evaluate();
      if (repetition == 0) {
        summary.losses = losses;
        summary.loss_before = before;
        summary.loss_after = after;
      }
      summary.repetitions_equal =
          summary.repetitions_equal &&
          std::memcmp(summary.losses.data(), losses.data(), losses.size() * sizeof losses[0]) == 0;
      // A shard without ids has no masters.
      summary.masters_changed =
          summary.masters_changed && (run.parameters() == 0 || run.master_fingerprint() != masters);
      summary.teacher_unchanged = summary.teacher_unchanged && run.teacher_fingerprint() == teacher;
      summary.ranks = gather_numbers(grid_.world(), numbers_of(run));
      // For the receipt: what the last repetition ended in.
      if (!options_.output_jsonl.empty() && repetition + 1 == options_.repetitions)
        state_hashes[to_string(route)] = run.master_sha256();
    }
    agree_on_state(summary);
    return summary;
  }

 private:
  std::vector<double> repeat(RouteRun& run, Route route, std::int64_t repetition,
                             RouteSummary& summary) {
    std::vector<double> losses;
    double seconds = 0;
    std::int64_t tokens = 0;
    std::int64_t const updates = options_.warmup_updates + options_.measure_updates;
    std::optional<apps::ProfilerRange> steady_state;
    for (std::int64_t update = 0; update < updates; ++update) {
      progress_.show(fmt::format("{}: repetition {}/{}, update {}/{}", to_string(route),
                                 repetition + 1, options_.repetitions, update + 1, updates));
      if (options_.profile && update == options_.warmup_updates) steady_state.emplace();
      UpdateResult const result = run.update(update);
      losses.push_back(result.loss);
      bool const measured = update >= options_.warmup_updates;
      if (measured) {
        seconds += result.seconds;
        tokens += result.tokens;
        ++(result.applied ? summary.applied : summary.skipped);
      }
      if (!results_) continue;
      nlohmann::json record = {{"type", "update"},
                               {"route", to_string(route)},
                               {"repetition", repetition},
                               {"update", update},
                               {"measured", measured},
                               {"applied", result.applied},
                               {"response_tokens", result.tokens},
                               {"seconds", result.seconds}};
      json_number(record, "loss", result.loss);
      results_->write(record);
    }
    summary.tokens_per_second.push_back(static_cast<double>(tokens) / seconds);
    return losses;
  }

  /// A shard that did not change, or a teacher that did, on any rank.
  void agree_on_state(RouteSummary& summary) const {
    auto const told = Agreement("state")
                          .tell("masters changed", summary.masters_changed)
                          .tell("teacher unchanged", summary.teacher_unchanged)
                          .exchange(grid_.world());
    for (auto const& rank : told) {
      summary.masters_changed = summary.masters_changed && rank[0];
      summary.teacher_unchanged = summary.teacher_unchanged && rank[1];
    }
  }

  ProcessGrid const& grid_;
  Rollouts const& rollouts_;
  Options const& options_;
  JsonLinesWriter* results_;
  apps::Progress& progress_;
};

void check_sizes(Communicator const& world, Rollouts const& rollouts, Options const& options) {
  if (world.size() % options.data_parallel != 0)
    throw InvalidArgument(fmt::format("--data-parallel is {}, expected a divisor of the {} ranks",
                                      options.data_parallel, world.size()));
  if (options.batch_size > rollouts.samples())
    throw InvalidArgument(
        fmt::format("--batch-size is {}, expected at most the fixture's {} samples",
                    options.batch_size, rollouts.samples()));
}

/// \throws InvalidArgument on every rank when NCCL is asked for and cannot be had
Communicator over_transport(Communicator const& world, std::string const& transport) {
#ifdef VPKL_ENABLE_NCCL
  if (transport == "nccl" ||
      (transport == "automatic" && world.size() > 1 && Communicator::has_gpu_for_each_rank(world)))
    return Communicator::nccl(world);
#else
  (void)transport;
#endif
  return world;
}

void replay_all(Communicator const& launched, Options options) {
  Communicator const world = over_transport(launched, options.transport);
  options.transport = world.transport_name();
  apps::MemoryTracker::install();
  bool const first = world.rank() == 0;
  // Results can be written, and the fixture read, before anything is built.
  std::unique_ptr<JsonLinesWriter> results;
  std::unique_ptr<Rollouts> rollouts;
  std::string fixture_sha256;
  Agreement("replay")
      .check([&] {
        if (first && !options.output_jsonl.empty())
          results = std::make_unique<JsonLinesWriter>(options.output_jsonl);
        rollouts = std::make_unique<Rollouts>(options.fixture);
        fixture_sha256 = sha256_file(options.fixture);
        check_sizes(world, *rollouts, options);
      })
      .exchange(world);
  Agreement("replay").equal("fixtures", fixture_sha256).exchange(world);
  if (results && !results->torn_line().empty())
    fmt::print(stderr, "vpkl-replay: moved a torn last line of {} aside\n", options.output_jsonl);

  ProcessGrid const grid(world, world.size() / options.data_parallel, options.data_parallel);
  std::vector<RouteSummary> summaries;
  std::map<std::string, std::string> state_hashes;
  {
    apps::Progress progress(first);
    RouteMeasurement measurement(grid, *rollouts, options, results.get(), progress);
    for (Route route : options.routes)
      summaries.push_back(measurement.measure(route, state_hashes));
  }
  Comparison const comparison = compare(
      summaries, rollouts->fixture().expected_loss(options.logits_type, options.divergence));

  nlohmann::json const environment = apps::describe_environment();
  Agreement("results")
      .check([&] {
        if (!results) return;
        nlohmann::json summary = {{"type", "summary"},
                                  {"configuration", options.describe()},
                                  {"environment", environment},
                                  {"ranks", world.size()},
                                  {"comparison", to_json(comparison)}};
        for (RouteSummary const& s : summaries)
          summary["routes"].push_back(to_json(s));
        results->write(summary);
        results->close();
      })
      .exchange(world);
  if (!options.output_jsonl.empty())
    Agreement("receipts")
        .check([&] {
          std::map<std::string, std::string> outputs;
          if (first) outputs[options.output_jsonl] = sha256_file(options.output_jsonl);
          apps::write_receipt(apps::receipt_path(options.output_jsonl, world.rank()),
                              {{"rank", world.rank()},
                               {"ranks", world.size()},
                               {"configuration", options.describe()},
                               {"environment", environment},
                               {"fp32_master_sha256", state_hashes}},
                              {{options.fixture, fixture_sha256}}, outputs);
        })
        .exchange(world);
  if (first) {
    std::string const heading = fmt::format(
        "{}: {} ranks (TP {} × DP {}, {}), {}, {} response tokens, batch {} × {} micro-batches, "
        "plan "
        "{}",
        options.fixture, world.size(), grid.tensor_parallel().size(), options.data_parallel,
        options.transport, to_string(options.divergence.divergence), rollouts->response_tokens(),
        options.batch_size, options.accumulation_steps, to_string(options.plan));
    fmt::print("{}", table(summaries, comparison, heading));
    if (!options.output_jsonl.empty()) fmt::print("Results: {}\n", options.output_jsonl);
  }
}

}  // namespace

int main(int argc, char** argv) {
  ParseResult const parsed = parse(argc, argv, apps::launcher_rank() != 0);
  if (!parsed.options) return parsed.status;
  Options const options = *parsed.options;
  return apps::run_parallel(argc, argv, "vpkl-replay", [&](Communicator const& world) {
    if (!options.verify) return replay_all(world, options);
    if (world.rank() != 0) return;
    int const ranks = apps::verify_receipts(options.output_jsonl);
    fmt::print("{}: receipts of {} ranks agree with their files, {} records\n",
               options.output_jsonl, ranks, read_json_lines(options.output_jsonl).records.size());
  });
}
