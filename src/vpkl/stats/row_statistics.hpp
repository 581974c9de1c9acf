// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Mergeable per-row statistics of two distributions over a part of the vocabulary.
#pragma once

#include <vpkl/core/kokkos.hpp>

#include <cmath>
#include <cstdint>

namespace vpkl {

/// Which distribution weighs `difference`: the teacher in forward KL, the student in reverse KL.
enum class Weighting : std::int32_t { teacher, student, none };

/// Differences of logits are kept in units of 1024. Any two finite logits then differ by a finite
/// float, and sums of such differences over a block of columns stay finite.
constexpr float logit_unit = 1024.0f;
/// Exactly 1 / logit_unit.
constexpr float inverse_logit_unit = 1.0f / logit_unit;

/// Statistics of one row over a set of columns; 32 bytes, the record that ranks exchange.
///
/// With m the largest logit of the set and d = logit - m: sum = Σ e^(d/T), and difference =
/// Σ e^(da/T) · (da - db) / (sum_a · logit_unit), a the weighing distribution.
struct alignas(16) RowStatistics {
  /// Bits of `flags`.
  enum Flag : std::uint32_t {
    invalid = 1,      ///< a NaN or +inf logit in either model
    unsupported = 2,  ///< the weighing distribution has support where the other has none
  };

  double sum_student = 0;               ///< Σ e^(ds/T)
  double sum_teacher = 0;               ///< Σ e^(dt/T)
  float max_student = -impl::infinity;  ///< largest logit; -inf: no support
  float max_teacher = -impl::infinity;  ///< largest logit; -inf: no support
  float difference = 0;                 ///< weighted mean of da - db, in units of logit_unit
  std::uint32_t flags = 0;              ///< of Flag; merged by OR
};
static_assert(sizeof(RowStatistics) == 32, "RowStatistics is the 32-byte record on the wire");

namespace impl {

/// Distance (in units) and e^((from - to)/T) of a maximum that moved up; 0 and 1 for an empty set,
/// whose sums are 0 anyway.
struct Rescale {
  double shift;
  double factor;
  KOKKOS_INLINE_FUNCTION Rescale(float from, float to, double inverse_temperature) {
    bool const moved = from != to && from != -impl::infinity;
    double const distance = moved ? static_cast<double>(from) - static_cast<double>(to) : 0;
    shift = distance * static_cast<double>(inverse_logit_unit);
    factor = moved ? exp(distance * inverse_temperature) : 1;
  }
};

}  // namespace impl

/// Accumulates records of disjoint column sets in a fixed order, in double.
class RowAccumulator {
 public:
  /// \brief An empty set of columns.
  KOKKOS_INLINE_FUNCTION RowAccumulator(Weighting weighting, double inverse_temperature)
      : weighting_(weighting), inverse_temperature_(inverse_temperature) {}

  /// \brief Merges the record of further columns.
  KOKKOS_INLINE_FUNCTION void add(RowStatistics const& part) {
    flags_ |= part.flags;
    if (flags_ & RowStatistics::invalid) return;
    float const max_student = part.max_student > max_student_ ? part.max_student : max_student_;
    float const max_teacher = part.max_teacher > max_teacher_ ? part.max_teacher : max_teacher_;
    impl::Rescale const own_s(max_student_, max_student, inverse_temperature_);
    impl::Rescale const own_t(max_teacher_, max_teacher, inverse_temperature_);
    impl::Rescale const new_s(part.max_student, max_student, inverse_temperature_);
    impl::Rescale const new_t(part.max_teacher, max_teacher, inverse_temperature_);
    // With W = Σ e^(da/T) · (da - db): W' = e^((ma-ma')/T) · (W + Sa ((ma-ma') - (mb-mb'))), for
    // either side of the merge.
    if (weighting_ == Weighting::teacher) {
      weighted_ = own_t.factor * (weighted_ + sum_teacher_ * (own_t.shift - own_s.shift)) +
                  new_t.factor * part.sum_teacher *
                      (static_cast<double>(part.difference) + (new_t.shift - new_s.shift));
    } else if (weighting_ == Weighting::student) {
      weighted_ = own_s.factor * (weighted_ + sum_student_ * (own_s.shift - own_t.shift)) +
                  new_s.factor * part.sum_student *
                      (static_cast<double>(part.difference) + (new_s.shift - new_t.shift));
    }
    sum_student_ = own_s.factor * sum_student_ + new_s.factor * part.sum_student;
    sum_teacher_ = own_t.factor * sum_teacher_ + new_t.factor * part.sum_teacher;
    max_student_ = max_student;
    max_teacher_ = max_teacher;
  }

  /// \brief The record of all columns added so far.
  KOKKOS_INLINE_FUNCTION RowStatistics result() const {
    RowStatistics r;
    r.sum_student = sum_student_;
    r.sum_teacher = sum_teacher_;
    r.max_student = max_student_;
    r.max_teacher = max_teacher_;
    double const weight = weighting_ == Weighting::student ? sum_student_ : sum_teacher_;
    if (weight > 0) r.difference = static_cast<float>(weighted_ / weight);
    r.flags = flags_;
    return r;
  }

 private:
  Weighting weighting_;
  double inverse_temperature_;
  double sum_student_ = 0, sum_teacher_ = 0, weighted_ = 0;
  float max_student_ = -impl::infinity;
  float max_teacher_ = -impl::infinity;
  std::uint32_t flags_ = 0;
};

}  // namespace vpkl
