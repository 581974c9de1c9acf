// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief What a series of transfers moves, and what one of them took.
#pragma once

#include <vpkl/core/element_type.hpp>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace vpkl::transfer {

enum class Direction { h2d, d2h };
/// The positions [begin, begin + C) of every batch row, or single rows anywhere in `[B, T]`.
enum class Pattern { chunk, rows };

char const* to_string(Direction direction);
char const* to_string(Pattern pattern);
/// \throws InvalidArgument naming the text and the accepted ones
Direction direction_from_string(std::string const& text);
Pattern pattern_from_string(std::string const& text);

/// A tensor `[batch, length, vocabulary]` in host memory.
struct Shape {
  std::int64_t batch = 0, length = 0, vocabulary = 0;
  ElementType type = ElementType::bf16;

  std::int64_t rows() const { return batch * length; }
  std::size_t row_bytes() const { return static_cast<std::size_t>(vocabulary) * size_of(type); }
};

/// One series: some rows of a tensor, to or from a contiguous block at the other end.
struct Work {
  std::string engine;
  Direction direction = Direction::h2d;
  Pattern pattern = Pattern::chunk;
  Shape shape;
  std::int64_t begin = 0, chunk_width = 0;  ///< of Pattern::chunk
  std::vector<std::int64_t> rows;           ///< moved, ascending row numbers b·T + t

  std::size_t bytes() const { return rows.size() * shape.row_bytes(); }
  /// \brief Stable name of the case.
  std::string key() const;
  nlohmann::json describe() const;
};

/// \brief The work of one engine on a chunk in the middle of `length`, or on `count` scattered
/// rows.
Work chunk_work(std::string engine, Direction direction, Shape const& shape,
                std::int64_t chunk_width);
Work rows_work(std::string engine, Direction direction, Shape const& shape, std::int64_t count);

/// One transfer.
struct Sample {
  double seconds = 0;      ///< until the caller may use the data
  std::int64_t wrong = 0;  ///< elements that did not arrive
};

}  // namespace vpkl::transfer
