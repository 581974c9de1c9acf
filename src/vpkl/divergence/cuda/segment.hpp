// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief The arithmetic of one segment of columns on a warp.
///
/// Every CUDA kernel calls these functions, and nothing else touches a logit: a row's bits cannot
/// depend on how rows and segments were spread over warps. Sums and products are spelt as
/// single-rounding intrinsics, and the files are compiled without contraction, so that no two
/// kernels round differently.
#pragma once

#include <vpkl/divergence/cuda/columns.hpp>
#include <vpkl/divergence/kernels.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace vpkl::impl::cuda {

constexpr double ln_2 = 0.69314718055994530942;

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

/// \brief As exp2_fast, and with its bits, but results below 2^-126 are kept.
__device__ __forceinline__ float exp2_subnormal(float x) {
  float r;
  asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

template <bool subnormal>
__device__ __forceinline__ float exp2_to_float(float x) {
  return subnormal ? exp2_subnormal(x) : exp2_fast(x);
}

/// \brief 2^x for x <= 0 in double, to about 1e-9, exactly 1 at 0. Short chains and no branch,
/// since rows wait for it.
__device__ __forceinline__ double exp2_accurate(double x) {
  x = x > -1000.0 ? x : -1000.0;
  // Adding 1.5 · 2^52 rounds to the nearest integer, which the low word then holds.
  double const shifted = __dadd_rn(x, 6755399441055744.0);
  double const g = __dmul_rn(__dsub_rn(x, __dsub_rn(shifted, 6755399441055744.0)), ln_2);
  // Taylor to degree 8 in Estrin's order.
  double const g2 = __dmul_rn(g, g), g4 = __dmul_rn(g2, g2);
  double const low = __fma_rn(__fma_rn(1.0 / 6, g, 0.5), g2, __fma_rn(1.0, g, 1.0));
  double const high =
      __fma_rn(__fma_rn(1.0 / 5040, g, 1.0 / 720), g2, __fma_rn(1.0 / 120, g, 1.0 / 24));
  double const p = __fma_rn(__fma_rn(1.0 / 40320, g4, high), g4, low);
  return __hiloint2double(__double2hiint(p) + __double2loint(shifted) * (1 << 20),
                          __double2loint(p));
}

/// \brief 1/x for a sum of exponentials x, to about 1e-13.
__device__ __forceinline__ double reciprocal(double x) {
  double r = __frcp_rn(static_cast<float>(x));
  r = __fma_rn(r, __fma_rn(-x, r, 1.0), r);
  return __fma_rn(r, __fma_rn(-x, r, 1.0), r);
}

/// Constants of a call that segments need.
struct SegmentOptions {
  float exponent_scale;  ///< logit_unit · log2(e)/T
  bool narrow;           ///< a segment holds the row

  static SegmentOptions make(RowJob const& job) {
    return {static_cast<float>(static_cast<double>(logit_unit) * 1.4426950408889634074 /
                               job.options.temperature),
            job.columns <= segment_columns};
  }
};

/// In logit_units. Two finite logits differ by up to 2^129, and by so much in every column of a
/// segment: in this unit the sum is below 2^127.
constexpr float weighted_unit = 4;
static_assert(segment_columns <= 1024 && logit_unit >= 1024,
              "a segment's weighted sum may overflow");

/// Statistics of a segment; weighted = Σ e^(da/T) · (da - db) in units of weighted_unit, a the
/// weighing distribution.
struct alignas(16) SegmentRecord {
  float max_student, max_teacher;
  float sum_student, sum_teacher;
  float weighted;
  std::uint32_t flags;
  float rest_student, rest_teacher;  ///< what the sums' rounding to float left over
};
static_assert(sizeof(SegmentRecord) == 32, "the fused kernel sends a record in two halves");

/// \brief A float's bits as an integer of the same order, and back: positive NaN is the largest.
__device__ __forceinline__ int ordered(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

/// \brief The largest of the lanes' numbers, on all lanes; NaN, which max_or_nan makes positive, if
/// one of them is.
__device__ __forceinline__ float warp_largest(float x) {
  int const largest = __reduce_max_sync(all_lanes, ordered(__float_as_int(x)));
  return __int_as_float(ordered(largest));
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

__device__ __forceinline__ void set_sum(float& sum, float& rest, double value) {
  sum = static_cast<float>(value);
  rest = static_cast<float>(__dsub_rn(value, sum));
}

/// \brief The sum of a lane's vector, as a tree: a large term takes part in few roundings.
__device__ __forceinline__ float vector_sum(float const (&x)[vector_columns]) {
  return __fadd_rn(__fadd_rn(__fadd_rn(x[0], x[1]), __fadd_rn(x[2], x[3])),
                   __fadd_rn(__fadd_rn(x[4], x[5]), __fadd_rn(x[6], x[7])));
}

/// \brief The largest logit in units; 0 for a set without support, so that -inf - max stays -inf.
__device__ __forceinline__ float in_units(float max) {
  return max == minus_infinity() ? 0.0f : __fmul_rn(max, inverse_logit_unit);
}

/// \brief Distance of a logit from the largest one, in units: finite for any two finite logits,
/// with the bits of the plain difference (but for the unit's power of two, and subnormal products).
__device__ __forceinline__ float distance(float logit, float max_in_units) {
  return __fmaf_rn(logit, inverse_logit_unit, -max_in_units);
}

/// Stands for the distance of -inf where a finite one is needed.
__device__ __forceinline__ float beyond_all() { return -0x1p120f; }

__device__ __forceinline__ float exp2_of(float x) { return exp2_subnormal(x); }
__device__ __forceinline__ double exp2_of(double x) { return exp2_accurate(x); }

/// \brief Sums of a segment whose largest terms, each exactly 1, are kept apart, and the support
/// flag. Few segments need it, therefore short: it loads the columns once more.
/// \tparam Real arithmetic of the exponentials and a lane's sums
template <class Real, Weighting weighting, class VS, class VT, class LoadOne>
__device__ __forceinline__ void careful_sums(LoadOne const& load_one, float ms, float mt,
                                             float exponent_scale, SegmentRecord& r) {
  Real sum_student = 0, sum_teacher = 0, weighted = 0;
  int ones_student = 0, ones_teacher = 0;
  bool unsupported = false;
#pragma unroll 1
  for (int i = 0; i < vectors; ++i) {
    VS s;
    VT t;
    load_one(i, s, t);
#pragma unroll
    for (int j = 0; j < vector_columns; ++j) {
      float const a = fmaxf(distance(s.get(j), ms), beyond_all());
      float const b = fmaxf(distance(t.get(j), mt), beyond_all());
      Real const es = exp2_of(static_cast<Real>(a) * static_cast<Real>(exponent_scale));
      Real const et = exp2_of(static_cast<Real>(b) * static_cast<Real>(exponent_scale));
      if (a < 0)
        sum_student += es;
      else
        ++ones_student;
      if (b < 0)
        sum_teacher += et;
      else
        ++ones_teacher;
      bool const has_student = s.get(j) > minus_infinity();
      bool const has_teacher = t.get(j) > minus_infinity();
      if (weighting == Weighting::teacher) {
        unsupported |= has_teacher && !has_student;
        weighted += et * static_cast<Real>(__fsub_rn(b, a));
      }
      if (weighting == Weighting::student) {
        unsupported |= has_student && !has_teacher;
        weighted += es * static_cast<Real>(__fsub_rn(a, b));
      }
    }
  }
  // The largest finite logit of the segment: none where all are -inf.
  bool const student = r.max_student > minus_infinity(), teacher = r.max_teacher > minus_infinity();
  // Whether a model's sum is kept apart must not depend on the other model.
  bool const narrow = std::is_same<Real, double>::value;
  if (narrow || r.sum_student < 2)
    set_sum(r.sum_student, r.rest_student,
            __dadd_rn(student ? __reduce_add_sync(all_lanes, ones_student) : 0,
                      warp_sum(static_cast<double>(sum_student))));
  if (narrow || r.sum_teacher < 2)
    set_sum(r.sum_teacher, r.rest_teacher,
            __dadd_rn(teacher ? __reduce_add_sync(all_lanes, ones_teacher) : 0,
                      warp_sum(static_cast<double>(sum_teacher))));
  r.weighted =
      static_cast<float>(__dmul_rn(warp_sum(static_cast<double>(weighted)), 1 / weighted_unit));
  if (__any_sync(all_lanes, unsupported)) r.flags |= RowStatistics::unsupported;
}

/// \brief Statistics of a segment; the same on all lanes.
/// \tparam unroll vectors whose code is laid out one after the other: all where the columns are in
/// registers; few where they are loaded again, since short loops stay in the instruction cache
/// \param[in] columns of the segment that belong to the row, from the first; the others are -inf
/// \param[in] get `get(i, s, t)` gives vector i of the lane's columns
/// \param[in] load_one the same from memory, for a rare second look
template <Weighting weighting, int unroll, class VS, class VT, class Get, class LoadOne>
__device__ __forceinline__ SegmentRecord segment_statistics(SegmentOptions const& options,
                                                            std::int64_t columns, Get const& get,
                                                            LoadOne const& load_one) {
  constexpr bool alone = std::is_same<VT, Vector<Absent>>::value;
  int const lane = threadIdx.x % lanes;
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
    r.max_teacher = largest_teacher.get();
    if constexpr (!alone) r.max_teacher = warp_largest(r.max_teacher);
  }
  r.sum_student = r.sum_teacher = r.weighted = 0;
  r.rest_student = r.rest_teacher = 0;
  r.flags = 0;
  // Maxima carry NaN, so this is false for NaN and +inf anywhere.
  if (!(r.max_student <= largest_float() && r.max_teacher <= largest_float())) {
    r.max_student = r.max_teacher = minus_infinity();
    r.flags = RowStatistics::invalid;
    return r;
  }
  float const ms = in_units(r.max_student), mt = in_units(r.max_teacher);
  float sum_student = 0, sum_teacher = 0, sum_weighted[2] = {0, 0};
  auto const add = [&](VS const& s, VT const& t) {
    float es[vector_columns], et[vector_columns];
#pragma unroll
    for (int j = 0; j < vector_columns; ++j) {
      float const a = distance(s.get(j), ms), b = distance(t.get(j), mt);
      es[j] = exp2_fast(__fmul_rn(a, options.exponent_scale));
      if constexpr (!alone) et[j] = exp2_fast(__fmul_rn(b, options.exponent_scale));
      if (weighting == Weighting::teacher)
        sum_weighted[j % 2] = __fmaf_rn(et[j], __fsub_rn(b, a), sum_weighted[j % 2]);
      if (weighting == Weighting::student)
        sum_weighted[j % 2] = __fmaf_rn(es[j], __fsub_rn(a, b), sum_weighted[j % 2]);
    }
    sum_student = __fadd_rn(sum_student, vector_sum(es));
    if constexpr (!alone) sum_teacher = __fadd_rn(sum_teacher, vector_sum(et));
  };
  VS s;
  VT t;
  if (columns >= segment_columns) {
#pragma unroll(unroll)
    for (int i = 0; i < vectors; ++i) {
      get(i, s, t);
      add(s, t);
    }
  } else {
    // The row ends here. Vectors beyond are left out: their -inf would spoil the weighted sum.
#pragma unroll 1
    for (int i = 0; (i * lanes + lane) * vector_columns < columns && i < vectors; ++i) {
      load_one(i, s, t);
      add(s, t);
    }
  }
  r.sum_student = warp_sum(sum_student);
  if constexpr (!alone) r.sum_teacher = warp_sum(sum_teacher);
  if (weighting != Weighting::none)
    r.weighted =
        warp_sum(__fmul_rn(__fadd_rn(sum_weighted[0], sum_weighted[1]), 1 / weighted_unit));
  // No rounding errors average out in a narrow row. Where one id has most of the probability, its 1
  // swallows the others; and a logit of -inf leaves no finite weighted sum.
  if (options.narrow)
    careful_sums<double, weighting, VS, VT>(load_one, ms, mt, options.exponent_scale, r);
  else if (!(fabsf(r.weighted) <= largest_float()) || r.sum_student < 2 ||
           (!alone && r.sum_teacher < 2))
    careful_sums<float, weighting, VS, VT>(load_one, ms, mt, options.exponent_scale, r);
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
  double const scale = options.exponent_scale, unit = inverse_logit_unit;
  auto const add = [&](SegmentRecord const& part) {
    double const part_student = __dadd_rn(part.sum_student, part.rest_student);
    double const part_teacher = __dadd_rn(part.sum_teacher, part.rest_teacher);
    // A set without support has sums of 0.
    double const shift_student =
        part_student > 0 ? __dmul_rn(__dsub_rn(part.max_student, max_student), unit) : 0.0;
    double const shift_teacher =
        part_teacher > 0 ? __dmul_rn(__dsub_rn(part.max_teacher, max_teacher), unit) : 0.0;
    double const factor_student = exp2_accurate(__dmul_rn(shift_student, scale));
    double const factor_teacher = exp2_accurate(__dmul_rn(shift_teacher, scale));
    sum_student = __fma_rn(factor_student, part_student, sum_student);
    sum_teacher = __fma_rn(factor_teacher, part_teacher, sum_teacher);
    double const moved = __dsub_rn(shift_student, shift_teacher);
    double const own = __dmul_rn(part.weighted, weighted_unit);
    if (weighting == Weighting::teacher)
      weighted = __fma_rn(factor_teacher, __fma_rn(part_teacher, -moved, own), weighted);
    if (weighting == Weighting::student)
      weighted = __fma_rn(factor_student, __fma_rn(part_student, moved, own), weighted);
  };
  // Several at once, since each is a long chain: as many as a lane has of 75 (a vocabulary of
  // 152,000 in two shards). A record of zeros adds nothing.
  constexpr int batch = 3;
  for (int first = lane; first < count; first += batch * lanes) {
    SegmentRecord part[batch];
#pragma unroll
    for (int b = 0; b < batch; ++b)
      part[b] = first + b * lanes < count ? records[first + b * lanes] : SegmentRecord{};
#pragma unroll
    for (int b = 0; b < batch; ++b)
      add(part[b]);
  }
  r.sum_student = warp_sum(sum_student);
  r.sum_teacher = warp_sum(sum_teacher);
  double const weight = weighting == Weighting::student ? r.sum_student : r.sum_teacher;
  double const total = warp_sum(weighted);
  if (weight > 0) r.difference = static_cast<float>(__dmul_rn(total, reciprocal(weight)));
  return r;
}

/// Constants of a row's gradient, prepared for the inner loop.
struct GradientConstants {
  RowState state;
  float max_student, max_teacher;  ///< in units
  float scale;                     ///< of the whole gradient
  float ratio;                     ///< forward KL: pt's factor over ps's
  float mean;                      ///< reverse KL: in units; JSD: in bits
  float rare;  ///< 0 for most rows; others need subnormal probabilities, and this factor at the end
  // JSD's alone, not sent in KL's kernel
  float log_sum_student, log_sum_teacher;  ///< to base 2
  float beta, beta_rest;
  float log_ratio;  ///< log2(S_teacher) - log2(S_student)
};

/// Words of the constants: those before JSD's, and all.
constexpr int kl_words = offsetof(GradientConstants, log_sum_student) / sizeof(std::uint32_t);
constexpr int all_words = sizeof(GradientConstants) / sizeof(std::uint32_t);

/// \brief The state of a row, as row_constants gives it.
__device__ __forceinline__ RowState row_state(RowStatistics const& s) {
  if (s.flags & RowStatistics::invalid) return RowState::invalid;
  if (!(s.sum_student > 0) || !(s.sum_teacher > 0)) return RowState::empty;
  return s.flags & RowStatistics::unsupported ? RowState::infinite : RowState::regular;
}

/// \brief JSD's mean as gradients need it.
__device__ __forceinline__ float mean_in_bits(double mean_jsd) {
  return static_cast<float>(__dmul_rn(mean_jsd, 1 / ln_2));
}

/// \brief From finalised statistics.
template <Divergence divergence>
__device__ __forceinline__ GradientConstants gradient_constants(RowStatistics const& s,
                                                                KernelOptions const& options,
                                                                double mean_jsd, float weight) {
  GradientConstants c{};
  c.state = row_state(s);
  c.max_student = in_units(s.max_student);
  c.max_teacher = in_units(s.max_teacher);
  c.beta = static_cast<float>(options.beta);
  c.beta_rest = static_cast<float>(1.0 - options.beta);
  c.ratio = 1;
  // Beside ids of probability 1, or equal ones, the others may be all that the gradient consists
  // of.
  if (divergence != Divergence::forward_kl) c.rare = trunc(s.sum_student) == s.sum_student;
  double const scale = __dmul_rn(options.temperature, static_cast<double>(weight));
  if (divergence == Divergence::forward_kl) {
    c.ratio = static_cast<float>(__dmul_rn(s.sum_teacher, reciprocal(s.sum_student)));
    c.scale = static_cast<float>(__dmul_rn(scale, reciprocal(s.sum_teacher)));
  }
  if (divergence == Divergence::reverse_kl) {
    // T (log ps - log pt - D) is the logits' difference from its mean: T itself drops out.
    c.mean = s.difference;
    double const unit_scale =
        __dmul_rn(__dmul_rn(scale, static_cast<double>(options.scale)), reciprocal(s.sum_student));
    // A weight so large that the scale must do without the unit.
    bool const huge = !(fabs(unit_scale) <= static_cast<double>(largest_float()));
    c.scale = static_cast<float>(
        huge ? __dmul_rn(unit_scale, static_cast<double>(inverse_logit_unit)) : unit_scale);
    c.rare = huge ? logit_unit : c.rare;
  }
  if (divergence == Divergence::jsd) {
    if (c.state == RowState::invalid || c.state == RowState::empty) return c;
    // Logarithms are to base 2 until the end: what is multiplied by ln 2 is the factor.
    double const log_student = log2(s.sum_student), log_teacher = log2(s.sum_teacher);
    c.log_sum_student = static_cast<float>(log_student);
    c.log_sum_teacher = static_cast<float>(log_teacher);
    c.log_ratio = static_cast<float>(__dsub_rn(log_teacher, log_student));
    c.mean = mean_in_bits(mean_jsd);
    c.scale =
        static_cast<float>(__dmul_rn(__dmul_rn(scale, 1.0 - options.beta) / s.sum_student, ln_2));
  }
  return c;
}

/// \brief Whether JSD's shorter arithmetic serves the row.
__device__ __forceinline__ bool is_even(GradientConstants const& c) {
  return c.beta == 0.5f && c.rare == 0;
}

/// \brief 2^x - 1 for x <= 0 given q = 2^x as well, relative precision kept near 0.
__device__ __forceinline__ float exp2m1_of(float x, float q) {
  // Minimax on [-0.1875, 0], within 1.9e-8.
  float p = 0.009131428754870156f;
  p = __fmaf_rn(p, x, 0.055447387660437226f);
  p = __fmaf_rn(p, x, 0.24022437584025755f);
  p = __fmaf_rn(p, x, 0.6931471679636895f);
  return x > -0.1875f ? __fmul_rn(p, x) : __fsub_rn(q, 1.0f);
}

/// \brief log2(1 + y) for -1 <= y <= 0 given w = 1 + y as well, to about 3e-7 absolutely, with
/// relative precision near 0 and exactly 0 there.
__device__ __forceinline__ float log2_of_mixture(float w, float y) {
  // Minimax on [-0.125, 0], within 1.4e-8.
  float p = 0.37924000627441534f;
  p = __fmaf_rn(p, y, -0.35014468575977015f);
  p = __fmaf_rn(p, y, 0.48138239296565155f);
  p = __fmaf_rn(p, y, -0.7213398265651865f);
  p = __fmaf_rn(p, y, 1.4426950603291973f);
  // The special-function unit's log2 keeps absolute precision only.
  float l;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(l) : "f"(w));
  return y > -0.125f ? __fmul_rn(p, y) : l;
}

/// \brief log2((1 + q)/2) for x <= 0 given q = 2^x, as log2_of_mixture.
__device__ __forceinline__ float log2_of_mean(float x, float q) {
  // Beside x/2 an even function, log2(cosh(x ln(2)/2)): minimax on [-0.5, 0.5], within 2.6e-8.
  float const square = __fmul_rn(x, x);
  float p = 5.480536128743552e-05f;
  p = __fmaf_rn(p, square, -0.0017344332300126553f);
  p = __fmaf_rn(p, square, 0.08664339780807495f);
  float const near = __fmaf_rn(0.5f, x, __fmul_rn(p, square));
  float l;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(l) : "f"(__fmaf_rn(0.5f, q, 0.5f)));
  return x > -0.5f ? near : l;
}

