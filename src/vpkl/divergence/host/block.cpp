// SPDX-License-Identifier: Apache-2.0
#include <vpkl/divergence/host/block.hpp>
#include <vpkl/divergence/host/math.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace vpkl::impl::host {

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float lowest = std::numeric_limits<float>::lowest();

void load_columns(ElementType type, void const* row, std::int64_t first, int columns, float* out) {
  dispatch(type, [&](auto element) {
    using T = decltype(element);
    T const* const from = static_cast<T const*>(row) + first;
    for (int c = 0; c < columns; ++c)
      out[c] = ElementTraits<T>::to_float(from[c]);
  });
}

/// Distance of a logit from the largest one, in units of logit_unit. Finite for every logit but
/// NaN, since support is decided by the logit alone; -inf lies beyond all finite logits.
inline float distance(float logit, float max_in_units) {
  constexpr float beyond_all = -0x1p120f;
  return at_least(logit * inverse_logit_unit - max_in_units, beyond_all);
}

/// The largest logit in units; 0 for a set without support, so that -inf stays beyond all.
inline float in_units(float max) { return max == -infinity ? 0.0f : max * inverse_logit_unit; }

// In double: adding the lanes in single precision would cost more than their own rounding.
double tree_sum(float const (&lane)[lanes]) {
  double sum[lanes / 2];
  for (int l = 0; l < lanes / 2; ++l)
    sum[l] = static_cast<double>(lane[l]) + static_cast<double>(lane[l + lanes / 2]);
  for (int half = lanes / 4; half > 0; half /= 2)
    for (int l = 0; l < half; ++l)
      sum[l] += sum[l + half];
  return sum[0];
}

float largest(float const (&lane)[lanes]) {
  float max = -infinity;
  for (float value : lane)
    max = value > max ? value : max;
  return max;
}

bool any(std::int32_t const (&lane)[lanes]) {
  std::int32_t found = 0;
  for (std::int32_t f : lane)
    found |= f;
  return found != 0;
}

/// Fills in maxima and flags.
template <Weighting weighting>
void survey(Block const& block, RowStatistics& out) {
  float max_student[lanes], max_teacher[lanes];
  std::int32_t invalid[lanes] = {}, unsupported[lanes] = {};
  for (int l = 0; l < lanes; ++l)
    max_student[l] = max_teacher[l] = -infinity;
  for (int c = 0; c < block.padded; c += lanes)
    for (int l = 0; l < lanes; ++l) {
      float const s = block.student[c + l], t = block.teacher[c + l];
      max_student[l] = s > max_student[l] ? s : max_student[l];
      max_teacher[l] = t > max_teacher[l] ? t : max_teacher[l];
      // True for NaN too.
      invalid[l] |= static_cast<int>(!(s < infinity)) | static_cast<int>(!(t < infinity));
      if (weighting == Weighting::teacher)
        unsupported[l] |= static_cast<int>(t > -infinity) & static_cast<int>(s == -infinity);
      if (weighting == Weighting::student)
        unsupported[l] |= static_cast<int>(s > -infinity) & static_cast<int>(t == -infinity);
    }
  if (any(invalid)) {
    out.flags = RowStatistics::invalid;
    return;
  }
  if (any(unsupported)) out.flags = RowStatistics::unsupported;
  out.max_student = largest(max_student);
  out.max_teacher = largest(max_teacher);
}

