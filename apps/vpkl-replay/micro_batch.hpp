// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief The fixture in memory, and micro-batches of it.
#pragma once

#include "gemm.hpp"

#include <vpkl/loss/chunk_plan.hpp>
#include <vpkl/rollout/fixture.hpp>

#include <cstdint>
#include <vector>

namespace vpkl::replay {

using Exec = Kokkos::DefaultExecutionSpace;
using Bytes = ByteView<Exec>;

/// Hidden states `[rows, H]` of one model.
struct Hidden {
  Bytes bytes;
  apps::Matrix matrix;
};

/// Samples of a fixture, assembled for one pass through heads and loss.
struct MicroBatch {
  std::vector<std::int32_t> tokens;  ///< [B, T]
  std::vector<std::uint8_t> mask;    ///< [B, T], response tokens
  std::int64_t batch = 0, length = 0;
  Hidden student, teacher;

  ResponseMask response_mask() const { return {mask.data(), batch, length, 0}; }
  /// Rows that count, ascending.
  std::vector<std::int64_t> counted_rows() const;
};

/// A fixture with both models, read once; ranks hold all samples' hidden states.
class Rollouts {
 public:
  /// \throws FileError; InvalidArgument when the fixture lacks a model
  explicit Rollouts(std::string const& path);

  RolloutFixture const& fixture() const { return fixture_; }
  std::int64_t samples() const { return fixture_.info().samples; }
  std::int64_t length() const { return fixture_.info().sequence_length; }
  std::int64_t vocabulary() const { return fixture_.info().vocabulary_size; }
  std::int64_t response_tokens() const { return response_tokens_; }

  /// \brief Samples `first, first + 1, …` modulo their number.
  MicroBatch micro_batch(Exec const& exec, std::int64_t first, std::int64_t batch) const;

 private:
  struct Model {
    std::int64_t hidden_size = 0;
    ElementType type = ElementType::fp32;
    std::vector<unsigned char> hidden;  ///< [N, T, H]
  };
  Model read(Side side) const;
  Hidden select(Exec const& exec, Model const& model,
                std::vector<std::int64_t> const& samples) const;

  RolloutFixture fixture_;
  std::vector<std::int32_t> tokens_;
  std::vector<std::uint8_t> mask_;
  std::int64_t response_tokens_ = 0;
  Model student_, teacher_;
};

}  // namespace vpkl::replay
