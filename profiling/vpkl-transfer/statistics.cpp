// SPDX-License-Identifier: Apache-2.0
#include "statistics.hpp"

#include <algorithm>
#include <cmath>

namespace vpkl::transfer {

nlohmann::json Timing::microseconds() const {
  return {{"median", median * 1e6}, {"p10", p10 * 1e6}, {"p90", p90 * 1e6}};
}

Timing timing_of(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  auto const at = [&](double part) {
    double const place = part * static_cast<double>(seconds.size() - 1);
    std::size_t const below = static_cast<std::size_t>(place);
    std::size_t const above = std::min(below + 1, seconds.size() - 1);
    return seconds[below] + (place - std::floor(place)) * (seconds[above] - seconds[below]);
  };
  return {at(0.5), at(0.1), at(0.9)};
}

double gigabytes_per_second(std::size_t bytes, double seconds) {
  // A clock that saw nothing pass is no infinite bandwidth.
  return seconds > 0 ? static_cast<double>(bytes) / seconds * 1e-9 : 0;
}

}  // namespace vpkl::transfer
