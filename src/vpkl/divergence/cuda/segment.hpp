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

/// \brief 2^x for x <= 100 in double, to about 1e-9: factors of merged sums.
__device__ __forceinline__ double exp2_factor(double x) {
  if (!(x > -1000.0)) return 0;
  double const n = rint(x);
  double const g = __dmul_rn(__dsub_rn(x, n), 0.69314718055994530942);
  // Taylor to degree 8 in Estrin's order: a short chain of dependent steps.
  double const g2 = __dmul_rn(g, g), g4 = __dmul_rn(g2, g2);
  double const low = __fma_rn(__fma_rn(1.0 / 6, g, 0.5), g2, __fma_rn(1.0, g, 1.0));
  double const high =
      __fma_rn(__fma_rn(1.0 / 5040, g, 1.0 / 720), g2, __fma_rn(1.0 / 120, g, 1.0 / 24));
  double const p = __fma_rn(__fma_rn(1.0 / 40320, g4, high), g4, low);
  return __dmul_rn(p, __longlong_as_double((static_cast<long long>(n) + 1023) << 52));
}

/// Constants of a call that segments need.
struct SegmentOptions {
  float exponent_scale;       ///< log2(e)/T
  float inverse_temperature;  ///< 1/T

  static SegmentOptions make(KernelOptions const& options) {
    return {static_cast<float>(1.4426950408889634074 / options.temperature),
            static_cast<float>(1.0 / options.temperature)};
  }
};

/// Statistics of a segment; weighted = Σ e^(da/T) · (da - db), a the weighing distribution.
struct alignas(16) SegmentRecord {
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

/// \brief The lane's part of W = Σ ea · (a - b) and the support flag, for any logits. Rare, and
/// therefore short: it loads the columns once more.
template <Weighting weighting, class VS, class VT, class LoadOne>
__device__ __forceinline__ void careful_weighted(LoadOne const& load_one, float max_student,
                                                 float max_teacher, float exponent_scale,
                                                 float& weighted, bool& unsupported) {
  float sum[2] = {0, 0};
  unsupported = false;
#pragma unroll 1
  for (int i = 0; i < vectors; ++i) {
    VS s;
    VT t;
    load_one(i, s, t);
#pragma unroll
    for (int j = 0; j < vector_columns; ++j) {
      float const xs = s.get(j), xt = t.get(j);
      bool const has_student = xs > minus_infinity(), has_teacher = xt > minus_infinity();
      unsupported |= weighting == Weighting::teacher ? has_teacher && !has_student
                                                     : has_student && !has_teacher;
      float const a = __fsub_rn(xs, max_student), b = __fsub_rn(xt, max_teacher);
      float const own = weighting == Weighting::teacher ? b : a;
      float const other = weighting == Weighting::teacher ? a : b;
      float const difference = __fsub_rn(fmaxf(own, lowest_float()), fmaxf(other, lowest_float()));
      float const e = exp2_fast(__fmul_rn(own, exponent_scale));
      sum[j % 2] = __fmaf_rn(e, difference, sum[j % 2]);
    }
  }
  weighted = __fadd_rn(sum[0], sum[1]);
}

/// \brief Statistics of a segment; the same on all lanes.
/// \tparam unroll vectors whose code is laid out one after the other: all where the columns are in
/// registers; few where they are loaded again, since short loops stay in the instruction cache
/// \param[in] get `get(i, s, t)` gives vector i of the lane's columns
/// \param[in] load_one the same from memory, for a rare second look
template <Weighting weighting, int unroll, class VS, class VT, class Get, class LoadOne>
__device__ __forceinline__ SegmentRecord segment_statistics(SegmentOptions const& options,
                                                            Get const& get,
                                                            LoadOne const& load_one) {
  SegmentRecord r;
  {
    typename VS::Largest largest_student;
    typename VT::Largest largest_teacher;
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      VS s;
      VT t;
      get(i, s, t);
      largest_student.add(s);
      largest_teacher.add(t);
    }
    r.max_student = warp_largest(largest_student.get());
    r.max_teacher = warp_largest(largest_teacher.get());
  }
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
#pragma unroll(unroll)
  for (int i = 0; i < vectors; ++i) {
    VS s;
    VT t;
    get(i, s, t);
#pragma unroll
    for (int j = 0; j < vector_columns; ++j) {
      float const a = __fsub_rn(s.get(j), ms), b = __fsub_rn(t.get(j), mt);
      float const es = exp2_fast(__fmul_rn(a, options.exponent_scale));
      float const et = exp2_fast(__fmul_rn(b, options.exponent_scale));
      sum_student[j % 2] = __fadd_rn(sum_student[j % 2], es);
      sum_teacher[j % 2] = __fadd_rn(sum_teacher[j % 2], et);
      if (weighting == Weighting::teacher)
        sum_weighted[j % 2] = __fmaf_rn(et, __fsub_rn(b, a), sum_weighted[j % 2]);
      if (weighting == Weighting::student)
        sum_weighted[j % 2] = __fmaf_rn(es, __fsub_rn(a, b), sum_weighted[j % 2]);
    }
  }
  r.sum_student = warp_sum(__fadd_rn(sum_student[0], sum_student[1]));
  r.sum_teacher = warp_sum(__fadd_rn(sum_teacher[0], sum_teacher[1]));
  if (weighting != Weighting::none) {
    r.weighted = warp_sum(__fadd_rn(sum_weighted[0], sum_weighted[1]));
    // A logit of -inf, or a difference beyond float, leaves no finite sum.
    if (!(fabsf(r.weighted) <= largest_float())) {
      bool unsupported;
      careful_weighted<weighting, VS, VT>(load_one, ms, mt, options.exponent_scale, r.weighted,
                                          unsupported);
      r.weighted = warp_sum(r.weighted);
      if (__any_sync(all_lanes, unsupported)) r.flags |= RowStatistics::unsupported;
    }
  }
  return r;
}

