// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include "command_line.hpp"
#include "profiler.hpp"

#include <vpkl/config.hpp>
#include <vpkl/core/error.hpp>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cmath>
#include <limits>

namespace vpkl::replay {

namespace {

/// CLI11's view of a flat JSON object whose keys are the long flag names.
class JsonConfig : public CLI::Config {
 public:
  std::string to_config(CLI::App const*, bool, bool, std::string) const override { return {}; }

  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    nlohmann::json const object = nlohmann::json::parse(input, nullptr, false);
    if (!object.is_object())
      throw CLI::FileError("the configuration is not a JSON object of flags");
    std::vector<CLI::ConfigItem> items;
    for (auto const& [key, value] : object.items()) {
      if (value.is_object() || value.is_array() || value.is_null())
        throw CLI::FileError(fmt::format(
            "configuration key '{}' is {}, expected one text or number", key, value.dump()));
      CLI::ConfigItem item;
      item.name = key;
      item.inputs = {value.is_string() ? value.get<std::string>() : value.dump()};
      items.push_back(std::move(item));
    }
    return items;
  }
};

/// Values as written, converted by the library's own functions, whose messages name them.
struct Texts {
  std::string implementation = "all", route, mode = "replay", plan = "rows",
              divergence = "forward_kl", normalization = "token_mean", logits_type = "fp32",
              cache_mode = "all", transfer_engine = "automatic";
  std::int64_t pipeline_parallel = 1, sequence_parallel = 1;
};

void define(CLI::App& app, Options& o, Texts& t) {
  auto const count = [](std::int64_t low) {
    return CLI::Range(low, std::numeric_limits<std::int64_t>::max() / 4);
  };
  app.config_formatter(std::make_shared<JsonConfig>());
  app.set_config("--config", "", "JSON object whose keys are long flag names; flags win");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.set_version_flag("--version", VPKL_VERSION_STRING);

  app.add_option("--fixture", o.fixture, "Rollout fixture (.h5) with hidden states and heads");
  app.add_option("--implementation", t.implementation,
                 "dense, gathered, vocab_parallel, or all three side by side")
      ->capture_default_str();
  app.add_option("--route", t.route,
                 "Route that a configuration was written for; must match --implementation");
  app.add_option("--mode", t.mode, "replay (online: see vpkl-opsd)")->capture_default_str();
  app.add_option("--plan", t.plan, "rows: counted rows packed; chunks: ranges of positions")
      ->capture_default_str();
  app.add_option("--chunk-width", o.chunk_width, "Positions a chunk")
      ->check(count(1))
      ->capture_default_str();
  app.add_option("--divergence", t.divergence, "forward_kl, reverse_kl or jsd")
      ->capture_default_str();
  app.add_option("--beta", o.divergence.beta, "Teacher's weight in jsd, inside (0, 1)")
      ->capture_default_str();
  app.add_option("--temperature", o.divergence.temperature, "Softmax temperature")
      ->capture_default_str();
  app.add_option("--normalization", t.normalization,
                 "token_mean: mean of micro-batch means; global_divisor: tokens of the update")
      ->capture_default_str();
  app.add_option("--loss-scale", o.loss_scale, "Factor on gradients until the update")
      ->capture_default_str();
  app.add_option("--logits-type", t.logits_type, "fp32, bf16 or fp16")->capture_default_str();
  app.add_option("--transfer-engine", t.transfer_engine,
                 "automatic, pageable, staged, pinned_rows, pinned_2d or mapped (devices only)");
  app.add_flag("--teacher-statistics", o.teacher_statistics,
               "Keep the teacher's statistics with its rows: forward KL of several vocab_parallel "
               "ranks then reads the teacher once");
  app.add_option("--cache-mode", t.cache_mode, "all rows, or only response rows")
      ->capture_default_str();
  app.add_option("--cache-budget", o.cache_budget, "Bytes of the teacher cache; 0: what is free")
      ->check(count(0))
      ->capture_default_str();
  app.add_option("--transport", o.transport,
                 "Messages between ranks: nccl, mpi, or automatic: nccl where the build has it and "
                 "there are several ranks, each with a GPU of its own")
      ->capture_default_str();
  app.add_option("--data-parallel", o.data_parallel,
                 "Replicas; the other factor of the ranks is tensor-parallel")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--pipeline-parallel", t.pipeline_parallel, "Only 1")->capture_default_str();
  app.add_option("--sequence-parallel", t.sequence_parallel, "Only 1")->capture_default_str();
  app.add_option("--batch-size", o.batch_size, "Samples of a micro-batch")
      ->check(count(1))
      ->capture_default_str();
  app.add_option("--gradient-accumulation-steps", o.accumulation_steps, "Micro-batches an update")
      ->check(count(1))
      ->capture_default_str();
  app.add_option("--warmup-updates", o.warmup_updates, "Updates before the measured ones")
      ->check(count(0))
      ->capture_default_str();
  app.add_option("--measure-updates", o.measure_updates, "Measured updates")
      ->check(count(1))
      ->capture_default_str();
  app.add_option("--repetitions", o.repetitions, "Runs from the same initial state")
      ->check(count(1))
      ->capture_default_str();
  app.add_option("--learning-rate", o.optimizer.learning_rate, "AdamW")->capture_default_str();
  app.add_option("--weight-decay", o.optimizer.weight_decay, "AdamW")->capture_default_str();
  app.add_option("--output-jsonl", o.output_jsonl,
                 "Results, appended: one object an update and a summary; receipts beside it");
  app.add_flag("--profile", o.profile,
               "Measured updates are a range of cudaProfilerApi, one a repetition (devices only)");
  app.add_flag("--verify", o.verify, "Read the receipts of --output-jsonl back and compare");
}

/// \throws InvalidArgument naming flag and value
void finish(Options& o, Texts const& t) {
  if (o.verify) {
    if (o.output_jsonl.empty())
      throw InvalidArgument("--verify needs --output-jsonl, the results whose receipts are read");
    return;
  }
  if (o.fixture.empty()) throw InvalidArgument("--fixture is missing, expected a rollout fixture");
  if (t.mode == "online")
    throw InvalidArgument(
        "--mode is online, expected replay: vpkl-opsd generates its own rollouts");
  if (t.mode != "replay")
    throw InvalidArgument(fmt::format("--mode is '{}', expected replay", t.mode));
  if (o.transport != "automatic" && o.transport != "mpi" && o.transport != "nccl")
    throw InvalidArgument(
        fmt::format("--transport is '{}', expected automatic, mpi or nccl", o.transport));
#ifndef VPKL_ENABLE_NCCL
  if (o.transport == "nccl")
    throw InvalidArgument("--transport is nccl, but this build has no NCCL (VPKL_ENABLE_NCCL)");
#endif
  if (o.profile && !apps::has_profiler())
    throw InvalidArgument(
        "--profile needs a CUDA build: this one has no device whose profiler waits for a range");
  for (auto const& [flag, value] : {std::pair{"--pipeline-parallel", t.pipeline_parallel},
                                    std::pair{"--sequence-parallel", t.sequence_parallel}})
    if (value != 1)
      throw InvalidArgument(fmt::format(
          "{} is {}, expected 1: heads and losses are computed whole on each stage", flag, value));
  auto const flag = [](char const* name, auto&& convert) {
    try {
      return convert();
    } catch (InvalidArgument const& error) {
      throw InvalidArgument(fmt::format("{}: {}", name, error.what()));
    }
  };
  if (t.implementation == "all")
    o.routes = {Route::dense, Route::gathered, Route::vocab_parallel};
  else
    o.routes = {flag("--implementation", [&] { return route_from_string(t.implementation); })};
  if (!t.route.empty()) {
    Route const route = flag("--route", [&] { return route_from_string(t.route); });
    if (o.routes.size() != 1 || o.routes[0] != route)
      throw InvalidArgument(fmt::format(
          "--implementation is {}, but the configuration is for route {}: one would be measured "
          "under the other's name",
          t.implementation, t.route));
  }
  o.plan = flag("--plan", [&] { return plan_kind_from_string(t.plan); });
  o.divergence.divergence =
      flag("--divergence", [&] { return divergence_from_string(t.divergence); });
  o.normalization =
      flag("--normalization", [&] { return normalization_from_string(t.normalization); });
  o.logits_type = flag("--logits-type", [&] { return element_type_from_string(t.logits_type); });
  o.transfer_engine =
      flag("--transfer-engine", [&] { return transfer_engine_from_string(t.transfer_engine); });
  o.cache_mode = flag("--cache-mode", [&] { return cache_mode_from_string(t.cache_mode); });
  if (o.cache_mode == CacheMode::hidden)
    throw InvalidArgument("--cache-mode is hidden, expected all or response");
  flag("--temperature, --beta", [&] {
    check_options(o.divergence);
    return 0;
  });
  Normalization scale;
  scale.loss_scale = o.loss_scale;
  flag("--loss-scale", [&] {
    check_normalization(scale);
    return 0;
  });
  if (!(o.optimizer.learning_rate >= 0) || !std::isfinite(o.optimizer.learning_rate))
    throw InvalidArgument(fmt::format("--learning-rate is {}, expected a finite number from 0 on",
                                      o.optimizer.learning_rate));
  if (!(o.optimizer.weight_decay >= 0) || !std::isfinite(o.optimizer.weight_decay))
    throw InvalidArgument(fmt::format("--weight-decay is {}, expected a finite number from 0 on",
                                      o.optimizer.weight_decay));
}

}  // namespace