/// log2(ps/m) and log2(pt/m) of a column, finite, and exactly 0 where the two agree.
struct LogRatios {
  float student, teacher;
};

/// \tparam even whether beta is a half
/// \param[in] a, b distance of the student's and teacher's logit
template <bool even>
__device__ __forceinline__ LogRatios log_ratios(float a, float b, GradientConstants const& c,
                                                SegmentOptions const& options) {
  float const difference = __fmaf_rn(__fsub_rn(b, a), options.exponent_scale, -c.log_ratio);
  bool const student_larger = difference <= 0;
  // log2 of the smaller probability over the larger one, kept finite, also where both are 0.
  float const less = fmaxf(-fabsf(difference), lowest_float());
  // m / max(ps, pt) is a mixture of 1 and q.
  float const q = exp2_fast(less);
  float l;
  if (even) {
    l = log2_of_mean(less, q);
  } else {
    float const part = student_larger ? c.beta : c.beta_rest;
    float const rest = student_larger ? c.beta_rest : c.beta;
    // Near equality from 1 + part (q - 1), far from it from rest + part q: neither cancels.
    l = log2_of_mixture(__fmaf_rn(part, q, rest), __fmul_rn(part, exp2m1_of(less, q)));
  }
  float const smaller = __fsub_rn(less, l);
  return student_larger ? LogRatios{-l, smaller} : LogRatios{smaller, -l};
}

