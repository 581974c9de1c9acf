// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Branch-free elementary functions that compilers vectorise, each within about 2 ulp.
#pragma once

#include <vpkl/core/element_type.hpp>

#include <cstdint>
#include <limits>

namespace vpkl::impl::host {

/// `condition ? a : b` on the bits. Written as a conditional expression, compilers that respect
/// floating-point traps make branches of it, and the loops around it stay scalar.
inline float select(bool condition, float a, float b) {
  std::int32_t const mask = -static_cast<std::int32_t>(condition);
  return bit_cast<float>((bit_cast<std::int32_t>(a) & mask) | (bit_cast<std::int32_t>(b) & ~mask));
}

/// a·b + c, fused where the target of the build has the instruction. Written out, since contraction
/// by the compiler would depend on what it inlines where.
inline float multiply_add(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline float at_least(float x, float low) { return select(x > low, x, low); }
inline float at_most(float x, float high) { return select(x < high, x, high); }

/// e^x for x <= 0 (finite); exact at 0, gradual underflow below.
/// Range reduction of Cody and Waite, polynomial of Cephes' expf (S. L. Moshier).
inline float exp_nonpositive(float x) {
  x = at_least(x, -104.0f);
  // Adding 1.5 · 2^23 rounds to the nearest integer.
  float const shifted = multiply_add(x, 1.44269504088896341f, 12582912.0f);
  float const n = shifted - 12582912.0f;
  float const r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, x));
  float p = 1.9875691500e-4f;
  p = multiply_add(p, r, 1.3981999507e-3f);
  p = multiply_add(p, r, 8.3334519073e-3f);
  p = multiply_add(p, r, 4.1665795894e-2f);
  p = multiply_add(p, r, 1.6666665459e-1f);
  p = multiply_add(p, r, 5.0000001201e-1f);
  p = multiply_add(p, r * r, r) + 1.0f;
  // 2^n in two factors, so that subnormal results round once.
  std::int32_t const k = bit_cast<std::int32_t>(shifted) - 0x4b400000;
  std::int32_t const low = k >> 1, high = k - low;
  return (p * bit_cast<float>((high + 127) << 23)) * bit_cast<float>((low + 127) << 23);
}

/// e^x - 1 for x <= 0, relative precision kept near 0.
inline float expm1_nonpositive(float x) {
  // Taylor to x^7 on [-0.35, 0]: the next term is below 2^-26 relative.
  float const small = at_least(x, -0.35f);
  float p = 1.9841270e-4f;
  p = multiply_add(p, small, 1.3888889e-3f);
  p = multiply_add(p, small, 8.3333333e-3f);
  p = multiply_add(p, small, 4.1666667e-2f);
  p = multiply_add(p, small, 1.6666667e-1f);
  p = multiply_add(p, small, 0.5f);
  p = multiply_add(p, small * small, small);
  float const large = exp_nonpositive(x) - 1.0f;
  return select(x > -0.35f, p, large);
}

/// log(w), given what is known of w - 1 beyond the rounding of w; w normal.
inline float log_with_rest(float w, float rest) {
  // w = 2^e · f, f in [√½, √2); log f = 2 atanh(u), u = (f-1)/(f+1), |u| < 0.172
  std::int32_t const bits = bit_cast<std::int32_t>(w);
  std::int32_t const e = (bits - 0x3f3504f3) >> 23;
  float const f = bit_cast<float>(bits - e * (1 << 23));
  float const u = (f - 1.0f) / (f + 1.0f);
  float const v = u * u;
  float series = 0.22222222f;
  series = multiply_add(series, v, 0.28571429f);
  series = multiply_add(series, v, 0.4f);
  series = multiply_add(series, v, 0.66666667f);
  series = u * multiply_add(series, v, 2.0f);
  float const n = static_cast<float>(e);
  return multiply_add(n, 0.693359375f, series + multiply_add(n, -2.12194440e-4f, rest / w));
}

/// log(c' + c e^x) for x <= 0, where c' = 1 - c > 0: the log of a mixture of e^0 and e^x, relative
/// precision kept where it is near 0 and where c' is tiny.
inline float log_mixture(float c, float c_rest, float x) {
  float const y = c * expm1_nonpositive(x);
  bool const near = y > -0.5f;
  float const w = select(near, 1.0f + y, c_rest + c * exp_nonpositive(x));
  float const rest = select(near, y - (w - 1.0f), 0.0f);
  return log_with_rest(w, rest);
}

}  // namespace vpkl::impl::host
