// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Flags and configuration of vpkl-replay.
#pragma once

#include "adamw.hpp"

#include <vpkl/core/element_type.hpp>
#include <vpkl/divergence/options.hpp>
#include <vpkl/loss/chunk_plan.hpp>
#include <vpkl/loss/normalization.hpp>
#include <vpkl/teacher/cache.hpp>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace vpkl::replay {

struct Options {
  std::string fixture;
  std::vector<Route> routes;
  PlanKind plan = PlanKind::rows;
  std::int64_t chunk_width = 256;
  DivergenceOptions divergence;
  Normalization::Kind normalization = Normalization::Kind::token_mean;
  double loss_scale = 1;
  ElementType logits_type = ElementType::fp32;
  CacheMode cache_mode = CacheMode::all;
  TransferEngine transfer_engine = TransferEngine::automatic;
  bool teacher_statistics = false;
  std::int64_t cache_budget = 0;

  std::string transport = "automatic";  ///< or "mpi", "nccl"; once chosen, the layer's name
  int data_parallel = 1;
  std::int64_t batch_size = 1;
  std::int64_t accumulation_steps = 1;
  std::int64_t warmup_updates = 5;
  std::int64_t measure_updates = 30;
  std::int64_t repetitions = 3;
  apps::AdamW<Kokkos::DefaultExecutionSpace>::Options optimizer;

  std::string output_jsonl;
  bool profile = false;
  bool verify = false;

  nlohmann::json describe() const;
};

/// What the command line asks for.
struct ParseResult {
  std::optional<Options> options;  ///< empty: end with `status` (help, version, bad flags)
  int status = 0;
};

/// \brief Parses flags and the configuration file. Prints help and complaints itself.
/// \param[in] quiet print nothing (all ranks but the first)
ParseResult parse(int argc, char** argv, bool quiet);

}  // namespace vpkl::replay
