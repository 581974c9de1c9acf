// SPDX-License-Identifier: Apache-2.0
#include "harness.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace vpkl::test {

namespace {

std::vector<float> row_of(std::vector<float> const& all, std::int64_t row, std::int64_t width) {
  return {all.begin() + row * width, all.begin() + (row + 1) * width};
}

// What padding columns hold: anything that would show if it were read.
float poison(std::int64_t column) {
  constexpr float kinds[] = {std::numeric_limits<float>::quiet_NaN(), 1e4f, 0.0f,
                             std::numeric_limits<float>::infinity()};
  return kinds[column % 4];
}

template <class Exec>
void fill(Tensor<Exec>& tensor, std::vector<float> const& whole, std::int64_t vocabulary,
          std::int64_t begin, std::int64_t end) {
  std::int64_t const rows =
      static_cast<std::int64_t>(whole.size()) / std::max<std::int64_t>(vocabulary, 1);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < tensor.width(); ++c)
      tensor.set(r, c, c < end - begin ? whole[r * vocabulary + begin + c] : poison(c));
}

template <class Exec>
std::vector<unsigned char> all_bits(Tensor<Exec> const& tensor, std::int64_t rows) {
  std::vector<unsigned char> all;
  for (std::int64_t r = 0; r < rows; ++r) {
    auto const row = tensor.bits(r, tensor.width());
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}

// Unit round-off and half the smallest subnormal of a type; beyond `overflow` it rounds to inf.
struct Rounding {
  long double unit, floor, overflow;
};
Rounding rounding(ElementType type) {
  switch (type) {
    case ElementType::bf16: return {0x1p-8L, 0x1p-134L, 0x1.ffp127L};
    case ElementType::fp16: return {0x1p-11L, 0x1p-25L, 65520.0L};
    case ElementType::fp32: break;
  }
  return {0x1p-24L, 0x1p-150L, 0x1.ffffffp127L};
}

}  // namespace

std::vector<float> Problem::student_row(std::int64_t row) const {
  return row_of(student, row, vocabulary);
}
std::vector<float> Problem::teacher_row(std::int64_t row) const {
  return row_of(teacher, row, vocabulary);
}

void Problem::round() {
  for (float& x : student)
    x = rounded(student_type, x);
  for (float& x : teacher)
    x = rounded(teacher_type, x);
}

std::string Placement::describe() const {
  return fmt::format(
      "route {} bounds [{}] padding {} {} gap {} {} {} shift {} {} {} rows {} {} {}{}{}{} per call "
      "{} "
      "spare {}",
      vpkl::to_string(route), fmt::join(bounds, ", "), student_padding, teacher_padding,
      student_gap, teacher_gap, gradient_gap, student_shift, teacher_shift, gradient_shift,
      to_string(student_form), to_string(teacher_form), to_string(gradient_form),
      in_place ? " in place" : "", values_only ? " values only" : "",
      known_teacher ? empty_records ? " unknown teacher" : " known teacher" : "", rows_per_call,
      spare_rows);
}

std::string describe(Problem const& p) {
  return fmt::format(
      "{} beta {} temperature {} [{}, {}] student {} teacher {}{}", to_string(p.options.divergence),
      p.options.beta, p.options.temperature, p.rows, p.vocabulary, to_string(p.student_type),
      to_string(p.teacher_type),
      p.weight.empty() ? "" : fmt::format(" weights [{}]", fmt::join(p.weight, ", ")));
}

std::vector<std::int64_t> even_bounds(std::int64_t vocabulary, int ranks) {
  std::vector<std::int64_t> bounds{0};
  for (int r = 0; r < ranks; ++r)
    bounds.push_back(even_range(vocabulary, ranks, r).second);
  return bounds;
}

std::vector<std::int64_t> random_bounds(Random& random, std::int64_t vocabulary, int ranks) {
  if (uniform(random, 0, 2) == 0) return even_bounds(vocabulary, ranks);
  std::vector<std::int64_t> bounds{0};
  for (int r = 1; r < ranks; ++r) {
    std::int64_t const kind = uniform(random, 0, 3);
    bounds.push_back(kind == 0   ? (bounds.back())
                     : kind == 1 ? vocabulary
                                 : uniform(random, 0, vocabulary));
  }
  bounds.push_back(vocabulary);
  std::sort(bounds.begin(), bounds.end());
  return bounds;
}

