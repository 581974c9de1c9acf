// SPDX-License-Identifier: Apache-2.0
#include <vpkl/divergence/host/block.hpp>
#include <vpkl/divergence/host/math.hpp>

#include <algorithm>
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

/// (logit - max)/T, finite for every logit but NaN: support is decided by the logit alone.
inline float scaled(float logit, float max, float inverse_temperature) {
  return at_least((logit - max) * inverse_temperature, lowest);
}

/// 0 for a set without support, so that -inf - max stays -inf.
inline float safe_max(float max) { return max == -infinity ? 0.0f : max; }

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

float largest(float const* x, int padded) {
  float lane[lanes];
  for (int l = 0; l < lanes; ++l)
    lane[l] = -infinity;
  for (int c = 0; c < padded; c += lanes)
    for (int l = 0; l < lanes; ++l)
      lane[l] = x[c + l] > lane[l] ? x[c + l] : lane[l];
  float max = -infinity;
  for (float value : lane)
    max = value > max ? value : max;
  return max;
}

template <class Predicate>
bool any(Block const& block, Predicate&& predicate) {
  std::int32_t lane[lanes] = {};
  for (int c = 0; c < block.padded; c += lanes)
    for (int l = 0; l < lanes; ++l)
      lane[l] |= predicate(block.student[c + l], block.teacher[c + l]) ? 1 : 0;
  std::int32_t found = 0;
  for (std::int32_t f : lane)
    found |= f;
  return found != 0;
}

template <Weighting weighting>
void sums(Block const& block, float ms, float mt, float inverse_temperature, RowStatistics& out) {
  float sum_student[lanes] = {}, sum_teacher[lanes] = {}, weighted[lanes] = {};
  for (int c = 0; c < block.padded; c += lanes)
    for (int l = 0; l < lanes; ++l) {
      float const zs = scaled(block.student[c + l], ms, inverse_temperature);
      float const zt = scaled(block.teacher[c + l], mt, inverse_temperature);
      float const es = exp_nonpositive(zs);
      float const et = exp_nonpositive(zt);
      sum_student[l] += es;
      sum_teacher[l] += et;
      if (weighting == Weighting::teacher) weighted[l] += et * (zt - zs);
      if (weighting == Weighting::student) weighted[l] += es * (zs - zt);
    }
  out.sum_student = tree_sum(sum_student);
  out.sum_teacher = tree_sum(sum_teacher);
  out.weighted = static_cast<float>(tree_sum(weighted));
}

/// log(ps/m) and log(pt/m) from log pt - log ps, exactly 0 where the two agree.
struct LogRatios {
  float student, teacher;
};

inline LogRatios log_ratios(float difference, float beta, float beta_rest) {
  bool const student_larger = difference <= 0;
  float const magnitude = student_larger ? -difference : difference;
  // m / max(ps, pt) is a mixture of 1 and e^-|difference|.
  float const l =
      log_mixture(student_larger ? beta : beta_rest, student_larger ? beta_rest : beta, -magnitude);
  return student_larger ? LogRatios{-l, difference - l} : LogRatios{-difference - l, -l};
}

