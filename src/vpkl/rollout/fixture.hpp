// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Rollout fixtures: tokens, masks, hidden states and heads of a rollout in one HDF5 file.
///
/// The format is described in fixtures/FORMAT.md. HDF5's rule on threads applies: one at a time.
#pragma once

#include <vpkl/core/element_type.hpp>
#include <vpkl/divergence/options.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace vpkl {

/// The two models of a distillation.
enum class Side { student, teacher };

/// \brief "student" or "teacher".
char const* to_string(Side side);

/// How much of a fixture is checked when it is opened.
enum class FixtureCheck {
  metadata,  ///< attributes, shapes, tokens, masks and lengths; data when read, by its checksums
  content,   ///< also every byte against the content SHA-256, and heads outside the file
};

/// Root attributes of a fixture.
struct FixtureInfo {
  std::int64_t samples = 0;           ///< N
  std::int64_t sequence_length = 0;   ///< T
  std::int64_t vocabulary_size = 0;   ///< V
  std::int64_t bos_token_id = -1;     ///< -1: none
  std::int64_t eos_token_id = -1;     ///< -1: none
  std::int64_t pad_token_id = -1;     ///< -1: none
  std::int64_t seed = 0;              ///< of the rollout
  std::string generator;              ///< program that made the fixture
  std::string tokenizer_fingerprint;  ///< see fixtures/FORMAT.md; empty when unknown
  std::string student_name;           ///< for people; empty where unknown
  std::string teacher_name;           ///< for people; empty where unknown
};

/// A head that lies in a safetensors file.
struct HeadReference {
  std::string path;    ///< absolute, or relative to the fixture's directory
  std::string sha256;  ///< of the whole file, 64 hexadecimal digits
  std::string tensor;  ///< name of a tensor [rows, H] of at least V rows, the first V count
};

/// What a fixture holds of one model.
struct FixtureModel {
  std::int64_t hidden_size = 0;                 ///< H
  ElementType hidden_type = ElementType::fp32;  ///< of the last hidden states
  std::optional<HeadReference> head_reference;  ///< set if the head is not in the fixture itself
};

/// An open fixture.
class RolloutFixture {
 public:
  /// \brief Opens and checks a fixture.
  /// \param[in] path   file
  /// \param[in] check  how thoroughly
  /// \throws FileError naming file and dataset if the file is missing, damaged, incomplete, of
  /// another schema or inconsistent
  explicit RolloutFixture(std::string const& path, FixtureCheck check = FixtureCheck::metadata);
  RolloutFixture(RolloutFixture&&) noexcept;             ///< leaves nothing to read behind
  RolloutFixture& operator=(RolloutFixture&&) noexcept;  ///< leaves nothing to read behind
  ~RolloutFixture();

  std::string const& path() const;  ///< as given
  FixtureInfo const& info() const;  ///< root attributes

  /// \brief SHA-256 of the contents as recorded in the file (see fixtures/FORMAT.md).
  std::string const& content_sha256() const;

  /// \name Samples [first, first + count)
  /// \throws FileError; InvalidArgument if the range leaves [0, N)
  /// \{
  std::vector<std::int32_t> tokens(std::int64_t first, std::int64_t count) const;  ///< [count, T]
  std::vector<std::uint8_t> attention_mask(std::int64_t first,
                                           std::int64_t count) const;  ///< [count, T]
  std::vector<std::int64_t> response_start(std::int64_t first,
                                           std::int64_t count) const;              ///< [count]
  std::vector<std::int64_t> length(std::int64_t first, std::int64_t count) const;  ///< [count]
  /// Empty if the fixture has no prompt texts.
  std::vector<std::string> prompt_text(std::int64_t first, std::int64_t count) const;
  /// \}

  /// \brief Ids of the V tokens in the tokenizer's own vocabulary, if the fixture holds a slice of
  /// it; else empty.
  std::vector<std::int32_t> vocabulary_ids() const;

  /// \brief Token-mean loss of the whole fixture as PyTorch computed it when the fixture was made,
  /// where recorded for these logits and options (`/expected`).
  std::optional<double> expected_loss(ElementType logits, DivergenceOptions const& options) const;

  /// \brief Whether the fixture holds hidden states and head of this model.
  bool has_model(Side side) const;

  /// \throws InvalidArgument if the fixture does not hold this model
  FixtureModel const& model(Side side) const;

  /// \brief Element type of a model's head. Opens and hashes a head outside the file, once.
  ElementType head_type(Side side) const;

  /// \brief Reads last hidden states.
  /// \param[in]  side   model
  /// \param[in]  first  first sample
  /// \param[in]  count  number of samples
  /// \param[out] out    [count, T, H] elements of the model's hidden type, bit for bit
  void read_hidden(Side side, std::int64_t first, std::int64_t count, void* out) const;

  /// \brief Reads rows of the head, from the fixture or from the safetensors file it names.
  /// \param[in]  side       model
  /// \param[in]  first_row  first token id
  /// \param[in]  rows       number of ids
  /// \param[out] out        [rows, H] elements of head_type, bit for bit
  /// \throws FileError, also if the safetensors file is missing or another one than was recorded
  void read_head(Side side, std::int64_t first_row, std::int64_t rows, void* out) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Produces `count` rows from `first` on.
using RowSource = std::function<void(std::int64_t first, std::int64_t count, void* out)>;

/// One model of a fixture to be written.
struct ModelContent {
  std::int64_t hidden_size = 0;                 ///< H
  ElementType hidden_type = ElementType::fp32;  ///< of the hidden states
  ElementType head_type = ElementType::fp32;    ///< ignored with a reference
  RowSource hidden;                             ///< [count, T, H] of samples
  RowSource head;                               ///< [count, H] of token ids; unset with a reference
  std::optional<HeadReference> head_reference;  ///< head in a safetensors file instead
};

/// A fixture to be written. Hidden states and heads are asked for piece by piece, so that memory is
/// bounded by one sample's.
struct RolloutContent {
  FixtureInfo info;                          ///< root attributes; extents included
  std::vector<std::int32_t> tokens;          ///< [N, T]
  std::vector<std::uint8_t> attention_mask;  ///< [N, T]
  std::vector<std::int64_t> response_start;  ///< [N]
  std::vector<std::string> prompt_text;      ///< [N] or empty
  std::vector<std::int32_t> vocabulary_ids;  ///< [V] or empty
  std::optional<ModelContent> student;       ///< unset: the fixture has none
  std::optional<ModelContent> teacher;       ///< unset: the fixture has none
  /// The student's head is the teacher's and stored once; the student's own is not asked for.
  bool shared_head = false;
  /// Called now and then with the bytes written and their total.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress;
};

/// \brief Writes a fixture. It appears under its name complete or not at all; an existing file of
/// that name is replaced.
/// \param[in] path     file name with the extension .h5; missing directories are made
/// \param[in] content  what to write
/// \throws InvalidArgument naming what is inconsistent
/// \throws FileError naming the file, e.g. when the disk is too small (found before writing)
void write_fixture(std::string const& path, RolloutContent const& content);

}  // namespace vpkl