nlohmann::json Options::describe() const {
  nlohmann::json names = nlohmann::json::array();
  for (Route route : routes)
    names.push_back(to_string(route));
  return {{"fixture", fixture},
          {"routes", names},
          {"plan", to_string(plan)},
          {"chunk_width", chunk_width},
          {"divergence", to_string(divergence.divergence)},
          {"beta", divergence.beta},
          {"temperature", divergence.temperature},
          {"normalization", to_string(normalization)},
          {"loss_scale", loss_scale},
          {"logits_type", to_string(logits_type)},
          {"cache_mode", to_string(cache_mode)},
          {"transfer_engine", to_string(transfer_engine)},
          {"teacher_statistics", teacher_statistics},
          {"cache_budget", cache_budget},
          {"transport", transport},
          {"data_parallel", data_parallel},
          {"batch_size", batch_size},
          {"gradient_accumulation_steps", accumulation_steps},
          {"warmup_updates", warmup_updates},
          {"measure_updates", measure_updates},
          {"repetitions", repetitions},
          {"learning_rate", optimizer.learning_rate},
          {"weight_decay", optimizer.weight_decay}};
}

ParseResult parse(int argc, char** argv, bool quiet) {
  Options options;
  Texts texts;
  CLI::App app(
      "Replays a rollout fixture through sharded student and teacher heads, teacher cache, "
      "streamed loss and AdamW, for the dense, gathered and vocab_parallel routes.",
      "vpkl-replay");
  define(app, options, texts);
  auto const status =
      apps::parse_command_line(app, argc, argv, quiet, [&] { finish(options, texts); });
  if (status) return {std::nullopt, *status};
  return {options, 0};
}

}  // namespace vpkl::replay
