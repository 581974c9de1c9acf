// SPDX-License-Identifier: Apache-2.0
#include <vpkl/rollout/response_mask.hpp>

#include <vpkl/core/error.hpp>

#include <fmt/format.h>

#include <algorithm>

namespace vpkl {
namespace {

std::int64_t response_length(std::vector<std::int32_t> const& generated, std::int64_t eos_token_id,
                             std::int64_t pad_token_id) {
  auto const eos = std::find(generated.begin(), generated.end(), eos_token_id);
  if (eos != generated.end()) return eos - generated.begin() + 1;
  auto const last = std::find_if(generated.rbegin(), generated.rend(),
                                 [&](std::int32_t id) { return id != pad_token_id; });
  return generated.rend() - last;
}

}  // namespace

PaddedRollout pad_rollout(std::vector<std::vector<std::int32_t>> const& prompts,
                          std::vector<std::vector<std::int32_t>> const& generated,
                          std::int64_t eos_token_id, std::int64_t pad_token_id,
                          std::int64_t sequence_length) {
  if (prompts.size() != generated.size()) {
    throw InvalidArgument(fmt::format("{} prompts and {} generated sequences, expected one each",
                                      prompts.size(), generated.size()));
  }
  PaddedRollout out;
  out.samples = static_cast<std::int64_t>(prompts.size());
  for (std::size_t n = 0; n < prompts.size(); ++n) {
    out.response_start.push_back(static_cast<std::int64_t>(prompts[n].size()));
    out.length.push_back(out.response_start[n] +
                         response_length(generated[n], eos_token_id, pad_token_id));
    auto const given = static_cast<std::int64_t>(prompts[n].size() + generated[n].size());
    if (sequence_length == 0) out.sequence_length = std::max(out.sequence_length, given);
    if (sequence_length != 0 && out.length[n] > sequence_length) {
      throw InvalidArgument(fmt::format("sample {} has {} tokens, expected at most {}", n,
                                        out.length[n], sequence_length));
    }
  }
  if (sequence_length != 0) out.sequence_length = sequence_length;

  auto const fill = static_cast<std::int32_t>(std::max<std::int64_t>(pad_token_id, 0));
  for (std::size_t n = 0; n < prompts.size(); ++n) {
    std::vector<std::int32_t> row = prompts[n];
    row.insert(row.end(), generated[n].begin(), generated[n].end());
    row.resize(static_cast<std::size_t>(out.length[n]));
    std::vector<std::uint8_t> mask(row.size(), 1);
    row.resize(static_cast<std::size_t>(out.sequence_length), fill);
    mask.resize(row.size(), 0);
    out.tokens.insert(out.tokens.end(), row.begin(), row.end());
    out.attention_mask.insert(out.attention_mask.end(), mask.begin(), mask.end());
  }
  return out;
}

std::vector<std::uint8_t> response_mask(std::int64_t sequence_length,
                                        std::vector<std::int64_t> const& response_start,
                                        std::vector<std::uint8_t> const& attention_mask) {
  auto const width = static_cast<std::size_t>(std::max<std::int64_t>(sequence_length, 0));
  if (sequence_length < 0 || attention_mask.size() != response_start.size() * width) {
    throw InvalidArgument(fmt::format("attention mask of {} values, expected [{}, {}]",
                                      attention_mask.size(), response_start.size(),
                                      sequence_length));
  }
  std::vector<std::uint8_t> mask(attention_mask.size(), 0);
  for (std::size_t n = 0; n < response_start.size(); ++n) {
    if (response_start[n] < 0 || response_start[n] > sequence_length) {
      throw InvalidArgument(fmt::format("response start {} of sample {}, expected one in [0, {}]",
                                        response_start[n], n, sequence_length));
    }
    for (auto t = static_cast<std::size_t>(response_start[n]); t < width; ++t) {
      mask[n * width + t] = attention_mask[n * width + t] == 1 ? 1 : 0;
    }
  }
  return mask;
}

}  // namespace vpkl
