// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/error.hpp>
#include <vpkl/loss/chunk_plan.hpp>
#include <vpkl/parallel/agreement.hpp>

#include <fmt/format.h>

#include <algorithm>

namespace vpkl {

void check_mask(ResponseMask const& mask) {
  if (mask.batch < 0 || mask.length < 0)
    throw InvalidArgument(fmt::format("response mask: shape is [{}, {}], expected at least [0, 0]",
                                      mask.batch, mask.length));
  if (mask.row_stride != 0 && mask.row_stride < mask.length)
    throw InvalidArgument(fmt::format("response mask: row stride is {}, expected at least {}",
                                      mask.row_stride, mask.length));
  if (mask.batch > 0 && mask.length > 0 && mask.data == nullptr)
    throw InvalidArgument(fmt::format("response mask: data is null, expected [{}, {}] bytes",
                                      mask.batch, mask.length));
}

std::uint64_t hash_mask(ResponseMask const& mask) {
  std::uint64_t hash = hash_bytes(&mask.batch, sizeof mask.batch);
  hash = hash_bytes(&mask.length, sizeof mask.length, hash);
  for (std::int64_t b = 0; b < mask.batch; ++b)
    for (std::int64_t t = 0; t < mask.length; ++t) {
      unsigned char const token = mask.token(b, t) ? 1 : 0;
      hash = hash_bytes(&token, 1, hash);
    }
  return hash;
}

char const* to_string(PlanKind kind) { return kind == PlanKind::rows ? "rows" : "chunks"; }

PlanKind plan_kind_from_string(std::string const& text) {
  for (PlanKind kind : {PlanKind::rows, PlanKind::chunks})
    if (text == to_string(kind)) return kind;
  throw InvalidArgument(fmt::format("plan is '{}', expected rows or chunks", text));
}

ChunkPlan::ChunkPlan(ResponseMask const& mask, PlanKind kind, std::int64_t width, bool skip_empty)
    : kind_(kind) {
  check_mask(mask);
  if (width < 1)
    throw InvalidArgument(fmt::format("chunk width is {}, expected at least 1", width));
  if (kind == PlanKind::rows)
    plan_rows(mask, width);
  else
    plan_chunks(mask, width, skip_empty);
}

void ChunkPlan::plan_rows(ResponseMask const& mask, std::int64_t width) {
  for (std::int64_t b = 0; b < mask.batch; ++b)
    for (std::int64_t t = 0; t < mask.length; ++t)
      if (mask.counts(b, t)) rows_.push_back(b * mask.length + t);
  tokens_ = static_cast<std::int64_t>(rows_.size());
  counted_.assign(rows_.size(), 1);
  std::int64_t const limit = mask.batch * std::min(width, std::max<std::int64_t>(mask.length, 1));
  for (std::int64_t first = 0; first < tokens_; first += limit)
    chunks_.push_back({0, 0, first, std::min(limit, tokens_ - first)});
}

void ChunkPlan::plan_chunks(ResponseMask const& mask, std::int64_t width, bool skip_empty) {
  for (std::int64_t begin = 0; begin < mask.length;) {
    std::int64_t const end = begin + std::min(width, mask.length - begin);
    std::int64_t counted = 0;
    for (std::int64_t b = 0; b < mask.batch; ++b)
      for (std::int64_t t = begin; t < end; ++t)
        counted += mask.counts(b, t) ? 1 : 0;
    tokens_ += counted;
    if (skip_empty && counted == 0) {
      ++skipped_;
    } else {
      chunks_.push_back(
          {begin, end, static_cast<std::int64_t>(rows_.size()), mask.batch * (end - begin)});
      for (std::int64_t b = 0; b < mask.batch; ++b)
        for (std::int64_t t = begin; t < end; ++t) {
          rows_.push_back(b * mask.length + t);
          counted_.push_back(mask.counts(b, t) ? 1 : 0);
        }
    }
    begin = end;
  }
}

std::int64_t ChunkPlan::largest_chunk() const {
  std::int64_t largest = 0;
  for (Chunk const& chunk : chunks_)
    largest = std::max(largest, chunk.rows);
  return largest;
}

}  // namespace vpkl