template <Weighting weighting>
void sums(Block const& block, float scale, RowStatistics& out) {
  float const ms = in_units(out.max_student), mt = in_units(out.max_teacher);
  float sum_student[lanes] = {}, sum_teacher[lanes] = {}, weighted[lanes] = {};
  // Where one id has almost all probability, its 1 would swallow the others that share its lane.
  float ones_student[lanes] = {}, ones_teacher[lanes] = {};
  for (int c = 0; c < block.padded; c += lanes)
    for (int l = 0; l < lanes; ++l) {
      float const ds = distance(block.student[c + l], ms);
      float const dt = distance(block.teacher[c + l], mt);
      float const es = exp_nonpositive(ds * scale);
      float const et = exp_nonpositive(dt * scale);
      sum_student[l] += select(ds < 0, es, 0.0f);
      sum_teacher[l] += select(dt < 0, et, 0.0f);
      ones_student[l] += select(ds < 0, 0.0f, 1.0f);
      ones_teacher[l] += select(dt < 0, 0.0f, 1.0f);
      if (weighting == Weighting::teacher) weighted[l] += et * (dt - ds);
      if (weighting == Weighting::student) weighted[l] += es * (ds - dt);
    }
  out.sum_student = tree_sum(ones_student) + tree_sum(sum_student);
  out.sum_teacher = tree_sum(ones_teacher) + tree_sum(sum_teacher);
  double const weight = weighting == Weighting::student ? out.sum_student : out.sum_teacher;
  if (weighting != Weighting::none && weight > 0)
    out.difference = static_cast<float>(tree_sum(weighted) / weight);
}

template <Weighting weighting>
RowStatistics statistics_of(Block const& block, KernelOptions const& options) {
  RowStatistics out;
  survey<weighting>(block, out);
  if (!(out.flags & RowStatistics::invalid)) sums<weighting>(block, options.scale, out);
  return out;
}

/// log(ps/m) and log(pt/m) from log pt - log ps, exactly 0 where the two agree.
struct LogRatios {
  float student, teacher;
};

inline LogRatios log_ratios(float difference, float beta, float beta_rest) {
  bool const student_larger = difference <= 0;
  float const magnitude = std::fabs(difference);
  // m / max(ps, pt) is a mixture of 1 and e^-|difference|.
  float const l = log_mixture(select(student_larger, beta, beta_rest),
                              select(student_larger, beta_rest, beta), -magnitude);
  float const other = -magnitude - l;
  return {select(student_larger, -l, other), select(student_larger, other, -l)};
}

/// log pt - log ps of a column, kept finite.
inline float log_difference(float ds, float dt, float scale, float log_ratio) {
  return at_least(at_most((dt - ds) * scale - log_ratio, -lowest), lowest);
}

}  // namespace

void Block::load(ElementType student_type, void const* student_row, ElementType teacher_type,
                 void const* teacher_row, std::int64_t first, int columns) {
  load_columns(student_type, student_row, first, columns, student);
  load_columns(teacher_type, teacher_row, first, columns, teacher);
  padded = (columns + lanes - 1) / lanes * lanes;
  for (int c = columns; c < padded; ++c)
    student[c] = teacher[c] = -infinity;
}

void Block::load_one(ElementType type, void const* row, ElementType as, std::int64_t first,
                     int columns) {
  load_columns(type, row, first, columns, student);
  if (as != type)
    dispatch(as, [&](auto element) {
      using T = ElementTraits<decltype(element)>;
      for (int c = 0; c < columns; ++c)
        student[c] = T::to_float(T::from_float(student[c]));
    });
  padded = (columns + lanes - 1) / lanes * lanes;
  std::fill(student + columns, student + padded, -infinity);
  std::fill_n(teacher, padded, -infinity);
}

double weighted_difference(Block const& block, RowConstants const& row,
                           KernelOptions const& options) {
  float const ms = in_units(row.max_student), mt = in_units(row.max_teacher);
  float weighted[lanes] = {};
  std::int32_t unsupported[lanes] = {};
  for (int c = 0; c < block.padded; c += lanes)
    for (int l = 0; l < lanes; ++l) {
      float const s = block.student[c + l], t = block.teacher[c + l];
      float const ds = distance(s, ms), dt = distance(t, mt);
      weighted[l] += exp_nonpositive(dt * options.scale) * (dt - ds);
      unsupported[l] |= static_cast<int>(t > -infinity) & static_cast<int>(s == -infinity);
    }
  return any(unsupported) ? std::numeric_limits<double>::infinity() : tree_sum(weighted);
}

RowStatistics statistics(Block const& block, KernelOptions const& options) {
  switch (options.weighting) {
    case Weighting::teacher: return statistics_of<Weighting::teacher>(block, options);
    case Weighting::student: return statistics_of<Weighting::student>(block, options);
    case Weighting::none: break;
  }
  return statistics_of<Weighting::none>(block, options);
}

