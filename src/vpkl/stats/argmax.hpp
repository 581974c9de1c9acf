// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Mergeable argmax of a row over a part of the vocabulary.
#pragma once

#include <vpkl/core/kokkos.hpp>

#include <cstdint>

namespace vpkl {

/// Largest score and its id; equal scores (+0 and -0 too) give the smallest id. No id without a
/// score above -inf; a NaN anywhere makes the record invalid.
struct Argmax {
  float score = -impl::infinity;  ///< the largest
  std::int32_t invalid = 0;       ///< 1: a NaN was among the scores
  std::int64_t id = -1;           ///< its id; -1: none

  /// \brief Takes one more score in.
  KOKKOS_INLINE_FUNCTION void add(float other_score, std::int64_t other_id) {
    if (other_score != other_score) invalid = 1;
    if (other_id >= 0 && (other_score > score || (other_score == score && other_id < id))) {
      score = other_score;
      id = other_id;
    }
  }
  /// \brief Takes the record of further columns in; any order gives the same.
  KOKKOS_INLINE_FUNCTION void add(Argmax const& other) {
    invalid |= other.invalid;
    add(other.score, other.id);
  }
};
static_assert(sizeof(Argmax) == 16, "Argmax is a 16-byte record on the wire");

}  // namespace vpkl