std::vector<std::vector<std::int64_t>> interesting_bounds(std::int64_t vocabulary, int ranks) {
  std::vector<std::vector<std::int64_t>> all{even_bounds(vocabulary, ranks)};
  if (ranks == 1) return all;
  std::vector<std::int64_t> uneven{0};
  for (int r = 1; r < ranks; ++r)
    uneven.push_back(std::min<std::int64_t>(vocabulary, (1 << r) - 1));
  uneven.push_back(vocabulary);
  all.push_back(uneven);
  for (int empty = 0; empty < ranks; ++empty) {
    auto bounds = even_bounds(vocabulary, ranks - 1);
    bounds.insert(bounds.begin() + empty, bounds[empty]);
    all.push_back(bounds);
  }
  // Everything on the last rank.
  std::vector<std::int64_t> last(static_cast<std::size_t>(ranks) + 1, 0);
  last.back() = vocabulary;
  all.push_back(last);
  return all;
}

OracleOptions oracle_options(DivergenceOptions const& options) {
  OracleOptions out;
  out.divergence = options.divergence == Divergence::forward_kl   ? OracleDivergence::forward_kl
                   : options.divergence == Divergence::reverse_kl ? OracleDivergence::reverse_kl
                                                                  : OracleDivergence::jsd;
  out.beta = options.beta;
  out.temperature = options.temperature;
  return out;
}

