// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Flags of vpkl-transfer.
#pragma once

#include "work.hpp"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace vpkl::transfer {

struct Options {
  std::int64_t batch = 4, length = 2112;
  std::vector<std::int64_t> chunk_widths = {256}, vocabularies = {75968};
  std::vector<ElementType> types;
  std::vector<std::string> engines;
  std::vector<Direction> directions;
  std::vector<Pattern> patterns;
  std::int64_t scattered_rows = 256;
  std::int64_t repetitions = 15, warmup = 2;

  bool sizes = false;
  std::int64_t smallest_size = 4096, largest_size = std::int64_t(1) << 30;
  std::int64_t size_repetitions = 3;
  bool all_gpus = false, interference = false, attribution = false;
  int numa_node = -1;  ///< -1: where the system puts this process
  double time_limit = 300;
  std::string output_jsonl;

  nlohmann::json describe() const;
};

struct ParseResult {
  std::optional<Options> options;  ///< empty: end with `status` (help, version, bad flags)
  int status = 0;
};

/// \brief Parses flags. Prints help and complaints itself.
ParseResult parse(int argc, char** argv);

}  // namespace vpkl::transfer
