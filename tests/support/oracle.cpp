// SPDX-License-Identifier: Apache-2.0
#include "oracle.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace vpkl::test {

namespace {

using Real = long double;
using Row = std::vector<Real>;

constexpr Real infinity = std::numeric_limits<Real>::infinity();
constexpr Real nan = std::numeric_limits<Real>::quiet_NaN();

Row log_softmax(std::vector<float> const& logits, Real temperature) {
  Row z;
  for (float x : logits)
    z.push_back(static_cast<Real>(x) / temperature);
  Real const largest = *std::max_element(z.begin(), z.end());
  Real sum = 0;
  for (Real x : z)
    sum += std::exp(x - largest);
  for (Real& x : z)
    x = (x - largest) - std::log(sum);
  return z;
}

bool defined(std::vector<float> const& logits) {
  return std::none_of(logits.begin(), logits.end(),
                      [](float x) { return std::isnan(x) || (std::isinf(x) && x > 0); });
}

bool supported(std::vector<float> const& logits) {
  return std::any_of(logits.begin(), logits.end(), [](float x) { return !std::isinf(x); });
}

// p · x with 0 · (-inf) = 0: a term without weight adds nothing.
Real term(Real p, Real x) { return p == 0 ? 0 : p * x; }

Real weighed(Real log_p) {
  Real const p = std::exp(log_p);
  return p == 0 ? 0 : p * std::max(Real(1), std::fabs(log_p) / 12);
}

// D(p‖q) and the sum of its absolute terms; infinite support mismatches are the caller's.
struct Sum {
  Real value = 0, scale = 0, unit = 0;
};
Sum divergence(Row const& log_p, Row const& log_q) {
  Sum sum;
  for (std::size_t i = 0; i < log_p.size(); ++i) {
    Real const p = std::exp(log_p[i]);
    if (p == 0) continue;
    sum.unit += std::fabs(log_p[i]) + std::fabs(log_q[i]);
    sum.value += p * (log_p[i] - log_q[i]);
    sum.scale += weighed(log_p[i]) * (std::fabs(log_p[i]) + std::fabs(log_q[i]));
  }
  return sum;
}

// Σ p |log p|: how much rounding of the logits moves a normaliser.
Real entropy(Row const& log_p) {
  Real sum = 0;
  for (Real x : log_p)
    sum += term(weighed(x), std::fabs(x));
  return sum;
}

}  // namespace

OracleRow oracle(std::vector<float> const& student, std::vector<float> const& teacher,
                 double weight, OracleOptions const& options) {
  std::size_t const n = student.size();
  OracleRow out;
  out.gradient.assign(n, 0);
  out.gradient_scale.assign(n, 0);
  out.gradient_unit.assign(n, 0);
  if (weight == 0) return out;
  if (!defined(student) || !defined(teacher)) {
    out.value = nan;
    out.gradient.assign(n, nan);
    return out;
  }
  if (!supported(student) || !supported(teacher)) {
    out.value = nan;
    return out;
  }
  Real const t = options.temperature, w = weight, beta = options.beta;
  Row const log_s = log_softmax(student, t), log_t = log_softmax(teacher, t);
  auto const mismatch = [n](std::vector<float> const& a, std::vector<float> const& b) {
    for (std::size_t i = 0; i < n; ++i)
      if (!std::isinf(a[i]) && std::isinf(b[i])) return true;
    return false;
  };

  switch (options.divergence) {
    case OracleDivergence::forward_kl: {
      Sum const d = divergence(log_t, log_s);
      bool const infinite = mismatch(teacher, student);
      out.value = infinite ? infinity : t * t * d.value;
      out.value_scale = t * t * (d.scale + entropy(log_s));
      out.value_unit = t * t * d.unit;
      for (std::size_t i = 0; i < n; ++i) {
        Real const ps = std::exp(log_s[i]), pt = std::exp(log_t[i]);
        out.gradient[i] = t * w * (ps - pt);
        out.gradient_scale[i] = t * std::fabs(w) * (ps + pt);
        out.gradient_unit[i] = t * std::fabs(w);
      }
      return out;
    }
    case OracleDivergence::reverse_kl: {
      if (mismatch(student, teacher)) {
        out.value = infinity;
        for (std::size_t i = 0; i < n; ++i)
          out.gradient[i] = std::isinf(student[i]) ? 0 : nan;
        return out;
      }
      Sum const d = divergence(log_s, log_t);
      out.value = t * t * d.value;
      out.value_scale = t * t * (d.scale + entropy(log_t));
      out.value_unit = t * t * d.unit;
      for (std::size_t i = 0; i < n; ++i) {
        Real const ps = std::exp(log_s[i]);
        out.gradient[i] = t * w * term(ps, log_s[i] - log_t[i] - d.value);
        if (std::isinf(student[i])) continue;
        out.gradient_unit[i] =
            t * std::fabs(w) * (std::fabs(log_s[i]) + std::fabs(log_t[i]) + std::fabs(d.value));
        out.gradient_scale[i] = term(weighed(log_s[i]), out.gradient_unit[i]);
      }
      return out;
    }
    case OracleDivergence::jsd: {
      Row log_m(n);
      for (std::size_t i = 0; i < n; ++i) {
        Real const a = std::log(beta) + log_t[i], b = std::log1p(-beta) + log_s[i];
        Real const high = std::max(a, b), low = std::min(a, b);
        log_m[i] = std::isinf(high) ? high : high + std::log1p(std::exp(low - high));
      }
      // Where a model has no probability its term is absent, whatever m is.
      Sum const ds = divergence(log_s, log_m), dt = divergence(log_t, log_m);
      out.value = t * t * (beta * dt.value + (1 - beta) * ds.value);
      out.value_scale = t * t * (beta * dt.scale + (1 - beta) * ds.scale);
      out.value_unit = t * t * (beta * dt.unit + (1 - beta) * ds.unit);
      for (std::size_t i = 0; i < n; ++i) {
        Real const ps = std::exp(log_s[i]);
        out.gradient[i] = t * w * (1 - beta) * term(ps, log_s[i] - log_m[i] - ds.value);
        if (std::isinf(student[i])) continue;
        out.gradient_unit[i] = t * std::fabs(w) * (1 - beta) *
                               (std::fabs(log_s[i]) + std::fabs(log_m[i]) + std::fabs(ds.value));
        out.gradient_scale[i] = term(weighed(log_s[i]), out.gradient_unit[i]);
      }
      return out;
    }
  }
  return out;
}

}  // namespace vpkl::test