template <class Exec>
Outcome run(Exec const& exec, Communicator const& comm, Problem const& problem,
            Placement const& placement) {
  std::int64_t const rows = problem.rows, vocabulary = problem.vocabulary;
  bool const dense = placement.route == Route::dense;
  bool const whole_teacher = placement.route == Route::gathered;
  auto const bounds =
      placement.bounds.empty() ? even_bounds(vocabulary, comm.size()) : placement.bounds;
  std::int64_t const begin = dense ? 0 : bounds[comm.rank()];
  std::int64_t const end = dense ? vocabulary : bounds[comm.rank() + 1];

  VocabShard::Spec spec;
  spec.vocabulary = vocabulary;
  spec.begin = begin;
  spec.end = end;
  spec.student_width = end - begin + placement.student_padding;
  spec.teacher_width = end - begin + placement.teacher_padding;
  VocabShard const shard =
      dense ? VocabShard::whole(vocabulary, spec.student_width, spec.teacher_width)
            : VocabShard::make(comm, spec);

  std::int64_t const per_call =
      placement.rows_per_call > 0 ? std::min(placement.rows_per_call, rows) : rows;
  typename DivergencePlan<Exec>::Options options;
  options.divergence = problem.options;
  options.route = placement.route;
  options.student_type = problem.student_type;
  options.teacher_type = problem.teacher_type;
  options.max_rows = per_call + placement.spare_rows;
  DivergencePlan<Exec> plan(exec, comm, shard, options);

  using Shape = typename Tensor<Exec>::Shape;
  Tensor<Exec> student(problem.student_type,
                       Shape{rows, spec.student_width, placement.student_gap,
                             placement.student_shift, placement.student_form});
  Tensor<Exec> teacher(
      problem.teacher_type,
      Shape{rows, whole_teacher ? vocabulary : spec.teacher_width, placement.teacher_gap,
            placement.teacher_shift, placement.teacher_form});
  Tensor<Exec> apart(problem.student_type, Shape{placement.in_place ? 0 : rows, spec.student_width,
                                                 placement.gradient_gap, placement.gradient_shift,
                                                 placement.gradient_form});
  fill(student, problem.student, vocabulary, begin, end);
  fill(teacher, problem.teacher, vocabulary, whole_teacher ? 0 : begin,
       whole_teacher ? vocabulary : end);
  for (std::int64_t r = 0; r < (placement.in_place ? 0 : rows); ++r)
    for (std::int64_t c = 0; c < apart.width(); ++c)
      apart.set(r, c, std::numeric_limits<float>::quiet_NaN());
  auto const student_before = all_bits(student, rows), teacher_before = all_bits(teacher, rows);
  Tensor<Exec>& gradient = placement.in_place ? student : apart;
  student.to_device();
  teacher.to_device();
  apart.to_device();

  using Floats = Kokkos::View<float*, typename Exec::memory_space>;
  using HostFloats = Kokkos::View<float*, Kokkos::HostSpace, Kokkos::MemoryUnmanaged>;
  Floats value(Kokkos::view_alloc("vpkl_test::value", Kokkos::WithoutInitializing),
               static_cast<std::size_t>(rows));
  Floats weight(Kokkos::view_alloc("vpkl_test::weight", Kokkos::WithoutInitializing),
                problem.weight.size());
  Kokkos::deep_copy(value, std::numeric_limits<float>::quiet_NaN());
  Kokkos::deep_copy(weight,
                    HostFloats(const_cast<float*>(problem.weight.data()), problem.weight.size()));

  bool const known = placement.known_teacher && rows > 0 && !whole_teacher &&
                     problem.options.divergence == Divergence::forward_kl;
  std::int64_t const own = dense ? 0 : comm.rank();
  Kokkos::View<RowStatistics*, typename Exec::memory_space> records(
      "vpkl_test::records", static_cast<std::size_t>(known ? rows : 0));
  Kokkos::View<double*, typename Exec::memory_space> shares(
      "vpkl_test::shares", static_cast<std::size_t>(known ? rows * comm.size() : 0));
  if (known)
    vpkl::impl::teacher_statistics(exec, teacher.rows(0, rows), shard.width(), problem.teacher_type,
                                   problem.options.temperature, records.data());

  Outcome out;
  CommunicationCounters const before = comm.counters();
  for (std::int64_t first = 0; first < rows; first += per_call) {
    std::int64_t const last = std::min(rows, first + per_call);
    Rows const to = placement.values_only ? Rows{} : gradient.rows(first, last);
    float const* const weights = problem.weight.empty() ? nullptr : weight.data() + first;
    if (known)
      plan.execute_known(exec, student.rows(first, last), teacher.rows(first, last),
                         {placement.empty_records ? nullptr : records.data() + first}, weights,
                         shares.data() + own * rows + first, to);
    else
      plan.execute(exec, student.rows(first, last), teacher.rows(first, last), weights,
                   value.data() + first, to);
  }
  if (known) plan.add_shares(exec, rows, shares.data(), value.data());
  if (rows == 0)
    plan.execute(exec, student.rows(0, 0), teacher.rows(0, 0), nullptr, nullptr,
                 gradient.rows(0, 0));
  vpkl::impl::fence(exec, "vpkl_test::run");
  CommunicationCounters const after = comm.counters();
  out.communication.all_gathers = after.all_gathers - before.all_gathers;
  out.communication.all_gather_bytes = after.all_gather_bytes - before.all_gather_bytes;
  out.communication.all_reduces = after.all_reduces - before.all_reduces;
  out.communication.records = after.records - before.records;
  out.plan = plan.counters();
  student.to_host();
  teacher.to_host();
  apart.to_host();
  out.value.resize(static_cast<std::size_t>(rows));
  Kokkos::deep_copy(HostFloats(out.value.data(), out.value.size()), value);

  if (!placement.in_place) {
    EXPECT_TRUE(all_bits(student, rows) == student_before) << "student logits were written";
  }
  EXPECT_TRUE(all_bits(teacher, rows) == teacher_before) << "teacher logits were written";
  EXPECT_TRUE(student.untouched()) << "memory between rows of the student was written";
  EXPECT_TRUE(teacher.untouched()) << "memory between rows of the teacher was written";
  EXPECT_TRUE(apart.untouched()) << "memory between rows of the gradient was written";

  // Bring everything together, fixed-size slots in rank order.
  std::int64_t largest = dense ? vocabulary : shard.largest_width();
  std::size_t const size = size_of(problem.student_type);
  std::size_t const values = out.value.size() * sizeof(float);
  std::size_t const slot = values + static_cast<std::size_t>(rows * largest) * size;
  std::vector<unsigned char> local(slot), all(slot * static_cast<std::size_t>(comm.size()));
  if (values > 0) std::memcpy(local.data(), out.value.data(), values);
  if (!placement.values_only) {
    for (std::int64_t r = 0; r < rows; ++r) {
      auto const row = gradient.bits(r, end - begin);
      std::copy(row.begin(), row.end(), local.begin() + values + r * largest * size);
      for (std::int64_t c = end - begin; c < gradient.width(); ++c)
        EXPECT_EQ(gradient.get(r, c), 0.0f) << "padding column " << c << " of row " << r;
    }
  }
  comm.exchange_record(local.data(), all.data(), slot);
  for (int rank = 1; rank < comm.size(); ++rank)
    EXPECT_TRUE(std::equal(all.begin(), all.begin() + values, all.begin() + rank * slot))
        << "values differ between rank 0 and rank " << rank;
  if (placement.values_only) return out;
  for (std::int64_t r = 0; r < rows; ++r)
    for (int rank = 0; rank < (dense ? 1 : comm.size()); ++rank) {
      std::int64_t const n = dense ? vocabulary : bounds[rank + 1] - bounds[rank];
      auto const from = all.begin() + rank * slot + values + r * largest * size;
      out.bits.insert(out.bits.end(), from, from + n * size);
    }
  for (int rank = 1; rank < (dense ? comm.size() : 0); ++rank)
    EXPECT_TRUE(std::equal(all.begin(), all.begin() + slot, all.begin() + rank * slot))
        << "gradients differ between rank 0 and rank " << rank;
  for (std::size_t i = 0; i < out.bits.size(); i += size)
    out.gradient.push_back(read_element(problem.student_type, out.bits.data() + i));
  return out;
}