/// \brief Statistics of `count` segments of a row, in a fixed tree; the same on all lanes.
/// \param[in] weighting of the records
__device__ inline RowStatistics merge_segments(SegmentRecord const* records, int count,
                                               Weighting weighting, SegmentOptions const& options) {
  int const lane = threadIdx.x % lanes;
  float max_student = minus_infinity(), max_teacher = minus_infinity();
  std::uint32_t flags = 0;
  for (int i = lane; i < count; i += lanes) {
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
  r.difference = 0;
  r.flags = __reduce_or_sync(all_lanes, flags);
  if (r.flags & RowStatistics::invalid) return r;

  double sum_student = 0, sum_teacher = 0, weighted = 0;
  double const scale = static_cast<double>(options.exponent_scale);
#pragma unroll 2
  for (int i = lane; i < count; i += lanes) {
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
  double const weight = weighting == Weighting::student ? r.sum_student : r.sum_teacher;
  double const total = warp_sum(weighted);
  if (weight > 0)
    r.difference =
        static_cast<float>(__dmul_rn(total / weight, static_cast<double>(inverse_logit_unit)));
  return r;
}

/// Constants of a row's gradient, prepared for the inner loop.
struct GradientConstants {
  RowState state;
  bool far;  ///< the maxima are so large that exponents need the subtraction of the maximum
  float max_student, max_teacher;
  float offset_student, offset_teacher;  ///< max · log2(e)/T rounded: e = 2^(z log2(e)/T - offset)
  float scale;                           ///< of the whole gradient
  float ratio;                           ///< forward KL: pt's factor over ps's
  float mean;                            ///< reverse KL, JSD
  // JSD
  float inverse_sum_student, inverse_sum_teacher, log_ratio, beta, beta_rest;
};

/// \brief The state of a row, as row_constants gives it.
__device__ __forceinline__ RowState row_state(RowStatistics const& s) {
  if (s.flags & RowStatistics::invalid) return RowState::invalid;
  if (!(s.sum_student > 0) || !(s.sum_teacher > 0)) return RowState::empty;
  return s.flags & RowStatistics::unsupported ? RowState::infinite : RowState::regular;
}

/// \brief From finalised statistics.
template <Divergence divergence>
__device__ __forceinline__ GradientConstants gradient_constants(RowStatistics const& s,
                                                                KernelOptions const& options,
                                                                SegmentOptions const& segment,
                                                                double mean_jsd, float weight) {
  GradientConstants c;
  c.state = row_state(s);
  c.max_student = s.max_student;
  c.max_teacher = s.max_teacher;
  c.inverse_sum_student = c.inverse_sum_teacher = c.log_ratio = c.mean = 0;
  c.beta = static_cast<float>(options.beta);
  c.beta_rest = static_cast<float>(1.0 - options.beta);
  double const scale = __dmul_rn(options.temperature, static_cast<double>(weight));
  // One rounding of the whole exponent instead of two loses nothing while the offset is small
  // enough: what rounding the offset itself changes is a factor of the row, undone here.
  double const exponent_scale = segment.exponent_scale;
  double const exact_student = __dmul_rn(exponent_scale, s.max_student);
  double const exact_teacher = __dmul_rn(exponent_scale, s.max_teacher);
  c.far = !(fabs(exact_student) < 0x1p27 && fabs(exact_teacher) < 0x1p27);
  c.offset_student = static_cast<float>(exact_student);
  c.offset_teacher = static_cast<float>(exact_teacher);
  double const student = c.far ? 0 : __dsub_rn(c.offset_student, exact_student);
  double const teacher = c.far ? 0 : __dsub_rn(c.offset_teacher, exact_teacher);
  if (divergence == Divergence::forward_kl) {
    c.ratio = static_cast<float>(
        __dmul_rn(exp2_factor(__dsub_rn(student, teacher)), s.sum_teacher / s.sum_student));
    c.scale = static_cast<float>(__dmul_rn(scale, exp2_factor(teacher)) / s.sum_teacher);
  }
  if (divergence == Divergence::reverse_kl) {
    c.ratio = 1;
    c.scale = static_cast<float>(__dmul_rn(scale, exp2_factor(student)) / s.sum_student);
    c.mean =
        static_cast<float>(__fma_rn(-0.69314718055994530942, __dsub_rn(student, teacher),
                                    __dmul_rn(s.difference, static_cast<double>(options.scale))));
  }
  if (divergence == Divergence::jsd) {
    c.ratio = 1;
    RowConstants const row = row_constants(s, Weighting::none);
    c.inverse_sum_student = row.inverse_sum_student;
    c.inverse_sum_teacher = row.inverse_sum_teacher;
    c.log_ratio = row.log_ratio;
    c.mean = static_cast<float>(mean_jsd);
    c.scale = static_cast<float>(__dmul_rn(scale, 1.0 - options.beta) / s.sum_student);
  }
  return c;
}

/// \brief log(1 + y) for -1 <= y <= 0 given w = 1 + y as well, to about 2e-7 absolutely, with
/// relative precision near 0 and exactly 0 there.
__device__ __forceinline__ float log_of_mixture(float w, float y) {
  float p = 1.0f / 7;
  p = __fmaf_rn(p, y, -1.0f / 6);
  p = __fmaf_rn(p, y, 0.2f);
  p = __fmaf_rn(p, y, -0.25f);
  p = __fmaf_rn(p, y, 1.0f / 3);
  p = __fmaf_rn(p, y, -0.5f);
  p = __fmaf_rn(p, y, 1.0f);
  // The special-function unit's log2 keeps absolute precision only.
  float l;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(l) : "f"(w));
  return y > -0.125f ? __fmul_rn(p, y) : __fmul_rn(l, 0.69314718f);
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
  // Near equality from 1 + part (q - 1), far from it from rest + part q: neither cancels.
  float const l = log_of_mixture(__fmaf_rn(part, q, rest), __fmul_rn(part, __fsub_rn(q, 1.0f)));
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
template <Divergence divergence, bool far>
__device__ __forceinline__ float column_gradient(float s, float t, GradientConstants const& c,
                                                 SegmentOptions const& options) {
  float const scale = options.exponent_scale;
  if (divergence == Divergence::jsd) {
    float const a = __fsub_rn(s, c.max_student), b = __fsub_rn(t, c.max_teacher);
    float const es = exp2_fast(__fmul_rn(a, scale));
    float const l =
        log_ratios(fmaxf(a, lowest_float()), fmaxf(b, lowest_float()), c, options).student;
    return __fmul_rn(__fmul_rn(es, c.scale), __fsub_rn(l, c.mean));
  }
  float const a =
      far ? __fmul_rn(__fsub_rn(s, c.max_student), scale) : __fmaf_rn(s, scale, -c.offset_student);
  float const b =
      far ? __fmul_rn(__fsub_rn(t, c.max_teacher), scale) : __fmaf_rn(t, scale, -c.offset_teacher);
  float const es = exp2_fast(a);
  // Equal rows have ratio 1 and mean 0: exactly 0.
  if (divergence == Divergence::forward_kl)
    return __fmul_rn(__fmaf_rn(es, c.ratio, -exp2_fast(b)), c.scale);
  float const g =
      __fmul_rn(__fmul_rn(es, c.scale), __fmaf_rn(__fsub_rn(a, b), 0.69314718f, -c.mean));
  return es > 0 ? g : 0.0f;
}

/// \brief Whether every column of a row has the same, constant gradient or needs no arithmetic.
template <Divergence divergence>
__device__ __forceinline__ bool special(RowState state) {
  return state == RowState::invalid || state == RowState::empty ||
         (divergence == Divergence::reverse_kl && state == RowState::infinite);
}

/// \brief Gradient of a vector of columns of a row that is not special.
template <Divergence divergence, bool far, class VS, class VT>
__device__ __forceinline__ VS vector_gradient(VS const& s, VT const& t, GradientConstants const& c,
                                              SegmentOptions const& options) {
  VS out;
#pragma unroll
  for (int j = 0; j < vector_columns; j += 2)
    out.set(j / 2, column_gradient<divergence, far>(s.get(j), t.get(j), c, options),
            column_gradient<divergence, far>(s.get(j + 1), t.get(j + 1), c, options));
  return out;
}

/// \brief Gradient of a vector of columns of a special row: NaN where it is undefined, else 0.
template <class VS>
__device__ __forceinline__ VS special_gradient(VS const& s, RowState state) {
  float const nan = __uint_as_float(0x7fc00000u);
  auto const undefined = [&](float logit) {
    return state == RowState::invalid || (state == RowState::infinite && logit > minus_infinity());
  };
  VS out;
#pragma unroll
  for (int j = 0; j < vector_columns; j += 2)
    out.set(j / 2, undefined(s.get(j)) ? nan : 0.0f, undefined(s.get(j + 1)) ? nan : 0.0f);
  return out;
}

/// \brief Gradient of a vector of columns of any row.
template <Divergence divergence, class VS, class VT>
__device__ __forceinline__ VS any_gradient(VS const& s, VT const& t, GradientConstants const& c,
                                           SegmentOptions const& options) {
  if (special<divergence>(c.state)) return special_gradient(s, c.state);
  return c.far ? vector_gradient<divergence, true>(s, t, c, options)
               : vector_gradient<divergence, false>(s, t, c, options);
}

/// \brief Whether `vector_gradient<divergence, false>` is right for the row.
template <Divergence divergence>
__device__ __forceinline__ bool ordinary(GradientConstants const& c) {
  return !special<divergence>(c.state) && (divergence == Divergence::jsd || !c.far);
}

}  // namespace vpkl::impl::cuda