/// \brief JSD's sums over a segment of a regular row; the same on all lanes.
/// \tparam even whether beta is a half
/// \tparam subnormal whether probabilities below 2^-126 are kept
/// \tparam unroll as in segment_statistics
/// \param[in] get `get(i, s, t)` gives vector i of the lane's columns
/// \param[in] keep `keep(i, l)` is handed log2(ps/m) of vector i's columns
template <bool even, bool subnormal, int unroll, class VS, class VT, class Get, class Keep>
__device__ __forceinline__ JsdSums segment_jsd_sums(GradientConstants const& c,
                                                    SegmentOptions const& options, Get const& get,
                                                    Keep const& keep) {
  float student[2] = {0, 0}, teacher[2] = {0, 0};
#pragma unroll(unroll)
  for (int i = 0; i < vectors; ++i) {
    VS s;
    VT t;
    get(i, s, t);
    float l[vector_columns];
#pragma unroll
    for (int j = 0; j < vector_columns; ++j) {
      float const a = distance(s.get(j), c.max_student);
      float const b = distance(t.get(j), c.max_teacher);
      float const ps =
          exp2_to_float<subnormal>(__fmaf_rn(a, options.exponent_scale, -c.log_sum_student));
      float const pt =
          exp2_to_float<subnormal>(__fmaf_rn(b, options.exponent_scale, -c.log_sum_teacher));
      LogRatios const log_m = log_ratios<even>(a, b, c, options);
      student[j % 2] = __fmaf_rn(ps, log_m.student, student[j % 2]);
      teacher[j % 2] = __fmaf_rn(pt, log_m.teacher, teacher[j % 2]);
      l[j] = log_m.student;
    }
    keep(i, l);
  }
  JsdSums sums;
  sums.student = __dmul_rn(warp_sum(__fadd_rn(student[0], student[1])), ln_2);
  sums.teacher = __dmul_rn(warp_sum(__fadd_rn(teacher[0], teacher[1])), ln_2);
  return sums;
}

