// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/error.hpp>
#include <vpkl/loss/normalization.hpp>

#include <fmt/format.h>

#include <cmath>

namespace vpkl {

double Normalization::loss_factor(std::int64_t tokens) const {
  if (kind == Kind::global_divisor) return 1.0 / divisor;
  return tokens > 0 ? 1.0 / static_cast<double>(tokens) : 0.0;
}

double Normalization::row_weight(std::int64_t tokens) const {
  double const steps =
      kind == Kind::token_mean ? static_cast<double>(gradient_accumulation_steps) : 1.0;
  return loss_factor(tokens) * loss_scale / steps;
}

char const* to_string(Normalization::Kind kind) {
  return kind == Normalization::Kind::token_mean ? "token_mean" : "global_divisor";
}

Normalization::Kind normalization_from_string(std::string const& text) {
  for (auto kind : {Normalization::Kind::token_mean, Normalization::Kind::global_divisor})
    if (text == to_string(kind)) return kind;
  throw InvalidArgument(
      fmt::format("normalization is '{}', expected token_mean or global_divisor", text));
}

void check_normalization(Normalization const& n) {
  if (n.kind == Normalization::Kind::global_divisor && !(n.divisor > 0 && std::isfinite(n.divisor)))
    throw InvalidArgument(
        fmt::format("global divisor is {}, expected a finite number above 0", n.divisor));
  if (n.gradient_accumulation_steps < 1)
    throw InvalidArgument(fmt::format("gradient accumulation steps are {}, expected at least 1",
                                      n.gradient_accumulation_steps));
  if (!(n.loss_scale > 0 && std::isfinite(n.loss_scale)))
    throw InvalidArgument(
        fmt::format("loss scale is {}, expected a finite number above 0", n.loss_scale));
}

double tree_sum(std::vector<float> const& values) {
  std::vector<double> level(values.begin(), values.end());
  if (level.empty()) return 0;
  while (level.size() > 1) {
    std::size_t const half = (level.size() + 1) / 2;
    for (std::size_t i = 0; i < level.size() / 2; ++i)
      level[i] = level[2 * i] + level[2 * i + 1];
    if (level.size() % 2) level[half - 1] = level.back();
    level.resize(half);
  }
  return level[0];
}

}  // namespace vpkl
