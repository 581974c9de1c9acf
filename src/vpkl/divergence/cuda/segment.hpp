// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief The arithmetic of one segment of columns on a warp.
///
/// Every CUDA kernel calls these functions, and nothing else touches a logit: a row's bits cannot
/// depend on how rows and segments were spread over warps. All sums and products are spelt as
/// single-rounding intrinsics, so that no compiler contracts them differently in two kernels.
#pragma once

#include <vpkl/divergence/cuda/columns.hpp>
#include <vpkl/divergence/row_constants.hpp>

#include <cstdint>

namespace vpkl::impl::cuda {

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ float lowest_float() { return __uint_as_float(0xff7fffffu); }
__device__ __forceinline__ float largest_float() { return __uint_as_float(0x7f7fffffu); }

/// \brief 2^x by the special-function unit, within 2 ulp, exactly 1 at 0; results below 2^-126
/// become 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float rcp_fast(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

/// \brief 2^x for x <= 0 in double, to about 1e-9: factors of merged sums.
__device__ __forceinline__ double exp2_factor(double x) {
  if (!(x > -1000.0)) return 0;
  double const n = rint(x);
  double const g = __dmul_rn(__dsub_rn(x, n), 0.69314718055994530942);
  double p = 1.0 / 40320;
  p = __fma_rn(p, g, 1.0 / 5040);
  p = __fma_rn(p, g, 1.0 / 720);
  p = __fma_rn(p, g, 1.0 / 120);
  p = __fma_rn(p, g, 1.0 / 24);
  p = __fma_rn(p, g, 1.0 / 6);
  p = __fma_rn(p, g, 0.5);
  p = __fma_rn(p, g, 1.0);
  p = __fma_rn(p, g, 1.0);
  return __dmul_rn(p, __longlong_as_double((static_cast<long long>(n) + 1023) << 52));
}

/// Constants of a call that segments need.
struct SegmentOptions {
  float exponent_scale;       ///< log2(e)/T
  float inverse_temperature;  ///< 1/T

  static SegmentOptions make(KernelOptions const& options) {
    return {static_cast<float>(1.4426950408889634074 / options.temperature),
            options.inverse_temperature};
  }
};

/// Statistics of a segment. Unlike RowStatistics, `weighted` is in units of logits (not yet / T).
struct SegmentRecord {
  float max_student, max_teacher;
  float sum_student, sum_teacher;
  float weighted;
  std::uint32_t flags;
};

__device__ __forceinline__ float warp_largest(float x) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2)
    x = max_or_nan(x, __shfl_xor_sync(all_lanes, x, step));
  return x;
}

// Both partners add the same two numbers: every lane ends with the same bits.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2)
    x = __fadd_rn(x, __shfl_xor_sync(all_lanes, x, step));
  return x;
}

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2)
    x = __dadd_rn(x, __shfl_xor_sync(all_lanes, x, step));
  return x;
}

/// \brief 0 for a set without support, so that -inf - max stays -inf.
__device__ __forceinline__ float safe_max(float max) {
  return max == minus_infinity() ? 0.0f : max;
}

/// \brief The lane's part of W = Σ ea · (a - b) and the support flag, for any logits.
template <Weighting weighting, class VS, class VT>
__device__ __forceinline__ void careful_weighted(VS const (&s)[vectors], VT const (&t)[vectors],
                                                 float max_student, float max_teacher,
                                                 float exponent_scale, float& weighted,
                                                 bool& unsupported) {
  float sum[2] = {0, 0};
  unsupported = false;
#pragma unroll
  for (int i = 0; i < vectors; ++i)
#pragma unroll
    for (int j = 0; j < vector_columns; ++j) {
      float const xs = s[i].get(j), xt = t[i].get(j);
      bool const has_student = xs > minus_infinity(), has_teacher = xt > minus_infinity();
      unsupported |= weighting == Weighting::teacher ? has_teacher && !has_student
                                                     : has_student && !has_teacher;
      float const a = __fsub_rn(xs, max_student), b = __fsub_rn(xt, max_teacher);
      float const difference =
          __fsub_rn(fmaxf(weighting == Weighting::teacher ? b : a, lowest_float()),
                    fmaxf(weighting == Weighting::teacher ? a : b, lowest_float()));
      float const e = exp2_fast(__fmul_rn(weighting == Weighting::teacher ? b : a, exponent_scale));
      sum[j % 2] = __fmaf_rn(e, difference, sum[j % 2]);
    }
  weighted = __fadd_rn(sum[0], sum[1]);
}

