// SPDX-License-Identifier: Apache-2.0
#include <vpkl/rollout/response_mask.hpp>

#include <vpkl/core/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace vpkl {
namespace {

std::size_t response_length(std::vector<std::int32_t> const& generated, std::int64_t eos_token_id,
                            std::int64_t pad_token_id) {
  auto const eos = std::find(generated.begin(), generated.end(), eos_token_id);
  if (eos != generated.end()) return static_cast<std::size_t>(eos - generated.begin() + 1);
  auto const last = std::find_if(generated.rbegin(), generated.rend(),
                                 [&](std::int32_t id) { return id != pad_token_id; });
  return static_cast<std::size_t>(generated.rend() - last);
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
  if (sequence_length < 0)
    throw InvalidArgument(
        fmt::format("sequence length is {}, expected at least 0", sequence_length));
  for (auto const& [what, id] :
       {std::pair{"end-of-sequence", eos_token_id}, std::pair{"padding", pad_token_id}})
    if (id < -1 || id > std::numeric_limits<std::int32_t>::max())
      throw InvalidArgument(fmt::format("{} id is {}, expected -1 or a 32-bit id", what, id));
  std::size_t start = 0, longest = 0;
  for (std::size_t n = 0; n < prompts.size(); ++n) {
    start = std::max(start, prompts[n].size());
    longest = std::max(longest, generated[n].size());
  }
  auto const width =
      sequence_length == 0 ? start + longest : static_cast<std::size_t>(sequence_length);
  auto const fill = static_cast<std::int32_t>(std::max<std::int64_t>(pad_token_id, 0));

  PaddedRollout out;
  out.samples = static_cast<std::int64_t>(prompts.size());
  out.sequence_length = static_cast<std::int64_t>(width);
  out.response_start.assign(prompts.size(), static_cast<std::int64_t>(start));
  out.tokens.assign(prompts.size() * width, fill);
  out.attention_mask.assign(prompts.size() * width, 0);
  for (std::size_t n = 0; n < prompts.size(); ++n) {
    std::size_t const response = response_length(generated[n], eos_token_id, pad_token_id);
    if (start + response > width) {
      throw InvalidArgument(fmt::format("sample {} needs {} positions, expected at most {}", n,
                                        start + response, sequence_length));
    }
    std::size_t const row = n * width, first = row + start - prompts[n].size();
    auto const at = [](auto& values, std::size_t i) {
      return values.begin() + static_cast<std::ptrdiff_t>(i);
    };
    std::copy(prompts[n].begin(), prompts[n].end(), at(out.tokens, first));
    std::copy_n(generated[n].begin(), response, at(out.tokens, row + start));
    std::fill(at(out.attention_mask, first), at(out.attention_mask, row + start + response),
              std::uint8_t{1});
    out.length.push_back(static_cast<std::int64_t>(prompts[n].size() + response));
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
