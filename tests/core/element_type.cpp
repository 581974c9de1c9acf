// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/element_type.hpp>
#include <vpkl/core/error.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace {

using namespace vpkl;

float from_bits(std::uint32_t word) { return impl::bit_cast<float>(word); }

/// What a two-byte float of this shape means, from its definition.
double meaning(std::uint16_t bits, int exponent_bits, int mantissa_bits) {
  int const bias = (1 << (exponent_bits - 1)) - 1;
  int const exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  double const mantissa = std::ldexp(bits & ((1 << mantissa_bits) - 1), -mantissa_bits);
  double const sign = bits >> 15 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1)
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  return exponent == 0 ? sign * std::ldexp(mantissa, 1 - bias)
                       : sign * std::ldexp(1 + mantissa, exponent - bias);
}

template <class T>
struct Shape;
template <>
struct Shape<bfloat16> {
  static constexpr int exponent = 8, mantissa = 7;
};
template <>
struct Shape<vpkl::half> {
  static constexpr int exponent = 5, mantissa = 10;
};

template <class T>
double meaning(T value) {
  return meaning(value.bits, Shape<T>::exponent, Shape<T>::mantissa);
}

/// The nearest value, ties to the even pattern; found by comparing neighbours.
template <class T>
std::uint16_t nearest(float value) {
  if (std::isinf(value)) return T::from_float(value).bits;
  std::uint16_t const sign = std::signbit(value) ? 0x8000 : 0;
  double const magnitude = std::abs(static_cast<double>(value));
  std::uint16_t low = 0;
  std::uint16_t const infinity =
      static_cast<std::uint16_t>(((1 << Shape<T>::exponent) - 1) << Shape<T>::mantissa);
  for (std::uint16_t high = infinity; high - low > 1;) {
    std::uint16_t const middle = static_cast<std::uint16_t>(low + (high - low) / 2);
    (meaning(middle, Shape<T>::exponent, Shape<T>::mantissa) <= magnitude ? low : high) = middle;
  }
  // Beyond the largest value, infinity stands where the next one would be.
  auto const at = [&](std::uint16_t bits) {
    return bits == infinity ? 2 * meaning(infinity - 1, Shape<T>::exponent, Shape<T>::mantissa) -
                                  meaning(infinity - 2, Shape<T>::exponent, Shape<T>::mantissa)
                            : meaning(bits, Shape<T>::exponent, Shape<T>::mantissa);
  };
  double const below = magnitude - at(low), above = at(low + 1) - magnitude;
  bool const up = above < below || (above == below && low % 2 == 1);
  return static_cast<std::uint16_t>(sign | (low + (up ? 1 : 0)));
}

template <class T>
class TwoBytes : public testing::Test {};
using Types = testing::Types<bfloat16, vpkl::half>;
TYPED_TEST_SUITE(TwoBytes, Types);

TYPED_TEST(TwoBytes, every_pattern_converts_and_returns) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    TypeParam const value{static_cast<std::uint16_t>(bits)};
    float const wide = value.to_float();
    double const want = meaning(value);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(wide)) << bits;
      ASSERT_TRUE(std::isnan(TypeParam::from_float(wide).to_float())) << bits;
      continue;
    }
    ASSERT_EQ(wide, want) << bits;
    ASSERT_EQ(std::signbit(wide), bits >> 15 != 0) << bits;
    ASSERT_EQ(TypeParam::from_float(wide).bits, bits);
  }
}

TYPED_TEST(TwoBytes, rounds_to_nearest_even) {
  std::vector<float> values = {0.0f,
                               -0.0f,
                               std::numeric_limits<float>::denorm_min(),
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::lowest(),
                               65504.0f,
                               65519.99f,
                               65520.0f,
                               65536.0f};
  // Around every pattern: ties with the next one, and their neighbours.
  for (std::uint32_t bits = 0; bits < 0x10000; bits += 7) {
    TypeParam const a{static_cast<std::uint16_t>(bits)}, b{static_cast<std::uint16_t>(bits + 1)};
    if (!std::isfinite(a.to_float()) || !std::isfinite(b.to_float())) continue;
    float const tie = static_cast<float>((meaning(a) + meaning(b)) / 2);
    values.insert(values.end(), {tie, std::nextafter(tie, 1e30f), std::nextafter(tie, -1e30f)});
  }
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i)
    values.push_back(from_bits(static_cast<std::uint32_t>(random())));
  for (float value : values) {
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(TypeParam::from_float(value).to_float()));
      continue;
    }
    ASSERT_EQ(TypeParam::from_float(value).bits, nearest<TypeParam>(value)) << value;
  }
}

TEST(ElementType, names_go_both_ways) {
  for (ElementType type : {ElementType::fp32, ElementType::bf16, ElementType::fp16})
    EXPECT_EQ(element_type_from_string(to_string(type)), type);
  EXPECT_THROW(element_type_from_string("fp64"), InvalidArgument);
  EXPECT_EQ(size_of(ElementType::fp32), 4u);
  EXPECT_EQ(size_of(ElementType::bf16), 2u);
  EXPECT_EQ(size_of(ElementType::fp16), 2u);
}

TEST(ElementType, dispatch_names_the_type) {
  for (ElementType type : {ElementType::fp32, ElementType::bf16, ElementType::fp16})
    dispatch(type, [&](auto element) { EXPECT_EQ(ElementTraits<decltype(element)>::type, type); });
}

}  // namespace
