// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Which tokens of a rollout are real, and which of them belong to the response.
#pragma once

#include <cstdint>
#include <vector>

namespace vpkl {

/// A rollout as one rectangle: prompts padded on the left, responses on the right.
struct PaddedRollout {
  std::int64_t samples = 0;                  ///< N
  std::int64_t sequence_length = 0;          ///< T
  std::vector<std::int32_t> tokens;          ///< [N, T]
  std::vector<std::uint8_t> attention_mask;  ///< [N, T], 1 for prompt and response tokens
  std::vector<std::int64_t> response_start;  ///< [N], length of the longest prompt
  std::vector<std::int64_t> length;          ///< [N], number of attended tokens
};

/// \brief Joins prompts and what was generated for them.
///
/// Position, not value, decides what is padding: every prompt token is attended, whatever its id.
/// The response ends with the first end-of-sequence id, which counts once, also when padding has
/// the same id. Without one it ends before the trailing run of padding ids. Other positions hold
/// the padding id.
/// \param[in] prompts          token ids of N prompts
/// \param[in] generated        ids generated for each prompt, padding included or not
/// \param[in] eos_token_id     end-of-sequence id, -1 if there is none
/// \param[in] pad_token_id     padding id, 0 included; -1 if there is none (0 is then filled in)
/// \param[in] sequence_length  T, or 0 for the longest prompt + the longest generated
/// \throws InvalidArgument if the numbers of prompts and generated sequences differ or a sample
/// does not fit T
PaddedRollout pad_rollout(std::vector<std::vector<std::int32_t>> const& prompts,
                          std::vector<std::vector<std::int32_t>> const& generated,
                          std::int64_t eos_token_id, std::int64_t pad_token_id,
                          std::int64_t sequence_length = 0);

/// \brief Response mask: 1 where t >= response_start[n] and attention_mask[n, t] is 1.
/// \param[in] sequence_length  T
/// \param[in] response_start   [N]
/// \param[in] attention_mask   [N, T]
/// \return [N, T]
/// \throws InvalidArgument if the extents disagree or a start is outside [0, T]
std::vector<std::uint8_t> response_mask(std::int64_t sequence_length,
                                        std::vector<std::int64_t> const& response_start,
                                        std::vector<std::uint8_t> const& attention_mask);

}  // namespace vpkl