/// \brief segment_jsd_sums with what the row needs.
template <int unroll, class VS, class VT, class Get, class Keep>
__device__ __forceinline__ JsdSums any_jsd_sums(GradientConstants const& c,
                                                SegmentOptions const& options, Get const& get,
                                                Keep const& keep) {
  if (is_even(c)) return segment_jsd_sums<true, false, unroll, VS, VT>(c, options, get, keep);
  if (c.rare == 0) return segment_jsd_sums<false, false, unroll, VS, VT>(c, options, get, keep);
  return segment_jsd_sums<false, true, unroll, VS, VT>(c, options, get, keep);
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

/// \brief Adds `count` segments' numbers in a fixed tree; the same on all lanes.
__device__ inline double add_segments(double const* parts, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = threadIdx.x % lanes; i < count; i += lanes)
    sum = __dadd_rn(sum, parts[i]);
  return warp_sum(sum);
}

/// \param[in] es, et exponentials of the distances
__device__ __forceinline__ float forward_kl_gradient(float es, float et,
                                                     GradientConstants const& c) {
  return __fmul_rn(__fmaf_rn(es, c.ratio, -et), c.scale);
}

/// \brief dt - ds of a column, finite.
/// \param[in,out] largest of a lane's
__device__ __forceinline__ float finite_difference(float a, float b, float& largest) {
  float const difference = __fsub_rn(fmaxf(b, beyond_all()), fmaxf(a, beyond_all()));
  largest = fmaxf(largest, difference);
  return difference;
}

