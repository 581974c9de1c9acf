// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief VocabShard: which ids of the vocabulary a rank's columns hold.
#pragma once

#include <vpkl/parallel/communicator.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace vpkl {

/// What gives token ids their meaning; equal on every rank that shares a vocabulary.
struct TokenSemantics {
  std::string tokenizer_fingerprint;  ///< empty when unknown
  std::int64_t bos = -1;              ///< -1: none
  std::int64_t eos = -1;              ///< -1: none
  std::int64_t pad = -1;              ///< -1: none
};

/// How vocabularies of different width are brought together.
enum class VocabularyPolicy {
  exact,          ///< widths must be equal
  common_prefix,  ///< ids [0, min) count; the others never enter and get gradient 0
};

/// \brief Number of ids that student and teacher share under `policy`.
/// \throws InvalidArgument naming both widths when they differ under `exact`, or are not positive
std::int64_t align_vocabularies(std::int64_t student_vocabulary, std::int64_t teacher_vocabulary,
                                VocabularyPolicy policy);

/// \brief Balanced contiguous range `[begin, end)` of `rank`; sizes differ by at most one.
std::pair<std::int64_t, std::int64_t> even_range(std::int64_t vocabulary, int ranks, int rank);

/// One rank's part of a vocabulary.
///
/// Column c < width() of a row of logits is id begin() + c. A tensor may be physically wider than
/// that (padding): student_width() and teacher_width() are what its rows hold.
class VocabShard {
 public:
  /// What a rank brings to make().
  struct Spec {
    std::int64_t vocabulary = 0;     ///< ids that count, over all ranks
    std::int64_t begin = 0;          ///< first id of this rank
    std::int64_t end = 0;            ///< one past its last
    std::int64_t student_width = 0;  ///< physical columns, at least end - begin
    std::int64_t teacher_width = 0;  ///< physical columns, at least end - begin
    TokenSemantics tokens;           ///< equal on every rank
  };

  /// \brief Collective. Makes a shard that the group has agreed on: the ranges tile
  /// `[0, vocabulary)` in rank order, exactly and without overlap; vocabulary and token semantics
  /// are equal. Empty shards are fine.
  /// \throws InvalidArgument, AgreementError on every rank
  static VocabShard make(Communicator const& comm, Spec const& spec);

  /// \brief The whole vocabulary on this rank; no communication.
  static VocabShard whole(std::int64_t vocabulary, std::int64_t student_width = -1,
                          std::int64_t teacher_width = -1);

  std::int64_t vocabulary() const { return spec_.vocabulary; }        ///< ids over all ranks
  std::int64_t begin() const { return spec_.begin; }                  ///< first id of this rank
  std::int64_t end() const { return spec_.end; }                      ///< one past its last
  std::int64_t width() const { return spec_.end - spec_.begin; }      ///< ids of this rank
  std::int64_t student_width() const { return spec_.student_width; }  ///< physical columns
  std::int64_t teacher_width() const { return spec_.teacher_width; }  ///< physical columns
  TokenSemantics const& tokens() const { return spec_.tokens; }       ///< as given

  int rank() const { return rank_; }                                  ///< in the group that agreed
  int ranks() const { return static_cast<int>(bounds_.size()) - 1; }  ///< of that group
  /// First id of rank r; bounds()[ranks()] is the vocabulary.
  std::vector<std::int64_t> const& bounds() const { return bounds_; }
  /// \brief Ids of the rank that has most.
  std::int64_t largest_width() const;

 private:
  Spec spec_;
  int rank_ = 0;
  std::vector<std::int64_t> bounds_;
};

}  // namespace vpkl
