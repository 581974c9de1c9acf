// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Synthetic rollouts for measurements and tests.
#pragma once

#include <vpkl/core/element_type.hpp>
#include <vpkl/rollout/fixture.hpp>

#include <cstdint>

/// What to synthesise.
struct SyntheticOptions {
  std::int64_t samples = 4;
  std::int64_t sequence_length = 64;
  std::int64_t prompt_length = 16;
  std::int64_t max_response = 48;
  std::int64_t vocabulary_size = 1031;
  std::int64_t hidden_student = 64;
  std::int64_t hidden_teacher = 64;
  vpkl::ElementType type = vpkl::ElementType::bf16;
  std::int64_t seed = 1;
  bool shared_head = false;
};

/// \brief A rollout of random prompts, responses of random length, hidden states and heads.
///
/// Logits have a standard deviation of about 2. With equal hidden sizes the student is the teacher
/// with a quarter of noise added, otherwise the two are independent. Every value is a function of
/// seed and position alone, the same bits on every machine.
/// \throws vpkl::InvalidArgument if prompt and response do not fit the sequence
vpkl::RolloutContent synthesise(SyntheticOptions const& options);