/// \brief Lanes' sums as forward_kl_share wants them; the same on all lanes.
__device__ __forceinline__ double weighted_sum(double sum, float largest) {
  // Finite logits differ by less, a finite one and -inf by no less.
  constexpr float furthest = 0x1p119f;
  sum = warp_sum(sum);
  return __any_sync(all_lanes, largest >= furthest) ? static_cast<double>(infinity) : sum;
}

/// \brief Forward KL's weighted sum of a segment, with its gradient; see forward_kl_share.
/// \param[in,out] s the logits, then the gradient
template <class VS, class VT>
__device__ __forceinline__ double segment_forward_kl(VS (&s)[vectors], VT const (&t)[vectors],
                                                     GradientConstants const& c,
                                                     SegmentOptions const& options) {
  float weighted[2] = {0, 0}, largest = 0;
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    float gradient[vector_columns];
#pragma unroll
    for (int j = 0; j < vector_columns; ++j) {
      float const a = distance(s[i].get(j), c.max_student);
      float const b = distance(t[i].get(j), c.max_teacher);
      float const es = exp2_fast(__fmul_rn(a, options.exponent_scale));
      float const et = exp2_fast(__fmul_rn(b, options.exponent_scale));
      weighted[j % 2] = __fmaf_rn(et, finite_difference(a, b, largest), weighted[j % 2]);
      gradient[j] = forward_kl_gradient(es, et, c);
    }
#pragma unroll
    for (int j = 0; j < vector_columns; j += 2)
      s[i].set(j / 2, gradient[j], gradient[j + 1]);
  }
  return weighted_sum(__dadd_rn(weighted[0], weighted[1]), largest);
}