/// log pt - log ps of a column, kept finite.
inline float log_difference(float zs, float zt, float log_ratio) {
  return at_least(std::min((zt - zs) - log_ratio, std::numeric_limits<float>::max()), lowest);
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

RowStatistics statistics(Block const& block, KernelOptions const& options) {
  RowStatistics out;
  // False for NaN too.
  if (any(block, [](float s, float t) { return !(s < infinity) | !(t < infinity); })) {
    out.flags = RowStatistics::invalid;
    return out;
  }
  out.max_student = largest(block.student, block.padded);
  out.max_teacher = largest(block.teacher, block.padded);
  float const ms = safe_max(out.max_student), mt = safe_max(out.max_teacher);
  switch (options.weighting) {
    case Weighting::teacher:
      sums<Weighting::teacher>(block, ms, mt, options.inverse_temperature, out);
      if (any(block, [](float s, float t) { return (t > -infinity) & (s == -infinity); }))
        out.flags |= RowStatistics::unsupported;
      break;
    case Weighting::student:
      sums<Weighting::student>(block, ms, mt, options.inverse_temperature, out);
      if (any(block, [](float s, float t) { return (s > -infinity) & (t == -infinity); }))
        out.flags |= RowStatistics::unsupported;
      break;
    case Weighting::none:
      sums<Weighting::none>(block, ms, mt, options.inverse_temperature, out);
      break;
  }
  return out;
}

JsdSums jsd_sums(Block const& block, RowConstants const& row, KernelOptions const& options) {
  float student[lanes] = {}, teacher[lanes] = {};
  float const inverse_temperature = options.inverse_temperature;
  float const beta = static_cast<float>(options.beta);
  float const beta_rest = static_cast<float>(1.0 - options.beta);
  for (int c = 0; c < block.padded; c += lanes)
    for (int l = 0; l < lanes; ++l) {
      float const zs = scaled(block.student[c + l], row.max_student, inverse_temperature);
      float const zt = scaled(block.teacher[c + l], row.max_teacher, inverse_temperature);
      float const ps = exp_nonpositive(zs) * row.inverse_sum_student;
      float const pt = exp_nonpositive(zt) * row.inverse_sum_teacher;
      LogRatios const log_m = log_ratios(log_difference(zs, zt, row.log_ratio), beta, beta_rest);
      student[l] += ps * log_m.student;
      teacher[l] += pt * log_m.teacher;
    }
  return {tree_sum(student), tree_sum(teacher)};
}

void gradient(Block const& block, RowConstants const& row, KernelOptions const& options,
              float weight, float* gradient) {
  float const inverse_temperature = options.inverse_temperature;
  float const scale = static_cast<float>(options.temperature * weight);
  int const padded = block.padded;
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  if (row.state == RowState::invalid || row.state == RowState::empty) {
    std::fill_n(gradient, padded, row.state == RowState::invalid ? nan : 0.0f);
    return;
  }
  switch (options.divergence) {
    case Divergence::forward_kl:
      for (int c = 0; c < padded; ++c) {
        float const zs = scaled(block.student[c], row.max_student, inverse_temperature);
        float const zt = scaled(block.teacher[c], row.max_teacher, inverse_temperature);
        gradient[c] = scale * (exp_nonpositive(zs) * row.inverse_sum_student -
                               exp_nonpositive(zt) * row.inverse_sum_teacher);
      }
      break;
    case Divergence::reverse_kl:
      if (row.state == RowState::infinite) {
        for (int c = 0; c < padded; ++c)
          gradient[c] = block.student[c] > -infinity ? nan : 0.0f;
        break;
      }
      for (int c = 0; c < padded; ++c) {
        float const zs = scaled(block.student[c], row.max_student, inverse_temperature);
        float const zt = scaled(block.teacher[c], row.max_teacher, inverse_temperature);
        gradient[c] =
            scale * (exp_nonpositive(zs) * row.inverse_sum_student) * ((zs - zt) - row.mean);
      }
      break;
    case Divergence::jsd: {
      float const beta = static_cast<float>(options.beta);
      float const beta_rest = static_cast<float>(1.0 - options.beta);
      float const factor = scale * beta_rest;
      for (int c = 0; c < padded; ++c) {
        float const zs = scaled(block.student[c], row.max_student, inverse_temperature);
        float const zt = scaled(block.teacher[c], row.max_teacher, inverse_temperature);
        float const ps = exp_nonpositive(zs) * row.inverse_sum_student;
        LogRatios const log_m = log_ratios(log_difference(zs, zt, row.log_ratio), beta, beta_rest);
        gradient[c] = factor * ps * (log_m.student - row.mean);
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
