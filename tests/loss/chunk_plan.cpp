// SPDX-License-Identifier: Apache-2.0
// Which rows count, and in what pieces.
#include "support/environment.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/loss/chunk_plan.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

using namespace vpkl;
using namespace vpkl::test;

namespace {

using Bytes = std::vector<std::uint8_t>;
using Numbers = std::vector<std::int64_t>;

ResponseMask mask_of(Bytes const& bytes, std::int64_t batch, std::int64_t length) {
  return {bytes.data(), batch, length, 0};
}

/// Row numbers that count, from the definition.
Numbers counted_rows(Bytes const& bytes, std::int64_t batch, std::int64_t length) {
  Numbers rows;
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t t = 0; t + 1 < length; ++t)
      if (bytes[b * length + t + 1]) rows.push_back(b * length + t);
  return rows;
}

template <class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (InvalidArgument const& e) {
    return e.what();
  }
  return "nothing was thrown";
}

#define EXPECT_REFUSED(statement, text)                                   \
  EXPECT_NE(message_of([&] { statement; }).find(text), std::string::npos) \
      << message_of([&] { statement; })

struct Shape {
  std::int64_t batch, length;
};

class ChunkPlanProperties {
 public:
  ChunkPlanProperties(Bytes bytes, Shape shape) : bytes_(std::move(bytes)), shape_(shape) {
    counted_ = counted_rows(bytes_, shape.batch, shape.length);
  }

  void check(PlanKind kind, std::int64_t width, bool skip) const {
    SCOPED_TRACE(fmt::format("[{}, {}] mask [{}] {} width {} skip {}", shape_.batch, shape_.length,
                             fmt::join(bytes_, ""), to_string(kind), width, skip));
    ChunkPlan const plan(mask_of(bytes_, shape_.batch, shape_.length), kind, width, skip);
    EXPECT_EQ(plan.kind(), kind);
    EXPECT_EQ(plan.tokens(), static_cast<std::int64_t>(counted_.size()));
    ASSERT_EQ(plan.rows().size(), plan.counted().size());
    Numbers marked;
    for (std::size_t i = 0; i < plan.rows().size(); ++i)
      if (plan.counted()[i]) marked.push_back(plan.rows()[i]);
    std::sort(marked.begin(), marked.end());
    EXPECT_EQ(marked, counted_) << "every counted row once, no other";

    std::int64_t next = 0, largest = 0;
    for (ChunkPlan::Chunk const& chunk : plan.chunks()) {
      EXPECT_EQ(chunk.first_row, next);
      next += chunk.rows;
      largest = std::max(largest, chunk.rows);
    }
    EXPECT_EQ(next, static_cast<std::int64_t>(plan.rows().size()));
    EXPECT_EQ(plan.largest_chunk(), largest);
    if (kind == PlanKind::rows)
      check_rows_plan(plan, width);
    else
      check_chunks_plan(plan, width, skip);
  }

 private:
  void check_rows_plan(ChunkPlan const& plan, std::int64_t width) const {
    EXPECT_EQ(plan.rows(), counted_);
    EXPECT_EQ(plan.skipped(), 0);
    std::int64_t const limit = shape_.batch * std::min(width, shape_.length);
    for (std::size_t i = 0; i < plan.chunks().size(); ++i) {
      std::int64_t const rows = plan.chunks()[i].rows;
      EXPECT_TRUE(i + 1 < plan.chunks().size() ? rows == limit : rows >= 1 && rows <= limit);
    }
  }

