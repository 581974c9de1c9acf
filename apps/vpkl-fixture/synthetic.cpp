// SPDX-License-Identifier: Apache-2.0
#include "synthetic.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/rollout/response_mask.hpp>

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <utility>

namespace {

constexpr std::int64_t pad_id = 0, bos_id = 1, eos_id = 2, first_word_id = 3;
/// Tokens and masks are held in memory whole.
constexpr std::int64_t max_positions = std::int64_t{1} << 28;
constexpr float noise_share = 0.25f;
constexpr float logit_deviation = 2.0f;

/// A stream of random numbers that can be entered anywhere (SplitMix64 of a counter).
class Stream {
 public:
  Stream(std::int64_t seed, std::uint64_t name)
      : base_(mix(mix(static_cast<std::uint64_t>(seed)) + name)) {}

  std::uint64_t word(std::uint64_t index) const { return mix(base_ + index); }

  /// Sum of four 16-bit uniforms: nearly normal, variance 1, and exact arithmetic but for the last
  /// product.
  float normal(std::uint64_t index) const {
    std::uint64_t const bits = word(index);
    auto const sum = static_cast<std::int32_t>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                               (bits >> 32 & 0xffff) + (bits >> 48));
    return static_cast<float>(sum - 131070) * 2.6429e-5f;  // sqrt(3) / 65536
  }

 private:
  static std::uint64_t mix(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }

  std::uint64_t base_;
};

enum StreamName : std::uint64_t {
  tokens,
  lengths,
  teacher_hidden,
  teacher_head,
  student_hidden,
  student_head
};

/// Rows of `width` values: `base` scaled, or with noise of its own on top.
vpkl::RowSource random_rows(vpkl::ElementType type, std::int64_t width, float scale, Stream base,
                            float noise_scale, Stream noise) {
  return [=](std::int64_t first, std::int64_t count, void* out) {
    vpkl::dispatch(type, [&](auto zero) {
      using T = decltype(zero);
      auto* const to = static_cast<T*>(out);
      auto const begin = static_cast<std::uint64_t>(first * width);
      auto const size = static_cast<std::uint64_t>(count * width);
      for (std::uint64_t i = 0; i < size; ++i) {
        float value = scale * base.normal(begin + i);
        if (noise_scale != 0) value += noise_scale * noise.normal(begin + i);
        to[i] = vpkl::ElementTraits<T>::from_float(value);
      }
    });
  };
}

/// Hidden states with 0 at unattended positions.
vpkl::RowSource attended(vpkl::RowSource source, std::vector<std::uint8_t> const& mask,
                         std::int64_t sequence_length, std::size_t position_bytes) {
  return [=](std::int64_t first, std::int64_t count, void* out) {
    source(first, count, out);
    auto const begin = static_cast<std::size_t>(first * sequence_length);
    for (std::size_t i = 0; i < static_cast<std::size_t>(count * sequence_length); ++i) {
      if (mask[begin + i] == 0)
        std::memset(static_cast<char*>(out) + i * position_bytes, 0, position_bytes);
    }
  };
}

vpkl::ModelContent random_model(SyntheticOptions const& o, vpkl::Side side,
                                std::vector<std::uint8_t> const& mask) {
  bool const student = side == vpkl::Side::student;
  bool const perturbed = student && o.hidden_student == o.hidden_teacher;
  Stream const own_hidden(o.seed, student ? student_hidden : teacher_hidden);
  Stream const own_head(o.seed, student ? student_head : teacher_head);
  Stream const base_hidden = perturbed ? Stream(o.seed, teacher_hidden) : own_hidden;
  Stream const base_head = perturbed ? Stream(o.seed, teacher_head) : own_head;
  float const noise = perturbed ? noise_share : 0.0f;

  vpkl::ModelContent model;
  model.hidden_size = student ? o.hidden_student : o.hidden_teacher;
  model.hidden_type = model.head_type = o.type;
  float const head_scale = logit_deviation / std::sqrt(static_cast<float>(model.hidden_size));
  auto const position_bytes = vpkl::size_of(o.type) * static_cast<std::size_t>(model.hidden_size);
  model.hidden = attended(random_rows(o.type, o.sequence_length * model.hidden_size, 1.0f,
                                      base_hidden, noise, own_hidden),
                          mask, o.sequence_length, position_bytes);
  model.head =
      random_rows(o.type, model.hidden_size, head_scale, base_head, noise * head_scale, own_head);
  return model;
}

}  // namespace

