// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <vpkl/io/json_lines.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace vpkl::replay {

namespace {

double relative(double a, double b) {
  double const scale = std::max(std::abs(a), std::abs(b));
  return scale > 0 ? std::abs(a - b) / scale : 0;
}

double mib(std::int64_t bytes) { return static_cast<double>(bytes) / (1024.0 * 1024.0); }

template <class Member>
std::int64_t largest(std::vector<RankNumbers> const& ranks, Member member) {
  std::int64_t value = 0;
  for (RankNumbers const& rank : ranks)
    value = std::max(value, rank.*member);
  return value;
}

}  // namespace

double RouteSummary::mean() const {
  return std::accumulate(tokens_per_second.begin(), tokens_per_second.end(), 0.0) /
         static_cast<double>(tokens_per_second.size());
}
double RouteSummary::lowest() const {
  return *std::min_element(tokens_per_second.begin(), tokens_per_second.end());
}
double RouteSummary::highest() const {
  return *std::max_element(tokens_per_second.begin(), tokens_per_second.end());
}

Comparison compare(std::vector<RouteSummary> const& routes, std::optional<double> pytorch) {
  Comparison c;
  c.pytorch = pytorch;
  RouteSummary const& reference = routes.front();
  for (RouteSummary const& route : routes) {
    for (std::size_t i = 0; i < route.losses.size(); ++i) {
      double const difference = relative(route.losses[i], reference.losses[i]);
      if (i == 0) c.first_update = std::max(c.first_update, difference);
      c.any_update = std::max(c.any_update, difference);
    }
    if (pytorch)
      c.from_pytorch = std::max(c.from_pytorch.value_or(0), relative(route.loss_before, *pytorch));
  }
  return c;
}

nlohmann::json to_json(RouteSummary const& s) {
  nlohmann::json object = {{"type", "route"},
                           {"route", to_string(s.route)},
                           {"tokens_per_second", s.tokens_per_second},
                           {"tokens_per_second_mean", s.mean()},
                           {"tokens_per_second_min", s.lowest()},
                           {"tokens_per_second_max", s.highest()},
                           {"repetitions_bitwise_equal", s.repetitions_equal},
                           {"applied_updates", s.applied},
                           {"skipped_updates", s.skipped},
                           {"masters_changed", s.masters_changed},
                           {"teacher_unchanged", s.teacher_unchanged}};
  json_number(object, "loss_before", s.loss_before);
  json_number(object, "loss_after", s.loss_after);
  for (RankNumbers const& r : s.ranks)
    object["ranks"].push_back({{"cache_bytes", r.cache_bytes},
                               {"peak_bytes", r.peak_bytes},
                               {"operator_calls", r.operator_calls},
                               {"kernels", r.kernels},
                               {"collectives", r.collectives},
                               {"collective_bytes", r.collective_bytes},
                               {"records", r.records},
                               {"fetches", r.fetches},
                               {"fetched_bytes", r.fetched_bytes}});
  return object;
}

nlohmann::json to_json(Comparison const& c) {
  nlohmann::json object;
  json_number(object, "first_update_relative_difference", c.first_update);
  json_number(object, "largest_relative_difference", c.any_update);
  if (c.pytorch) {
    json_number(object, "pytorch_loss", *c.pytorch);
    json_number(object, "relative_difference_from_pytorch", *c.from_pytorch);
  }
  return object;
}

std::string table(std::vector<RouteSummary> const& routes, Comparison const& comparison,
                  std::string const& heading) {
  std::string text = heading + "\n\n";
  text += fmt::format("{:<15}{:>34}{:>12}{:>12}{:>9}{:>9}{:>12}{:>12}{:>12}{:>13}\n", "route",
                      "response tokens/s mean [min, max]", "cache MiB", "peak MiB", "applied",
                      "skipped", "loss before", "loss after", "collectives", "fetched MiB");
  for (RouteSummary const& s : routes)
    text +=
        fmt::format("{:<15}{:>34}{:>12.3f}{:>12.3f}{:>9}{:>9}{:>12.6f}{:>12.6f}{:>12}{:>13.3f}\n",
                    to_string(s.route),
                    fmt::format("{:.1f} [{:.1f}, {:.1f}]", s.mean(), s.lowest(), s.highest()),
                    mib(largest(s.ranks, &RankNumbers::cache_bytes)),
                    mib(largest(s.ranks, &RankNumbers::peak_bytes)), s.applied, s.skipped,
                    s.loss_before, s.loss_after, largest(s.ranks, &RankNumbers::collectives),
                    mib(largest(s.ranks, &RankNumbers::fetched_bytes)));
  text +=
      "\nMemory: largest of the ranks. Peak: Kokkos allocations without the cache. Counts: one "
      "rank, "
      "last repetition, with both evaluations of the fixture.\n";
  if (routes.size() > 1)
    text += fmt::format(
        "Loss of the routes: first update within {:.1e} relative, all updates within {:.1e}.\n",
        comparison.first_update, comparison.any_update);
  if (comparison.pytorch)
    text +=
        fmt::format("PyTorch's loss at the initial state: {:.9f}; routes within {:.1e} relative.\n",
                    *comparison.pytorch, *comparison.from_pytorch);
  for (RouteSummary const& s : routes) {
    if (!s.masters_changed)
      text += fmt::format("WARNING: {}: fp32 masters did not change.\n", to_string(s.route));
    if (!s.teacher_unchanged)
      text += fmt::format("WARNING: {}: the teacher changed.\n", to_string(s.route));
    if (!s.repetitions_equal)
      text += fmt::format("WARNING: {}: repetitions differ in their losses.\n", to_string(s.route));
  }
  return text;
}

}  // namespace vpkl::replay