  void check_chunks_plan(ChunkPlan const& plan, std::int64_t width, bool skip) const {
    std::size_t at = 0;
    std::int64_t skipped = 0;
    for (std::int64_t begin = 0; begin < shape_.length;) {
      std::int64_t const end = width < shape_.length - begin ? begin + width : shape_.length;
      std::int64_t const first = begin;
      Numbers rows;
      bool some = false;
      for (std::int64_t b = 0; b < shape_.batch; ++b)
        for (std::int64_t t = begin; t < end; ++t) {
          rows.push_back(b * shape_.length + t);
          some = some || std::binary_search(counted_.begin(), counted_.end(), rows.back());
        }
      begin = end;
      if (skip && !some) {
        ++skipped;
        continue;
      }
      ASSERT_LT(at, plan.chunks().size());
      ChunkPlan::Chunk const& chunk = plan.chunks()[at++];
      EXPECT_EQ(chunk.begin, first);
      EXPECT_EQ(chunk.end, end);
      EXPECT_EQ(chunk.rows, static_cast<std::int64_t>(rows.size()));
      EXPECT_TRUE(std::equal(rows.begin(), rows.end(), plan.rows().begin() + chunk.first_row));
    }
    EXPECT_EQ(at, plan.chunks().size());
    EXPECT_EQ(plan.skipped(), skipped);
  }

  Bytes bytes_;
  Shape shape_;
  Numbers counted_;
};

TEST(response_mask, row_counts_when_the_next_token_is_response) {
  Bytes const bytes{1, 0, 0, 1, 1, 0};
  ResponseMask const mask = mask_of(bytes, 2, 3);
  Numbers counted;
  for (std::int64_t b = 0; b < 2; ++b)
    for (std::int64_t t = 0; t < 3; ++t)
      if (mask.counts(b, t)) counted.push_back(b * 3 + t);
  EXPECT_EQ(counted, (Numbers{3}));
}

// Case 13: the last position never counts, whatever the mask holds.
TEST(response_mask, last_position_never_counts) {
  Bytes const bytes{0, 1, 1};
  ChunkPlan const plan(mask_of(bytes, 1, 3), PlanKind::rows, 8);
  EXPECT_EQ(plan.rows(), (Numbers{0, 1}));
  Bytes const one{1, 1};
  EXPECT_EQ(ChunkPlan(mask_of(one, 2, 1), PlanKind::rows, 1).tokens(), 0);
}

TEST(response_mask, stride_and_any_nonzero_byte) {
  Bytes const apart{0, 1, 1, 9, 9, 0, 0, 255, 9, 9};
  ResponseMask const mask{apart.data(), 2, 3, 5};
  EXPECT_EQ(ChunkPlan(mask, PlanKind::rows, 2).rows(), (Numbers{0, 1, 4}));
  Bytes const dense{0, 1, 1, 0, 0, 1};
  EXPECT_EQ(hash_mask(mask), hash_mask(mask_of(dense, 2, 3)));
}

TEST(response_mask, hash_tells_every_token_and_the_extents) {
  Bytes bytes{0, 1, 1, 0, 0, 1};
  std::vector<std::uint64_t> hashes{
      hash_mask(mask_of(bytes, 2, 3)), hash_mask(mask_of(bytes, 3, 2)),
      hash_mask(mask_of(bytes, 1, 6)), hash_mask(mask_of(bytes, 0, 3)),
      hash_mask(mask_of(bytes, 2, 0))};
  for (std::uint8_t& token : bytes) {
    token ^= 1;
    hashes.push_back(hash_mask(mask_of(bytes, 2, 3)));
    token ^= 1;
  }
  std::sort(hashes.begin(), hashes.end());
  EXPECT_EQ(std::unique(hashes.begin(), hashes.end()), hashes.end());
}

TEST(chunk_plan, every_mask_and_width_of_small_shapes) {
  for (Shape const shape : {Shape{0, 0}, Shape{0, 4}, Shape{3, 0}, Shape{1, 1}, Shape{3, 1},
                            Shape{1, 2}, Shape{1, 5}, Shape{2, 4}, Shape{3, 3}}) {
    std::int64_t const tokens = shape.batch * shape.length;
    for (std::uint32_t pattern = 0; pattern < (1u << tokens); ++pattern) {
      Bytes bytes;
      for (std::int64_t i = 0; i < tokens; ++i)
        bytes.push_back((pattern >> i) & 1u);
      ChunkPlanProperties const properties(bytes, shape);
      for (std::int64_t width = 1; width <= shape.length + 1; ++width) {
        properties.check(PlanKind::rows, width, true);
        properties.check(PlanKind::chunks, width, true);
        properties.check(PlanKind::chunks, width, false);
      }
    }
  }
}

