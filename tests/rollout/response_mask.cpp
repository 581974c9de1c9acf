// SPDX-License-Identifier: Apache-2.0
#include "io/temporary_directory.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/rollout/response_mask.hpp>

namespace {

using namespace vpkl;
using namespace vpkl::test;
using Ids = std::vector<std::int32_t>;
using Mask = std::vector<std::uint8_t>;

// Case 32.
TEST(pad_rollout, padding_with_the_end_of_sequence_id) {
  auto const r = pad_rollout({{7, 2, 9}}, {{5, 6, 2, 2, 2}}, 2, 2);
  EXPECT_EQ(r.tokens, (Ids{7, 2, 9, 5, 6, 2, 2, 2}));
  EXPECT_EQ(r.attention_mask, (Mask{1, 1, 1, 1, 1, 1, 0, 0}));
  EXPECT_EQ(r.response_start, (std::vector<std::int64_t>{3}));
  EXPECT_EQ(r.length, (std::vector<std::int64_t>{6}));
  EXPECT_EQ(response_mask(8, r.response_start, r.attention_mask), (Mask{0, 0, 0, 1, 1, 1, 0, 0}));
}

TEST(pad_rollout, padding_id_zero_stays_zero) {
  auto const r = pad_rollout({{0, 9}, {7}}, {{5, 2, 0, 0}, {0, 6, 2}}, 2, 0, 7);
  EXPECT_EQ(r.tokens, (Ids{0, 9, 5, 2, 0, 0, 0, 0, 7, 0, 6, 2, 0, 0}));
  EXPECT_EQ(r.attention_mask, (Mask{1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0}));
  EXPECT_EQ(r.response_start, (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(r.length, (std::vector<std::int64_t>{4, 4}));
}

TEST(pad_rollout, without_end_of_sequence_trailing_padding_is_no_response) {
  auto const r = pad_rollout({{7}, {7}, {7}}, {{5, 0, 6, 0, 0}, {0, 0}, {}}, -1, 0);
  EXPECT_EQ(r.length, (std::vector<std::int64_t>{4, 1, 1}));
  EXPECT_EQ(r.sequence_length, 6);
}

TEST(pad_rollout, no_special_ids) {
  auto const r = pad_rollout({{7}, {8, 9}}, {{5, 2}, {}}, -1, -1);
  EXPECT_EQ(r.tokens, (Ids{0, 7, 5, 2, 8, 9, 0, 0}));
  EXPECT_EQ(r.attention_mask, (Mask{0, 1, 1, 1, 1, 1, 0, 0}));
}

TEST(pad_rollout, refuses_lengths_and_ids_out_of_range) {
  EXPECT_THROW(pad_rollout({{7}}, {{5}}, -1, -1, -1), InvalidArgument);
  EXPECT_THROW(pad_rollout({}, {}, -1, -1, -1), InvalidArgument);
  EXPECT_THROW(pad_rollout({{7}}, {{5}}, -2, 0), InvalidArgument);
  EXPECT_THROW(pad_rollout({{7}}, {{5}}, std::int64_t(1) << 31, 0), InvalidArgument);
  EXPECT_THROW(pad_rollout({{7}}, {{5}}, 0, -2), InvalidArgument);
  EXPECT_THROW(pad_rollout({{7}}, {{5}}, 0, std::int64_t(1) << 40), InvalidArgument);
}

TEST(pad_rollout, refuses) {
  EXPECT_TRUE(mentions(message_of<InvalidArgument>([] { pad_rollout({{1}}, {}, 2, 2); }),
                       "1 prompts", "0 generated"));
  EXPECT_TRUE(mentions(message_of<InvalidArgument>([] {
                         pad_rollout({{1, 1}}, {{1}}, 2, 0, 2);
                       }),
                       "sample 0", "3 positions", "at most 2"));
}

TEST(response_mask, holes_and_left_padding) {
  EXPECT_EQ(response_mask(4, {1, 0, 4}, {0, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1}),
            (Mask{0, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0}));
  EXPECT_EQ(response_mask(0, {}, {}), Mask{});
}

TEST(response_mask, refuses) {
  EXPECT_TRUE(mentions(message_of<InvalidArgument>([] { response_mask(2, {0}, {1}); }), "[1, 2]"));
  for (std::int64_t const start : {-1, 3}) {
    EXPECT_TRUE(mentions(message_of<InvalidArgument>([&] {
                           response_mask(2, {start}, {1, 1});
                         }),
                         std::to_string(start)));
  }
}

}  // namespace