/// \brief The weighted sum of a narrow row, in double; loads the columns once more, as
/// careful_sums.
template <class VS, class VT, class LoadOne>
__device__ __forceinline__ double narrow_forward_kl(LoadOne const& load_one,
                                                    GradientConstants const& c,
                                                    SegmentOptions const& options) {
  float largest = 0;
  double weighted = 0;
#pragma unroll 1
  for (int i = 0; i < vectors; ++i) {
    VS s;
    VT t;
    load_one(i, s, t);
#pragma unroll
    for (int j = 0; j < vector_columns; ++j) {
      float const a = distance(s.get(j), c.max_student);
      float const b = distance(t.get(j), c.max_teacher);
      double const et = exp2_accurate(__dmul_rn(b, options.exponent_scale));
      weighted = __fma_rn(et, finite_difference(a, b, largest), weighted);
    }
  }
  return weighted_sum(weighted, largest);
}

/// \brief JSD's gradient of one column.
/// \param[in] es, l e^(da/T) and log2(ps/m)
__device__ __forceinline__ float jsd_gradient(float es, float l, GradientConstants const& c) {
  return __fmul_rn(__fmul_rn(es, c.scale), __fsub_rn(l, c.mean));
}

/// \brief Gradient of one column of a regular or infinite row.
/// \tparam even whether JSD's beta is a half
/// \tparam subnormal whether probabilities below 2^-126 are kept
/// \param[in] s, t the logits
template <Divergence divergence, bool even, bool subnormal>
__device__ __forceinline__ float column_gradient(float s, float t, GradientConstants const& c,
                                                 SegmentOptions const& options) {
  float const a = distance(s, c.max_student), b = distance(t, c.max_teacher);
  float const exponent = __fmul_rn(a, options.exponent_scale);
  float const es = exp2_to_float<subnormal>(exponent);
  // Equal rows have ratio 1 and mean 0: exactly 0.
  if (divergence == Divergence::forward_kl)
    return forward_kl_gradient(es, exp2_fast(__fmul_rn(b, options.exponent_scale)), c);
  if (divergence == Divergence::reverse_kl) {
    float const g = __fmul_rn(__fmul_rn(es, c.scale), __fsub_rn(__fsub_rn(a, b), c.mean));
    return es > 0 ? g : 0.0f;
  }
  return jsd_gradient(es, log_ratios<even>(a, b, c, options).student, c);
}

