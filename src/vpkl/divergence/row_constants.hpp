// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief A row's merged statistics turned into its value and the constants of its gradient.
#pragma once

#include <vpkl/divergence/options.hpp>
#include <vpkl/stats/row_statistics.hpp>

#include <cmath>
#include <cstdint>

namespace vpkl::impl {

/// The divergence's parameters in the form that kernels use.
struct KernelOptions {
  Divergence divergence;
  Weighting weighting;
  float scale;  ///< logit_unit / T
  double temperature;
  double beta;

  /// \brief Converts user options.
  static KernelOptions make(DivergenceOptions const& options) {
    return {options.divergence, options.weighting(),
            static_cast<float>(static_cast<double>(logit_unit) / options.temperature),
            options.temperature, options.beta};
  }
  /// \brief For statistics of one model.
  static KernelOptions of_teacher(double temperature) {
    KernelOptions options = make({Divergence::forward_kl, 0.5, temperature});
    options.weighting = Weighting::none;
    return options;
  }
};

/// Σ ps log(ps/m) and Σ pt log(pt/m) over a set of columns: what JSD exchanges in its second round.
struct JsdSums {
  double student = 0;
  double teacher = 0;
};

/// What the gradient of a row looks like.
enum class RowState : std::int32_t {
  regular,
  empty,    ///< no support in one model: value NaN, gradient 0
  invalid,  ///< NaN or +inf among the logits: value and gradient NaN
  infinite  ///< value +inf; reverse KL's gradient is NaN where the student has support
};

/// Constants of one row's gradient; value is filled by `divergence_value`.
struct RowConstants {
  float max_student;
  float max_teacher;
  float inverse_sum_student;
  float inverse_sum_teacher;
  float log_ratio;  ///< log S_teacher - log S_student
  float mean;       ///< reverse KL: E_s[ds - dt] in units of logit_unit; JSD: D(ps‖m)
  RowState state;
};

/// \brief Finalises statistics in double.
KOKKOS_INLINE_FUNCTION RowConstants row_constants(RowStatistics const& s, Weighting weighting) {
  RowConstants c{};
  c.max_student = s.max_student;
  c.max_teacher = s.max_teacher;
  if (s.flags & RowStatistics::invalid) {
    c.state = RowState::invalid;
    return c;
  }
  if (!(s.sum_student > 0) || !(s.sum_teacher > 0)) {
    c.state = RowState::empty;
    return c;
  }
  c.state = s.flags & RowStatistics::unsupported ? RowState::infinite : RowState::regular;
  c.inverse_sum_student = static_cast<float>(1.0 / s.sum_student);
  c.inverse_sum_teacher = static_cast<float>(1.0 / s.sum_teacher);
  c.log_ratio = static_cast<float>(log(s.sum_teacher) - log(s.sum_student));
  if (weighting == Weighting::student) c.mean = s.difference;
  return c;
}

/// \brief The row's divergence times T², from its statistics (and sums, for JSD).
KOKKOS_INLINE_FUNCTION float divergence_value(RowStatistics const& s, JsdSums const& jsd,
                                              RowState state, KernelOptions const& options) {
  if (state == RowState::invalid || state == RowState::empty) return quiet_nan;
  if (state == RowState::infinite) return infinity;
  double const log_ratio = log(s.sum_teacher) - log(s.sum_student);
  double const difference = static_cast<double>(s.difference) * static_cast<double>(options.scale);
  double value;
  switch (options.divergence) {
    case Divergence::forward_kl: value = difference - log_ratio; break;
    case Divergence::reverse_kl: value = difference + log_ratio; break;
    default: value = options.beta * jsd.teacher + (1.0 - options.beta) * jsd.student; break;
  }
  return static_cast<float>(value * options.temperature * options.temperature);
}

/// \brief This rank's share of a row's forward KL, whose shares add up to value / T².
/// \param[in] s merged statistics
/// \param[in] weighted Σ e^(dt/T) · (dt - ds) in units of logit_unit over this rank's columns, with
/// the merged maxima; +inf where the teacher has support and the student none
/// \param[in] first whether this rank adds what is not a sum over columns
KOKKOS_INLINE_FUNCTION double forward_kl_share(RowStatistics const& s, double weighted, bool first,
                                               KernelOptions const& options) {
  if (s.flags & RowStatistics::invalid || !(s.sum_student > 0) || !(s.sum_teacher > 0))
    return static_cast<double>(quiet_nan);
  if (s.flags & RowStatistics::unsupported) return static_cast<double>(infinity);
  double const share = weighted * static_cast<double>(options.scale) / s.sum_teacher;
  return first ? share - (log(s.sum_teacher) - log(s.sum_student)) : share;
}

/// \brief Adds a row's shares, `stride` apart.
KOKKOS_INLINE_FUNCTION float value_of_shares(double const* share, int ranks, std::int64_t stride,
                                             double temperature) {
  double sum = 0;
  for (int r = 0; r < ranks; ++r)
    sum += share[r * stride];
  return static_cast<float>(sum * temperature * temperature);
}

}  // namespace vpkl::impl
