// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Numbers of a replay, as a table and as JSON.
#pragma once

#include "options.hpp"
#include "route_run.hpp"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace vpkl::replay {

/// Numbers of one rank that the summary lists for all.
struct RankNumbers {
  std::int64_t cache_bytes = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t operator_calls = 0;
  std::int64_t kernels = 0;
  std::int64_t collectives = 0;
  std::int64_t collective_bytes = 0;
  std::int64_t records = 0;
  std::int64_t fetches = 0;
  std::int64_t fetched_bytes = 0;
};

/// All repetitions of one route.
struct RouteSummary {
  Route route = Route::dense;
  std::vector<double> tokens_per_second;  ///< a repetition's measured updates
  std::vector<double> losses;             ///< of every update of the first repetition
  bool repetitions_equal = true;          ///< losses bitwise the same in all repetitions
  std::int64_t applied = 0, skipped = 0;  ///< measured updates of all repetitions
  double loss_before = 0, loss_after = 0;
  bool masters_changed = true, teacher_unchanged = true;
  std::vector<RankNumbers> ranks;

  double mean() const;
  double lowest() const;
  double highest() const;
};

/// How routes differ from the first one, relative.
struct Comparison {
  double first_update = 0;             ///< largest difference in the first update's loss
  double any_update = 0;               ///< in any update's loss: the drift
  std::optional<double> pytorch;       ///< loss PyTorch computed at the initial state
  std::optional<double> from_pytorch;  ///< largest difference from it before the first update
};

Comparison compare(std::vector<RouteSummary> const& routes, std::optional<double> pytorch);

nlohmann::json to_json(RouteSummary const& summary);
nlohmann::json to_json(Comparison const& comparison);

/// \brief The table that a person reads.
std::string table(std::vector<RouteSummary> const& routes, Comparison const& comparison,
                  std::string const& heading);

}  // namespace vpkl::replay
