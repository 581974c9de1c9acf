// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Which rows of `[B, T]` count, and in what pieces they are computed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace vpkl {

/// Response mask over tokens `[batch, length]` in host memory: 1 where the token is part of the
/// response. Non-owning.
///
/// The logits at position t predict token t+1 (causal shift), so row (b, t) counts where
/// mask(b, t+1) is set; the last position never counts.
struct ResponseMask {
  std::uint8_t const* data = nullptr;  ///< host memory
  std::int64_t batch = 0;              ///< B
  std::int64_t length = 0;             ///< T
  std::int64_t row_stride = 0;         ///< elements between batch rows; 0 means `length`

  /// \brief Whether token t of sequence b belongs to the response.
  bool token(std::int64_t b, std::int64_t t) const {
    return data[b * (row_stride ? row_stride : length) + t] != 0;
  }
  /// \brief Whether row (b, t) of the logits counts in the loss.
  bool counts(std::int64_t b, std::int64_t t) const { return t + 1 < length && token(b, t + 1); }
};

/// \brief Refuses negative extents and a null pointer. \throws InvalidArgument
void check_mask(ResponseMask const& mask);

/// \brief Hash of extents and tokens, equal for equal masks whatever their stride.
std::uint64_t hash_mask(ResponseMask const& mask);

/// How the counted rows are cut into calls of the operator.
enum class PlanKind : std::int32_t {
  rows = 0,    ///< counted rows alone, packed into as few calls as the bound allows
  chunks = 1,  ///< ranges of positions `[B, chunk_width]`; ranges without counted rows are skipped
};

/// \brief "rows" or "chunks".
char const* to_string(PlanKind kind);
/// \brief Inverse of to_string. \throws InvalidArgument naming the text
PlanKind plan_kind_from_string(std::string const& text);

/// The pieces of one micro-batch, in the order they are computed. Rows are numbered b·T + t.
class ChunkPlan {
 public:
  /// One call of the operator.
  struct Chunk {
    std::int64_t begin = 0;      ///< `chunks`: positions [begin, end) of every batch row
    std::int64_t end = 0;        ///< see begin
    std::int64_t first_row = 0;  ///< index of the chunk's first row in rows()
    std::int64_t rows = 0;       ///< number of its rows
  };

  /// \brief Plans a micro-batch.
  /// \param[in] mask response mask, unshifted
  /// \param[in] kind how the counted rows are cut
  /// \param[in] width `chunks`: positions a chunk; `rows`: at most batch · width rows a call, the
  /// same bound on memory
  /// \param[in] skip_empty leave out chunks without counted rows
  /// \throws InvalidArgument naming a width below 1 or a bad mask
  ChunkPlan(ResponseMask const& mask, PlanKind kind, std::int64_t width, bool skip_empty = true);

  PlanKind kind() const { return kind_; }                       ///< as given
  std::vector<Chunk> const& chunks() const { return chunks_; }  ///< in the order of their rows
  /// Row numbers of all chunks, one after the other; `chunks` lists uncounted rows too.
  std::vector<std::int64_t> const& rows() const { return rows_; }
  /// Whether each entry of rows() counts.
  std::vector<std::uint8_t> const& counted() const { return counted_; }
  std::int64_t tokens() const { return tokens_; }    ///< rows that count
  std::int64_t skipped() const { return skipped_; }  ///< chunks left out
  std::int64_t largest_chunk() const;                ///< rows

 private:
  void plan_rows(ResponseMask const& mask, std::int64_t width);
  void plan_chunks(ResponseMask const& mask, std::int64_t width, bool skip_empty);

  PlanKind kind_;
  std::vector<Chunk> chunks_;
  std::vector<std::int64_t> rows_;
  std::vector<std::uint8_t> counted_;
  std::int64_t tokens_ = 0;
  std::int64_t skipped_ = 0;
};

}  // namespace vpkl
