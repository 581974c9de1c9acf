// SPDX-License-Identifier: Apache-2.0
// What sums of token values are divided by, and the order they are summed in.
#include <vpkl/core/error.hpp>
#include <vpkl/loss/normalization.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

using namespace vpkl;
using Kind = Normalization::Kind;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

TEST(normalization, token_mean) {
  Normalization n;
  EXPECT_EQ(n.loss_factor(4), 0.25);
  EXPECT_EQ(n.row_weight(4), 0.25);
  n.gradient_accumulation_steps = 8;
  n.loss_scale = 1024;
  EXPECT_EQ(n.loss_factor(4), 0.25) << "the reported loss is without accumulation and scale";
  EXPECT_EQ(n.row_weight(4), 0.25 * 1024 / 8);
}

TEST(normalization, an_empty_mask_weighs_nothing) {
  Normalization n;
  n.loss_scale = 1024;
  EXPECT_EQ(n.loss_factor(0), 0);
  EXPECT_EQ(n.row_weight(0), 0);
}

TEST(normalization, global_divisor_replaces_count_and_accumulation) {
  Normalization n;
  n.kind = Kind::global_divisor;
  n.divisor = 40;
  n.gradient_accumulation_steps = 8;
  n.loss_scale = 2;
  for (std::int64_t tokens : {0, 1, 17}) {
    EXPECT_EQ(n.loss_factor(tokens), 1.0 / 40);
    EXPECT_EQ(n.row_weight(tokens), 2.0 / 40);
  }
}

struct Refusal {
  Normalization normalization;
  std::string text;
};

TEST(normalization, refusals_name_the_value) {
  std::vector<Refusal> refusals;
  for (auto const& [value, text] : {std::pair<double, char const*>{0, "0"},
                                    {-4, "-4"},
                                    {nan_value, "nan"},
                                    {infinity, "inf"}}) {
    Normalization divisor;
    divisor.kind = Kind::global_divisor;
    divisor.divisor = value;
    refusals.push_back({divisor, std::string("global divisor is ") + text});
    Normalization scale;
    scale.loss_scale = value;
    refusals.push_back({scale, std::string("loss scale is ") + text});
  }
  for (std::int64_t steps : {0, -2}) {
    Normalization n;
    n.gradient_accumulation_steps = steps;
    refusals.push_back({n, "gradient accumulation steps are " + std::to_string(steps)});
  }
  for (Refusal const& refusal : refusals) {
    try {
      check_normalization(refusal.normalization);
      ADD_FAILURE() << "accepted, expected: " << refusal.text;
    } catch (InvalidArgument const& e) {
      EXPECT_NE(std::string(e.what()).find(refusal.text), std::string::npos) << e.what();
    }
  }
}

TEST(normalization, an_unused_divisor_is_not_looked_at) {
  Normalization n;
  n.divisor = nan_value;
  EXPECT_NO_THROW(check_normalization(n));
}

TEST(normalization, names) {
  for (Kind kind : {Kind::token_mean, Kind::global_divisor})
    EXPECT_EQ(normalization_from_string(to_string(kind)), kind);
  EXPECT_THROW(normalization_from_string("mean"), InvalidArgument);
}

TEST(tree_sum, small_sums) {
  EXPECT_EQ(tree_sum({}), 0);
  EXPECT_EQ(tree_sum({3}), 3);
  EXPECT_EQ(tree_sum({1, 2, 3, 4, 5}), 15);
  std::vector<float> ones(100'003, 1.0f);
  EXPECT_EQ(tree_sum(ones), 100'003);
}

// 2^53 swallows a single 1: what is added to what shows in the last bit.
TEST(tree_sum, tree_is_fixed_by_the_index) {
  float const large = 9007199254740992.0f;
  EXPECT_EQ(tree_sum({1, 1, large}), 9007199254740994.0);
  EXPECT_EQ(tree_sum({large, 1, 1}), 9007199254740992.0);
  EXPECT_EQ(tree_sum({1, 0, 1, 0, large}), 9007199254740994.0);
  EXPECT_EQ(tree_sum({large, 0, 0, 0, 1, 0, 1}), 9007199254740994.0);
}

TEST(tree_sum, more_zeros_at_the_end_change_no_bit) {
  std::vector<float> values;
  for (int i = 1; i <= 77; ++i)
    values.push_back(static_cast<float>(std::sin(i) * std::exp2(i % 40)));
  double const sum = tree_sum(values);
  for (int zeros = 0; zeros < 300; ++zeros) {
    values.push_back(0);
    EXPECT_EQ(tree_sum(values), sum);
  }
}

TEST(tree_sum, non_finite_values_reach_the_sum) {
  EXPECT_TRUE(std::isnan(tree_sum({1, std::numeric_limits<float>::quiet_NaN(), 2})));
  EXPECT_EQ(tree_sum({1, std::numeric_limits<float>::infinity(), 2}), infinity);
}

}  // namespace