TEST(chunk_plan, larger_masks_with_holes) {
  Random random(20240605);
  for (int i = 0; i < 200; ++i) {
    Shape const shape{uniform(random, 1, 5), uniform(random, 2, 60)};
    Bytes bytes;
    std::int64_t const density = uniform(random, 0, 9);
    for (std::int64_t k = 0; k < shape.batch * shape.length; ++k)
      bytes.push_back(uniform(random, 0, 9) < density ? 1 : 0);
    ChunkPlanProperties const properties(bytes, shape);
    for (PlanKind kind : {PlanKind::rows, PlanKind::chunks})
      for (bool skip : {true, false})
        properties.check(kind, uniform(random, 1, shape.length), skip);
  }
}

TEST(chunk_plan, widest_width) {
  Bytes const bytes{0, 0, 1, 1, 0, 1};
  ChunkPlanProperties const properties(bytes, {2, 3});
  for (PlanKind kind : {PlanKind::rows, PlanKind::chunks})
    properties.check(kind, std::numeric_limits<std::int64_t>::max(), true);
}

// Lesson of a field report: computing all 9 chunks where 2 hold response tokens.
TEST(chunk_plan, chunks_without_response_are_left_out) {
  Bytes bytes(2112, 0);
  for (std::int64_t t = 2048; t < 2112; ++t)
    bytes[t] = 1;
  ChunkPlan const plan(mask_of(bytes, 1, 2112), PlanKind::chunks, 256);
  ASSERT_EQ(plan.chunks().size(), 2u);
  EXPECT_EQ(plan.chunks()[0].begin, 1792);  // row 2047 predicts token 2048
  EXPECT_EQ(plan.chunks()[1].begin, 2048);
  EXPECT_EQ(plan.chunks()[1].end, 2112);
  EXPECT_EQ(plan.skipped(), 7);
  ChunkPlan const rows(mask_of(bytes, 1, 2112), PlanKind::rows, 256);
  ASSERT_EQ(rows.chunks().size(), 1u);
  EXPECT_EQ(rows.chunks()[0].rows, 64);
}

TEST(chunk_plan, refusals_name_the_value) {
  Bytes const bytes{0, 1};
  EXPECT_REFUSED(ChunkPlan(mask_of(bytes, 1, 2), PlanKind::rows, 0), "chunk width is 0");
  EXPECT_REFUSED(ChunkPlan(mask_of(bytes, 1, 2), PlanKind::chunks, -3), "chunk width is -3");
  EXPECT_REFUSED(check_mask({bytes.data(), -1, 2, 0}), "[-1, 2]");
  EXPECT_REFUSED(check_mask({bytes.data(), 1, -2, 0}), "[1, -2]");
  EXPECT_REFUSED(check_mask({nullptr, 1, 2, 0}), "null");
  EXPECT_REFUSED(check_mask({bytes.data(), 1, 2, 1}), "row stride is 1");
  EXPECT_REFUSED(check_mask({bytes.data(), 1, 2, -2}), "row stride is -2");
  EXPECT_NO_THROW(check_mask({nullptr, 0, 7, 0}));
  EXPECT_NO_THROW(check_mask({nullptr, 7, 0, 0}));
}

TEST(chunk_plan, names) {
  for (PlanKind kind : {PlanKind::rows, PlanKind::chunks})
    EXPECT_EQ(plan_kind_from_string(to_string(kind)), kind);
  EXPECT_REFUSED(plan_kind_from_string("columns"), "'columns'");
}

}  // namespace
