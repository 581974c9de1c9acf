// SPDX-License-Identifier: Apache-2.0
#include "work.hpp"

#include <vpkl/core/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <set>

namespace vpkl::transfer {

char const* to_string(Direction direction) { return direction == Direction::h2d ? "h2d" : "d2h"; }
char const* to_string(Pattern pattern) { return pattern == Pattern::chunk ? "chunk" : "rows"; }

Direction direction_from_string(std::string const& text) {
  for (Direction direction : {Direction::h2d, Direction::d2h})
    if (text == to_string(direction)) return direction;
  throw InvalidArgument(fmt::format("direction is '{}', expected h2d or d2h", text));
}

Pattern pattern_from_string(std::string const& text) {
  for (Pattern pattern : {Pattern::chunk, Pattern::rows})
    if (text == to_string(pattern)) return pattern;
  throw InvalidArgument(fmt::format("pattern is '{}', expected chunk or rows", text));
}

std::string Work::key() const {
  return fmt::format("{}/{}/{}/{}/{}x{}x{}/{}", to_string(direction), to_string(pattern), engine,
                     vpkl::to_string(shape.type), shape.batch, shape.length, shape.vocabulary,
                     pattern == Pattern::chunk ? fmt::format("c{}", chunk_width)
                                               : fmt::format("r{}", rows.size()));
}

nlohmann::json Work::describe() const {
  nlohmann::json object = {{"key", key()},
                           {"engine", engine},
                           {"direction", to_string(direction)},
                           {"pattern", to_string(pattern)},
                           {"element_type", vpkl::to_string(shape.type)},
                           {"batch", shape.batch},
                           {"length", shape.length},
                           {"vocabulary", shape.vocabulary},
                           {"rows", rows.size()},
                           {"row_bytes", shape.row_bytes()},
                           {"rows_aligned_to_128_bytes", shape.row_bytes() % 128 == 0},
                           {"bytes", bytes()}};
  if (pattern == Pattern::chunk) {
    object["chunk_width"] = chunk_width;
    object["chunk_begin"] = begin;
  }
  return object;
}

Work chunk_work(std::string engine, Direction direction, Shape const& shape,
                std::int64_t chunk_width) {
  Work work{std::move(engine), direction, Pattern::chunk, shape, 0, chunk_width, {}};
  work.begin = (shape.length - chunk_width) / 2;
  for (std::int64_t b = 0; b < shape.batch; ++b)
    for (std::int64_t t = work.begin; t < work.begin + chunk_width; ++t)
      work.rows.push_back(b * shape.length + t);
  return work;
}

Work rows_work(std::string engine, Direction direction, Shape const& shape, std::int64_t count) {
  Work work{std::move(engine), direction, Pattern::rows, shape, 0, 0, {}};
  // Always the same rows, so that engines and runs can be compared.
  std::mt19937_64 random(1);
  std::set<std::int64_t> chosen;
  std::int64_t const wanted = std::min(count, shape.rows());
  while (static_cast<std::int64_t>(chosen.size()) < wanted)
    chosen.insert(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(shape.rows())));
  work.rows.assign(chosen.begin(), chosen.end());
  return work;
}

}  // namespace vpkl::transfer