vpkl::RolloutContent synthesise(SyntheticOptions const& o) {
  if (o.samples * o.sequence_length > max_positions) {
    throw vpkl::InvalidArgument(
        fmt::format("--samples: {} of --sequence-length {}, expected at most {} tokens in all",
                    o.samples, o.sequence_length, max_positions));
  }
  if (o.prompt_length + o.max_response > o.sequence_length) {
    throw vpkl::InvalidArgument(fmt::format(
        "--sequence-length: {}, expected at least --prompt-length {} + --max-response {}",
        o.sequence_length, o.prompt_length, o.max_response));
  }
  if (o.shared_head && o.hidden_student != o.hidden_teacher) {
    throw vpkl::InvalidArgument(
        fmt::format("--shared-head: expected equal --hidden-student {} and --hidden-teacher {}",
                    o.hidden_student, o.hidden_teacher));
  }
  Stream const words(o.seed, tokens);
  Stream const response_lengths(o.seed, lengths);
  auto const word = [&](std::int64_t n, std::int64_t t) {
    auto const index = static_cast<std::uint64_t>(n * o.sequence_length + t);
    auto const choices = static_cast<std::uint64_t>(o.vocabulary_size - first_word_id);
    return first_word_id + static_cast<std::int32_t>(words.word(index) % choices);
  };

  std::vector<std::vector<std::int32_t>> prompts, responses;
  for (std::int64_t n = 0; n < o.samples; ++n) {
    auto& prompt = prompts.emplace_back(1, static_cast<std::int32_t>(bos_id));
    for (std::int64_t t = 1; t < o.prompt_length; ++t) {
      prompt.push_back(static_cast<std::int32_t>(word(n, t)));
    }
    auto const length =
        static_cast<std::int64_t>(1 + response_lengths.word(static_cast<std::uint64_t>(n)) %
                                          static_cast<std::uint64_t>(o.max_response));
    auto& response = responses.emplace_back();
    for (std::int64_t t = 0; t < length; ++t) {
      response.push_back(static_cast<std::int32_t>(word(n, o.prompt_length + t)));
    }
    if (length < o.max_response) response.back() = static_cast<std::int32_t>(eos_id);
  }
  auto rollout = vpkl::pad_rollout(prompts, responses, eos_id, pad_id, o.sequence_length);

  vpkl::RolloutContent content;
  content.info.samples = o.samples;
  content.info.sequence_length = o.sequence_length;
  content.info.vocabulary_size = o.vocabulary_size;
  content.info.bos_token_id = bos_id;
  content.info.eos_token_id = eos_id;
  content.info.pad_token_id = pad_id;
  content.info.seed = o.seed;
  content.info.generator = "vpkl-fixture make";
  content.info.tokenizer_fingerprint = fmt::format("synthetic-{}", o.vocabulary_size);
  content.info.student_name = "synthetic student";
  content.info.teacher_name = "synthetic teacher";
  content.tokens = std::move(rollout.tokens);
  content.attention_mask = std::move(rollout.attention_mask);
  content.response_start = std::move(rollout.response_start);
  content.teacher = random_model(o, vpkl::Side::teacher, content.attention_mask);
  content.student = random_model(o, vpkl::Side::student, content.attention_mask);
  content.shared_head = o.shared_head;
  return content;
}
