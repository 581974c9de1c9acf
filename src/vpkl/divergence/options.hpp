// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief What divergence, by which route.
#pragma once

#include <vpkl/core/element_type.hpp>
#include <vpkl/stats/row_statistics.hpp>

#include <cstdint>
#include <string>

namespace vpkl {

/// Divergence between teacher distribution pt and student distribution ps.
enum class Divergence : std::int32_t {
  forward_kl = 0,  ///< D(pt‖ps), "KL" of most distillation papers (Hinton et al. 2015)
  reverse_kl = 1,  ///< D(ps‖pt) (Gu et al. 2023, MiniLLM)
  jsd = 2,  ///< β D(pt‖m) + (1-β) D(ps‖m), m = β pt + (1-β) ps (Agarwal et al. 2023, GKD)
};

/// How the vocabulary is brought together.
enum class Route : std::int32_t {
  dense = 0,           ///< the whole vocabulary on every rank, no tensor-parallel communication
  gathered = 1,        ///< student shards gathered whole; teacher rows are already whole
  vocab_parallel = 2,  ///< shards stay where they are, statistics are gathered
};

/// \brief "forward_kl", "reverse_kl" or "jsd".
char const* to_string(Divergence divergence);
/// \brief "dense", "gathered" or "vocab_parallel".
char const* to_string(Route route);
/// \brief Inverse of to_string. \throws InvalidArgument naming the text and the accepted ones
Divergence divergence_from_string(std::string const& text);
/// \brief Inverse of to_string. \throws InvalidArgument naming the text and the accepted ones
Route route_from_string(std::string const& text);

/// The divergence and its parameters.
struct DivergenceOptions {
  Divergence divergence = Divergence::forward_kl;  ///< which one
  double beta = 0.5;                               ///< weight of the teacher in JSD, inside (0, 1)
  double temperature = 1.0;  ///< T; both sides are divided by it, values multiplied by T²

  /// \brief The distribution that weighs the terms of the sum.
  Weighting weighting() const {
    return divergence == Divergence::forward_kl   ? Weighting::teacher
           : divergence == Divergence::reverse_kl ? Weighting::student
                                                  : Weighting::none;
  }
};

/// \brief Refuses temperatures and betas outside their domain.
/// \throws InvalidArgument naming the value
void check_options(DivergenceOptions const& options);

}  // namespace vpkl