/// \brief Statistics of a segment; the same on all lanes.
/// \param[in,out] s, t the lane's columns
/// \param[in] reload `reload(s, t)` loads them once more
template <Weighting weighting, class VS, class VT, class Reload>
__device__ __forceinline__ SegmentRecord segment_statistics(VS (&s)[vectors], VT (&t)[vectors],
                                                            SegmentOptions const& options,
                                                            Reload const& reload) {
  SegmentRecord r;
  r.max_student = warp_largest(VS::largest(s));
  r.max_teacher = warp_largest(VT::largest(t));
  r.sum_student = r.sum_teacher = r.weighted = 0;
  r.flags = 0;
  // Maxima carry NaN, so this is false for NaN and +inf anywhere.
  if (!(r.max_student <= largest_float() && r.max_teacher <= largest_float())) {
    r.max_student = r.max_teacher = minus_infinity();
    r.flags = RowStatistics::invalid;
    return r;
  }
  float const ms = safe_max(r.max_student), mt = safe_max(r.max_teacher);
  float sum_student[2] = {0, 0}, sum_teacher[2] = {0, 0}, sum_weighted[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < vectors; ++i)
#pragma unroll
    for (int j = 0; j < vector_columns; ++j) {
      float const a = __fsub_rn(s[i].get(j), ms), b = __fsub_rn(t[i].get(j), mt);
      float const es = exp2_fast(__fmul_rn(a, options.exponent_scale));
      float const et = exp2_fast(__fmul_rn(b, options.exponent_scale));
      sum_student[j % 2] = __fadd_rn(sum_student[j % 2], es);
      sum_teacher[j % 2] = __fadd_rn(sum_teacher[j % 2], et);
      if (weighting == Weighting::teacher)
        sum_weighted[j % 2] = __fmaf_rn(et, __fsub_rn(b, a), sum_weighted[j % 2]);
      if (weighting == Weighting::student)
        sum_weighted[j % 2] = __fmaf_rn(es, __fsub_rn(a, b), sum_weighted[j % 2]);
    }
  r.sum_student = warp_sum(__fadd_rn(sum_student[0], sum_student[1]));
  r.sum_teacher = warp_sum(__fadd_rn(sum_teacher[0], sum_teacher[1]));
  if (weighting != Weighting::none) {
    r.weighted = warp_sum(__fadd_rn(sum_weighted[0], sum_weighted[1]));
    // A logit of -inf, or a difference beyond float, leaves no finite sum. Loaded again, so that
    // the common case need not keep the columns in registers until here.
    if (!(fabsf(r.weighted) <= largest_float())) {
      bool unsupported;
      asm volatile("" ::: "memory");
      reload(s, t);
      careful_weighted<weighting>(s, t, ms, mt, options.exponent_scale, r.weighted, unsupported);
      r.weighted = warp_sum(r.weighted);
      if (__any_sync(all_lanes, unsupported)) r.flags |= RowStatistics::unsupported;
    }
  }
  return r;
}

/// \brief Statistics of `count` segments of a row, in a fixed tree; the same on all lanes.
/// \param[in] weighting of the records
__device__ inline RowStatistics merge_segments(SegmentRecord const* records, std::int64_t count,
                                               Weighting weighting, SegmentOptions const& options) {
  int const lane = threadIdx.x % lanes;
  float max_student = minus_infinity(), max_teacher = minus_infinity();
  std::uint32_t flags = 0;
  for (std::int64_t i = lane; i < count; i += lanes) {
    max_student = fmaxf(max_student, records[i].max_student);
    max_teacher = fmaxf(max_teacher, records[i].max_teacher);
    flags |= records[i].flags;
  }
  max_student = warp_largest(max_student);
  max_teacher = warp_largest(max_teacher);
  RowStatistics r;
  r.max_student = max_student;
  r.max_teacher = max_teacher;
  r.sum_student = r.sum_teacher = 0;
  r.weighted = 0;
  r.flags = __reduce_or_sync(all_lanes, flags);
  if (r.flags & RowStatistics::invalid) return r;

  double sum_student = 0, sum_teacher = 0, weighted = 0;
  double const scale = static_cast<double>(options.exponent_scale);
  for (std::int64_t i = lane; i < count; i += lanes) {
    SegmentRecord const part = records[i];
    // A set without support has sums of 0.
    double const shift_student =
        part.sum_student > 0 ? __dsub_rn(part.max_student, max_student) : 0.0;
    double const shift_teacher =
        part.sum_teacher > 0 ? __dsub_rn(part.max_teacher, max_teacher) : 0.0;
    double const factor_student = exp2_factor(__dmul_rn(shift_student, scale));
    double const factor_teacher = exp2_factor(__dmul_rn(shift_teacher, scale));
    sum_student = __fma_rn(factor_student, part.sum_student, sum_student);
    sum_teacher = __fma_rn(factor_teacher, part.sum_teacher, sum_teacher);
    double const moved = __dsub_rn(shift_student, shift_teacher);
    if (weighting == Weighting::teacher)
      weighted =
          __fma_rn(factor_teacher, __fma_rn(part.sum_teacher, -moved, part.weighted), weighted);
    if (weighting == Weighting::student)
      weighted =
          __fma_rn(factor_student, __fma_rn(part.sum_student, moved, part.weighted), weighted);
  }
  r.sum_student = warp_sum(sum_student);
  r.sum_teacher = warp_sum(sum_teacher);
  r.weighted = static_cast<float>(
      __dmul_rn(warp_sum(weighted), static_cast<double>(options.inverse_temperature)));
  return r;
}