JsdSums jsd_sums(Block const& block, RowConstants const& row, KernelOptions const& options) {
  float student[lanes] = {}, teacher[lanes] = {};
  float const ms = in_units(row.max_student), mt = in_units(row.max_teacher);
  float const scale = options.scale;
  float const beta = static_cast<float>(options.beta);
  float const beta_rest = static_cast<float>(1.0 - options.beta);
  for (int c = 0; c < block.padded; c += lanes)
    for (int l = 0; l < lanes; ++l) {
      float const ds = distance(block.student[c + l], ms);
      float const dt = distance(block.teacher[c + l], mt);
      float const ps = exp_nonpositive(ds * scale) * row.inverse_sum_student;
      float const pt = exp_nonpositive(dt * scale) * row.inverse_sum_teacher;
      LogRatios const log_m =
          log_ratios(log_difference(ds, dt, scale, row.log_ratio), beta, beta_rest);
      student[l] += ps * log_m.student;
      teacher[l] += pt * log_m.teacher;
    }
  return {tree_sum(student), tree_sum(teacher)};
}

void gradient(Block const& block, RowConstants const& row, KernelOptions const& options,
              float weight, float* gradient) {
  int const padded = block.padded;
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  if (row.state == RowState::invalid || row.state == RowState::empty) {
    std::fill_n(gradient, padded, row.state == RowState::invalid ? nan : 0.0f);
    return;
  }
  float const ms = in_units(row.max_student), mt = in_units(row.max_teacher);
  float const scale = options.scale;
  float const factor = static_cast<float>(options.temperature * weight);
  switch (options.divergence) {
    case Divergence::forward_kl:
      for (int c = 0; c < padded; ++c) {
        float const ds = distance(block.student[c], ms);
        float const dt = distance(block.teacher[c], mt);
        gradient[c] = factor * (exp_nonpositive(ds * scale) * row.inverse_sum_student -
                                exp_nonpositive(dt * scale) * row.inverse_sum_teacher);
      }
      break;
    case Divergence::reverse_kl: {
      if (row.state == RowState::infinite) {
        for (int c = 0; c < padded; ++c)
          gradient[c] = block.student[c] > -infinity ? nan : 0.0f;
        break;
      }
      // T (log ps - log pt - D) is the logits' difference from its mean: T itself drops out. The
      // unit goes into the probability, where it cannot overflow.
      float const inverse_sum = row.inverse_sum_student * logit_unit;
      float const unit_weight = static_cast<float>(options.temperature * weight *
                                                   static_cast<double>(scale / logit_unit));
      for (int c = 0; c < padded; ++c) {
        float const ds = distance(block.student[c], ms);
        float const dt = distance(block.teacher[c], mt);
        gradient[c] =
            exp_nonpositive(ds * scale) * inverse_sum * ((ds - dt) - row.mean) * unit_weight;
      }
      break;
    }
    case Divergence::jsd: {
      float const beta = static_cast<float>(options.beta);
      float const beta_rest = static_cast<float>(1.0 - options.beta);
      float const rest_factor = factor * beta_rest;
      for (int c = 0; c < padded; ++c) {
        float const ds = distance(block.student[c], ms);
        float const dt = distance(block.teacher[c], mt);
        float const ps = exp_nonpositive(ds * scale) * row.inverse_sum_student;
        LogRatios const log_m =
            log_ratios(log_difference(ds, dt, scale, row.log_ratio), beta, beta_rest);
        gradient[c] = rest_factor * ps * (log_m.student - row.mean);
      }
      break;
    }
  }
}

void store(ElementType type, void* row, std::int64_t first, int columns, float const* values) {
  dispatch(type, [&](auto element) {
    using T = decltype(element);
    T* const to = static_cast<T*>(row) + first;
    for (int c = 0; c < columns; ++c)
      to[c] = ElementTraits<T>::from_float(values[c]);
  });
}

void store_zeros(ElementType type, void* row, std::int64_t first, std::int64_t last) {
  std::size_t const size = size_of(type);
  std::memset(static_cast<unsigned char*>(row) + static_cast<std::size_t>(first) * size, 0,
              static_cast<std::size_t>(last - first) * size);
}

}  // namespace vpkl::impl::host
