// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Element types of logits, with vpkl's own two-byte floats.
///
/// Kokkos has no bfloat16 before 3.6 and stores it in four bytes on host backends, so vpkl brings
/// two-byte types whose bits are those of the files and of CUDA's types.
#pragma once

#include <vpkl/core/kokkos.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace vpkl {

/// Storage type of a tensor of logits, hidden states or weights.
enum class ElementType : std::int32_t { fp32 = 0, bf16 = 1, fp16 = 2 };

/// \brief Bytes of one element.
constexpr std::size_t size_of(ElementType type) { return type == ElementType::fp32 ? 4 : 2; }

/// \brief "fp32", "bf16" or "fp16".
char const* to_string(ElementType type);

/// \brief Inverse of to_string.
/// \throws InvalidArgument naming the text and the accepted ones
ElementType element_type_from_string(std::string const& text);

namespace impl {

template <class To, class From>
KOKKOS_FORCEINLINE_FUNCTION To bit_cast(From const& from) {
  static_assert(sizeof(To) == sizeof(From), "vpkl::impl::bit_cast: sizes differ");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace impl

/// bfloat16: 1 sign, 8 exponent, 7 mantissa bits. Conversion from float rounds to nearest even;
/// NaN stays NaN (payload truncated, made quiet); values beyond the range become infinite.
struct bfloat16 {
  std::uint16_t bits;  ///< as in files and in CUDA's type

  /// \brief Rounds to nearest even.
  KOKKOS_FORCEINLINE_FUNCTION static bfloat16 from_float(float value) {
    std::uint32_t const word = impl::bit_cast<std::uint32_t>(value);
    std::uint32_t const rounded = word + 0x7fffu + ((word >> 16) & 1u);
    bool const is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    return bfloat16{static_cast<std::uint16_t>(is_nan ? ((word >> 16) | 0x40u) : (rounded >> 16))};
  }
  /// \brief Exact.
  KOKKOS_FORCEINLINE_FUNCTION float to_float() const {
    return impl::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
};

/// IEEE binary16. Conversion from float rounds to nearest even, keeps subnormals, turns overflow
/// into infinity and NaN into a quiet NaN.
struct half {
  std::uint16_t bits;  ///< as in files and in CUDA's type

  /// \brief Rounds to nearest even.
  KOKKOS_FORCEINLINE_FUNCTION static half from_float(float value) {
    std::uint32_t const word = impl::bit_cast<std::uint32_t>(value);
    std::uint32_t const sign = (word >> 16) & 0x8000u;
    std::uint32_t const magnitude = word & 0x7fffffffu;
    // Below 2^-14 the result is subnormal: adding 0.5 lets the hardware round at bit 2^-24.
    std::uint32_t const subnormal =
        impl::bit_cast<std::uint32_t>(impl::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    std::uint32_t const normal =
        (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    std::uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
    if (magnitude >= 0x477ff000u) result = 0x7c00u;
    if (magnitude > 0x7f800000u) result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    return half{static_cast<std::uint16_t>(sign | result)};
  }
  /// \brief Exact.
  KOKKOS_FORCEINLINE_FUNCTION float to_float() const {
    std::uint32_t const sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    std::uint32_t const magnitude = bits & 0x7fffu;
    // 2^112 rebiases the exponent exactly, subnormals included.
    float const scaled =
        impl::bit_cast<float>(magnitude << 13) * impl::bit_cast<float>(0x77800000u);
    std::uint32_t const word = magnitude >= 0x7c00u ? (0x7f800000u | (magnitude << 13))
                                                    : impl::bit_cast<std::uint32_t>(scaled);
    return impl::bit_cast<float>(sign | word);
  }
};

static_assert(sizeof(bfloat16) == 2 && sizeof(half) == 2, "two-byte element types");

/// Maps a C++ element type to its ElementType and converts it from and to float.
template <class T>
struct ElementTraits;

template <>
struct ElementTraits<float> {
  static constexpr ElementType type = ElementType::fp32;
  KOKKOS_FORCEINLINE_FUNCTION static float to_float(float value) { return value; }
  KOKKOS_FORCEINLINE_FUNCTION static float from_float(float value) { return value; }
};
template <>
struct ElementTraits<bfloat16> {
  static constexpr ElementType type = ElementType::bf16;
  KOKKOS_FORCEINLINE_FUNCTION static float to_float(bfloat16 value) { return value.to_float(); }
  KOKKOS_FORCEINLINE_FUNCTION static bfloat16 from_float(float v) {
    return bfloat16::from_float(v);
  }
};
template <>
struct ElementTraits<half> {
  static constexpr ElementType type = ElementType::fp16;
  KOKKOS_FORCEINLINE_FUNCTION static float to_float(half value) { return value.to_float(); }
  KOKKOS_FORCEINLINE_FUNCTION static half from_float(float value) {
    return half::from_float(value);
  }
};

/// \brief Calls `f` with a value of the C++ type that `type` names (float{}, bfloat16{} or half{}).
template <class F>
decltype(auto) dispatch(ElementType type, F&& f) {
  switch (type) {
    case ElementType::bf16: return f(bfloat16{});
    case ElementType::fp16: return f(half{});
    case ElementType::fp32: break;
  }
  return f(float{});
}

}  // namespace vpkl