#define VPKL_INSTANTIATE(Exec) \
  template Outcome run(Exec const&, Communicator const&, Problem const&, Placement const&);
VPKL_FOREACH_EXECUTION_SPACE(VPKL_INSTANTIATE)
#undef VPKL_INSTANTIATE

Closeness expect_close(Communicator const& comm, Problem const& problem, Outcome const& outcome,
                       std::string const& what, bool with_gradient) {
  constexpr long double bound = 1e-6L;
  Closeness worst;
  Rounding const fp32 = rounding(ElementType::fp32), out = rounding(problem.student_type);
  std::int64_t const v = problem.vocabulary;
  for (std::int64_t r = comm.rank(); r < problem.rows; r += comm.size()) {
    OracleRow const expected = oracle(problem.student_row(r), problem.teacher_row(r),
                                      problem.weight_of(r), oracle_options(problem.options));
    auto const context = [&] {
      return fmt::format("{}: row {} of {}", what, r, describe(problem));
    };
    long double const value = outcome.value[r];
    if (std::isnan(expected.value)) {
      EXPECT_TRUE(std::isnan(value)) << context() << "\nvalue " << value << ", expected NaN";
    } else if (std::isinf(expected.value)) {
      EXPECT_EQ(value, expected.value) << context();
    } else {
      // A row with one id of probability 1 has no terms to speak of: there the rounding of the
      // finalisation in double is what is left.
      long double const t = problem.options.temperature;
      long double const slack = bound * expected.value_scale +
                                fp32.unit * std::fabs(expected.value) +
                                4 * fp32.floor * (1 + expected.value_unit) + t * t * 0x1p-50L;
      long double const error = std::fabs(value - expected.value);
      if (std::fabs(expected.value) + slack < fp32.overflow) {
        worst.value_ratio = std::max(worst.value_ratio, static_cast<double>(error / slack));
        EXPECT_LE(error, slack) << context() << "\nvalue " << value << ", expected "
                                << expected.value;
      } else if (std::fabs(expected.value) - slack > fp32.overflow) {
        EXPECT_TRUE(std::isinf(value))
            << context() << "\nvalue " << value << ", expected " << expected.value;
      }
    }
    if (!with_gradient) continue;

    // Relative L2 over the columns with a finite expectation; the others are compared one by one.
    long double error2 = 0, scale2 = 0, rounding2 = 0;
    long double scale_norm2 = 0;
    for (long double scale : expected.gradient_scale)
      scale_norm2 += scale * scale;
    long double const norm = std::sqrt(scale_norm2);
    for (std::int64_t c = 0; c < v; ++c) {
      long double const got = outcome.gradient[r * v + c], want = expected.gradient[c];
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(got))
            << context() << "\ngradient of column " << c << " is " << got << ", expected NaN";
        if (!std::isnan(got)) return worst;
        continue;
      }
      long double const slack = bound * norm;
      if (std::fabs(want) + slack >= out.overflow) {
        bool const certain = std::fabs(want) - slack > out.overflow;
        EXPECT_TRUE(!certain || (std::isinf(got) && (got > 0) == (want > 0)))
            << context() << "\ngradient of column " << c << " is " << got << ", expected " << want;
        continue;
      }
      if (!std::isfinite(got)) {
        ADD_FAILURE() << context() << "\ngradient of column " << c << " is " << got << ", expected "
                      << want;
        return worst;
      }
      if (want == 0 && expected.gradient_scale[c] == 0) {
        EXPECT_EQ(got, 0) << context() << "\ngradient of column " << c;
      }
      error2 += (got - want) * (got - want);
      long double const round = out.unit * (std::fabs(want) + std::fabs(got - want)) + out.floor;
      rounding2 += round * round;
      scale2 += expected.gradient_scale[c] * expected.gradient_scale[c];
      // The library keeps differences of logits in units of 1024.
      long double const underflow =
          4 * fp32.floor *
          (expected.gradient_unit[c] +
           1024 * std::fabs(static_cast<long double>(problem.weight_of(r))));
      rounding2 += underflow * underflow;
    }
    long double const slack = bound * std::sqrt(scale2) + std::sqrt(rounding2);
    if (slack > 0)
      worst.gradient_ratio =
          std::max(worst.gradient_ratio, static_cast<double>(std::sqrt(error2) / slack));
    EXPECT_LE(std::sqrt(error2), slack)
        << context() << "\ngradient error " << std::sqrt(error2) << ", scale " << std::sqrt(scale2);
  }
  return worst;
}

Closeness expect_close(Problem const& problem, Outcome const& outcome, std::string const& what,
                       bool with_gradient) {
  return expect_close(Communicator::self(), problem, outcome, what, with_gradient);
}

}  // namespace vpkl::test