/// \brief Whether every column of a row has the same, constant gradient or needs no arithmetic.
template <Divergence divergence>
__device__ __forceinline__ bool special(RowState state) {
  return state == RowState::invalid || state == RowState::empty ||
         (divergence == Divergence::reverse_kl && state == RowState::infinite);
}

/// \brief Gradient of a vector of columns of a row that is not special.
template <Divergence divergence, class VS, class VT>
__device__ __forceinline__ VS vector_gradient(VS const& s, VT const& t, GradientConstants const& c,
                                              SegmentOptions const& options) {
  VS out;
  auto const write = [&](auto even) {
    auto const at = [&](int j) {
      return column_gradient<divergence, even.value, false>(s.get(j), t.get(j), c, options);
    };
#pragma unroll
    for (int j = 0; j < vector_columns; j += 2)
      out.set(j / 2, at(j), at(j + 1));
  };
  if (divergence == Divergence::jsd && is_even(c))
    write(std::true_type());
  else
    write(std::false_type());
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

/// \brief Whether `vector_gradient` is right for the row.
template <Divergence divergence>
__device__ __forceinline__ bool ordinary(GradientConstants const& c) {
  return !special<divergence>(c.state) && c.rare == 0;
}

/// \brief Gradient of a vector of columns of any row.
template <Divergence divergence, class VS, class VT>
__device__ __forceinline__ VS any_gradient(VS const& s, VT const& t, GradientConstants const& c,
                                           SegmentOptions const& options) {
  if (special<divergence>(c.state)) return special_gradient(s, c.state);
  if (c.rare == 0) return vector_gradient<divergence>(s, t, c, options);
  VS out;
  auto const at = [&](int j) {
    return __fmul_rn(column_gradient<divergence, false, true>(s.get(j), t.get(j), c, options),
                     c.rare);
  };
#pragma unroll
  for (int j = 0; j < vector_columns; j += 2)
    out.set(j / 2, at(j), at(j + 1));
  return out;
}

/// \brief JSD's gradient of a vector of columns of a row that is not special, given log2(ps/m).
/// \tparam subnormal whether probabilities below 2^-126 are kept
template <bool subnormal, class VS>
__device__ __forceinline__ VS vector_jsd_gradient(VS const& s, Vector<float> const& l,
                                                  GradientConstants const& c,
                                                  SegmentOptions const& options) {
  VS out;
  auto const at = [&](int j) {
    float const exponent = __fmul_rn(distance(s.get(j), c.max_student), options.exponent_scale);
    float const g = jsd_gradient(exp2_to_float<subnormal>(exponent), l.get(j), c);
    return subnormal ? __fmul_rn(g, c.rare) : g;
  };
#pragma unroll
  for (int j = 0; j < vector_columns; j += 2)
    out.set(j / 2, at(j), at(j + 1));
  return out;
}

/// \brief The same of any row.
template <class VS>
__device__ __forceinline__ VS any_jsd_gradient(VS const& s, Vector<float> const& l,
                                               GradientConstants const& c,
                                               SegmentOptions const& options) {
  if (special<Divergence::jsd>(c.state)) return special_gradient(s, c.state);
  return c.rare == 0 ? vector_jsd_gradient<false>(s, l, c, options)
                     : vector_jsd_gradient<true>(s, l, c, options);
}

}  // namespace vpkl::impl::cuda
