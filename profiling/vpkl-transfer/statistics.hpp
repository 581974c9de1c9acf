// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Median and percentiles of timings.
#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <vector>

namespace vpkl::transfer {

/// Seconds.
struct Timing {
  double median = 0, p10 = 0, p90 = 0;

  nlohmann::json microseconds() const;
};

/// \brief Percentiles by linear interpolation between the sorted samples.
/// \param[in] seconds at least one sample
Timing timing_of(std::vector<double> seconds);

/// \brief 1e9 bytes a second.
double gigabytes_per_second(std::size_t bytes, double seconds);

}  // namespace vpkl::transfer