/// Constants of a row's gradient, prepared for the inner loop.
struct GradientConstants {
  RowState state;
  float max_student, max_teacher;
  float scale;  ///< of the whole gradient
  float ratio;  ///< forward KL: S_teacher / S_student
  float mean;   ///< reverse KL, JSD
  // JSD
  float inverse_sum_student, inverse_sum_teacher, log_ratio, beta, beta_rest;
};

/// \brief From finalised statistics; `row` must come from row_constants.
__device__ __forceinline__ GradientConstants gradient_constants(RowStatistics const& s,
                                                                RowConstants const& row,
                                                                KernelOptions const& options,
                                                                double mean_jsd, float weight) {
  GradientConstants c;
  c.state = row.state;
  c.max_student = s.max_student;
  c.max_teacher = s.max_teacher;
  c.inverse_sum_student = row.inverse_sum_student;
  c.inverse_sum_teacher = row.inverse_sum_teacher;
  c.log_ratio = row.log_ratio;
  c.beta = static_cast<float>(options.beta);
  c.beta_rest = static_cast<float>(1.0 - options.beta);
  c.mean = row.mean;
  c.ratio = 1;
  double const scale = __dmul_rn(options.temperature, static_cast<double>(weight));
  c.scale = static_cast<float>(scale);
  switch (options.divergence) {
    case Divergence::forward_kl:
      c.ratio = static_cast<float>(s.sum_teacher / s.sum_student);
      c.scale = static_cast<float>(scale / s.sum_teacher);
      break;
    case Divergence::reverse_kl: c.scale = static_cast<float>(scale / s.sum_student); break;
    case Divergence::jsd:
      c.mean = static_cast<float>(mean_jsd);
      c.scale = static_cast<float>(__dmul_rn(scale, 1.0 - options.beta) / s.sum_student);
      break;
  }
  return c;
}

/// \brief log(1 + y) for -1 <= y <= 0 given w = 1 + y as well, to about 1e-7 absolutely and exactly
/// 0 at 0. Polynomial near 0, where the special-function unit keeps no relative precision.
__device__ __forceinline__ float log_of_mixture(float w, float y) {
  // log w = 2 atanh(u), u = (f-1)/(f+1), after w = 2^e f with f in [√½, √2).
  int const e = (__float_as_int(w) - 0x3f3504f3) >> 23;
  float const f = __int_as_float(__float_as_int(w) - (e << 23));
  // Without scaling, f - 1 is y itself and needs no subtraction that loses its low bits.
  float const g = e == 0 ? y : __fsub_rn(f, 1.0f);
  float const u = __fmul_rn(g, rcp_fast(__fadd_rn(f, 1.0f)));
  float const v = __fmul_rn(u, u);
  float p = 0.22222222f;
  p = __fmaf_rn(p, v, 0.28571429f);
  p = __fmaf_rn(p, v, 0.4f);
  p = __fmaf_rn(p, v, 0.66666667f);
  p = __fmaf_rn(p, v, 2.0f);
  return __fmaf_rn(static_cast<float>(e), 0.69314718f, __fmul_rn(u, p));
}

/// log(ps/m) and log(pt/m) of a column, exactly 0 where the two agree.
struct LogRatios {
  float student, teacher;
};

/// \param[in] a, b student's and teacher's logit minus their maximum
__device__ __forceinline__ LogRatios log_ratios(float a, float b, GradientConstants const& c,
                                                SegmentOptions const& options) {
  // log pt - log ps, kept finite.
  float const difference = fminf(
      fmaxf(__fmaf_rn(__fsub_rn(b, a), options.inverse_temperature, -c.log_ratio), lowest_float()),
      largest_float());
  bool const student_larger = difference <= 0;
  float const magnitude = -fabsf(difference);
  // m / max(ps, pt) is a mixture of 1 and q = e^-|difference|.
  float const q = exp2_fast(__fmul_rn(magnitude, 1.44269504f));
  float const part = student_larger ? c.beta : c.beta_rest;
  float const rest = student_larger ? c.beta_rest : c.beta;
  // Near equality from 1 + part (q - 1), far from it rest + part q: neither cancels.
  float const y = __fmul_rn(part, __fsub_rn(q, 1.0f));
  float const w = y > -0.5f ? __fadd_rn(1.0f, y) : __fmaf_rn(part, q, rest);
  float const l = log_of_mixture(w, y);
  return student_larger ? LogRatios{-l, __fsub_rn(difference, l)}
                        : LogRatios{-__fadd_rn(difference, l), -l};
}

