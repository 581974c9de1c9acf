// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief What a token's divergence is divided and multiplied by.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace vpkl {

/// Normalisation of a micro-batch's loss and gradient.
///
/// token_mean: loss = Σ value / tokens of the micro-batch (0 without tokens), gradient of
/// loss · loss_scale / gradient_accumulation_steps, to be averaged over data-parallel replicas.
/// global_divisor: loss = Σ value / divisor, gradient of loss · loss_scale, to be summed over
/// micro-batches and replicas.
struct Normalization {
  /// What Σ value is divided by.
  enum class Kind : std::int32_t {
    token_mean = 0,      ///< the micro-batch's tokens
    global_divisor = 1,  ///< a number of the caller's
  };
  Kind kind = Kind::token_mean;                  ///< which of them
  double divisor = 0;                            ///< global_divisor only: tokens of the whole batch
  std::int64_t gradient_accumulation_steps = 1;  ///< micro-batches actually in the window
  double loss_scale = 1;                         ///< factor on the gradient alone

  /// \brief What Σ value is multiplied by in the reported loss.
  double loss_factor(std::int64_t tokens) const;
  /// \brief Weight of each counted row in the gradient.
  double row_weight(std::int64_t tokens) const;
};

/// \brief "token_mean" or "global_divisor".
char const* to_string(Normalization::Kind kind);
/// \brief Inverse of to_string. \throws InvalidArgument naming the text
Normalization::Kind normalization_from_string(std::string const& text);

/// \brief Refuses values outside their domain. \throws InvalidArgument naming the value
void check_normalization(Normalization const& normalization);

/// \brief Sum in a fixed tree over the index, the same for every grouping; zeros included.
double tree_sum(std::vector<float> const& values);

}  // namespace vpkl