/// \brief JSD's sums over a segment of a regular row; the same on all lanes.
template <class VS, class VT>
__device__ __forceinline__ JsdSums segment_jsd_sums(VS const (&s)[vectors], VT const (&t)[vectors],
                                                    GradientConstants const& c,
                                                    SegmentOptions const& options) {
  float student[2] = {0, 0}, teacher[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < vectors; ++i)
#pragma unroll
    for (int j = 0; j < vector_columns; ++j) {
      float const a = fmaxf(__fsub_rn(s[i].get(j), c.max_student), lowest_float());
      float const b = fmaxf(__fsub_rn(t[i].get(j), c.max_teacher), lowest_float());
      float const ps =
          __fmul_rn(exp2_fast(__fmul_rn(a, options.exponent_scale)), c.inverse_sum_student);
      float const pt =
          __fmul_rn(exp2_fast(__fmul_rn(b, options.exponent_scale)), c.inverse_sum_teacher);
      LogRatios const log_m = log_ratios(a, b, c, options);
      student[j % 2] = __fmaf_rn(ps, log_m.student, student[j % 2]);
      teacher[j % 2] = __fmaf_rn(pt, log_m.teacher, teacher[j % 2]);
    }
  JsdSums sums;
  sums.student = warp_sum(__fadd_rn(student[0], student[1]));
  sums.teacher = warp_sum(__fadd_rn(teacher[0], teacher[1]));
  return sums;
}

/// \brief Adds `count` segments' sums in a fixed tree; the same on all lanes.
__device__ inline JsdSums merge_sums(JsdSums const* parts, std::int64_t count) {
  JsdSums sum;
  for (std::int64_t i = threadIdx.x % lanes; i < count; i += lanes) {
    sum.student = __dadd_rn(sum.student, parts[i].student);
    sum.teacher = __dadd_rn(sum.teacher, parts[i].teacher);
  }
  return {warp_sum(sum.student), warp_sum(sum.teacher)};
}

/// \brief Gradient of one column of a regular or infinite row.
/// \param[in] s, t the logits
template <Divergence divergence>
__device__ __forceinline__ float column_gradient(float s, float t, GradientConstants const& c,
                                                 SegmentOptions const& options) {
  float const a = __fsub_rn(s, c.max_student), b = __fsub_rn(t, c.max_teacher);
  float const es = exp2_fast(__fmul_rn(a, options.exponent_scale));
  if (divergence == Divergence::forward_kl) {
    // Equal rows have ratio 1: exactly 0.
    float const et = exp2_fast(__fmul_rn(b, options.exponent_scale));
    return __fmul_rn(__fmaf_rn(es, c.ratio, -et), c.scale);
  }
  if (divergence == Divergence::reverse_kl) {
    float const g = __fmul_rn(__fmul_rn(es, c.scale),
                              __fmaf_rn(__fsub_rn(a, b), options.inverse_temperature, -c.mean));
    return es > 0 ? g : 0.0f;
  }
  float const l =
      log_ratios(fmaxf(a, lowest_float()), fmaxf(b, lowest_float()), c, options).student;
  return __fmul_rn(__fmul_rn(es, c.scale), __fsub_rn(l, c.mean));
}

/// \brief Gradient of a vector of columns.
template <Divergence divergence, class VS, class VT>
__device__ __forceinline__ VS vector_gradient(VS const& s, VT const& t, GradientConstants const& c,
                                              SegmentOptions const& options) {
  VS out;
  if (c.state == RowState::invalid || c.state == RowState::empty ||
      (divergence == Divergence::reverse_kl && c.state == RowState::infinite)) {
    float const nan = __uint_as_float(0x7fc00000u);
#pragma unroll
    for (int j = 0; j < vector_columns; j += 2) {
      bool const all = c.state == RowState::invalid, some = c.state == RowState::infinite;
      out.set(j / 2, all || (some && s.get(j) > minus_infinity()) ? nan : 0.0f,
              all || (some && s.get(j + 1) > minus_infinity()) ? nan : 0.0f);
    }
    return out;
  }
#pragma unroll
  for (int j = 0; j < vector_columns; j += 2)
    out.set(j / 2, column_gradient<divergence>(s.get(j), t.get(j), c, options),
            column_gradient<divergence>(s.get(j + 1), t.get(j + 1), c, options));
  return out;
}

}  // namespace vpkl::impl::cuda
