// SPDX-License-Identifier: Apache-2.0
// Random shapes, types, routes, options and placements against the oracle.
// VPKL_FUZZ_SEED and VPKL_FUZZ_ITERATIONS repeat or extend a run.
#include "support/harness.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

using namespace vpkl;
using namespace vpkl::test;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();

template <class T, std::size_t N>
T const& one_of(Random& random, T const (&choices)[N]) {
  return choices[uniform(random, 0, N - 1)];
}

bool chance(Random& random, int one_in) { return uniform(random, 1, one_in) == 1; }

/// A row of logits of one of the shapes that logits take, or that arithmetic suffers from.
std::vector<float> logits(Random& random, std::int64_t n) {
  std::vector<float> row(static_cast<std::size_t>(n));
  double const spreads[] = {0, 0.01, 1, 3, 10, 60};
  double const spread = one_of(random, spreads);
  double const offsets[] = {0, 0, 0, 1, -7, 300, -1e4, 1e8};
  double const offset = one_of(random, offsets);
  if (chance(random, 12)) {  // anything finite
    for (float& x : row)
      x = static_cast<float>(uniform_real(random, -3.4e38, 3.4e38));
    return row;
  }
  switch (uniform(random, 0, 4)) {
    case 0:  // few levels: rounding errors of equal terms add up
      for (float& x : row)
        x = static_cast<float>(offset - spread * static_cast<double>(uniform(random, 0, 2)));
      break;
    case 1:  // one id stands out
      for (float& x : row)
        x = static_cast<float>(offset + 0.1 * spread * normal(random));
      row[uniform(random, 0, n - 1)] += static_cast<float>(spread);
      break;
    default:
      for (float& x : row)
        x = static_cast<float>(offset + spread * normal(random));
  }
  return row;
}

void mask_some(Random& random, std::vector<float>& a, std::vector<float>& b) {
  std::int64_t const n = static_cast<std::int64_t>(a.size());
  if (!chance(random, 4)) return;
  std::int64_t const begin = uniform(random, 0, n - 1), end = uniform(random, begin, n);
  bool const runs = chance(random, 2);
  bool const both = !chance(random, 3);
  for (std::int64_t c = runs ? begin : 0; c < (runs ? end : n); ++c) {
    if (!runs && !chance(random, 3)) continue;
    a[c] = -inf;
    if (both) b[c] = -inf;
  }
}

Problem draw_problem(Random& random) {
  std::int64_t const widths[] = {1, 2, 3, 17, 63, 64, 65, 130, 1000, 2047, 2048, 2049, 4100, 6500};
  Problem p(uniform(random, 1, 6),
            chance(random, 3) ? one_of(random, widths) : uniform(random, 1, 700));
  p.options.divergence = one_of(random, divergences);
  double const temperatures[] = {1, 1, 1, 2, 0.5, 0.01, 3, 7.3, 100, 2e-19, 1e-6, 1e6, 1e18};
  p.options.temperature =
      chance(random, 4) ? uniform_real(random, 0.2, 4) : one_of(random, temperatures);
  double const betas[] = {0.5, 0.1, 0.9, 1e-6, 1 - 1e-6, 1e-30};
  p.options.beta = chance(random, 3) ? uniform_real(random, 0.01, 0.99) : one_of(random, betas);
  p.student_type = one_of(random, element_types);
  p.teacher_type = one_of(random, element_types);
  if (chance(random, 2))
    for (std::int64_t r = 0; r < p.rows; ++r) {
      float const weights[] = {0, 0, 1, -1, 0.125f, 1e-3f, 1024, -7.5f};
      p.weight.push_back(one_of(random, weights));
    }
  for (std::int64_t r = 0; r < p.rows; ++r) {
    auto student = logits(random, p.vocabulary);
    auto teacher = logits(random, p.vocabulary);
    if (chance(random, 4)) {
      double const noise[] = {0, 1e-6, 1e-4, 0.01, 0.3};
      double const spread = one_of(random, noise);
      for (std::size_t c = 0; c < student.size(); ++c)
        student[c] = teacher[c] + static_cast<float>(spread * normal(random));
    }
    mask_some(random, student, teacher);
    mask_some(random, teacher, student);
    if (chance(random, 30)) {
      float const strange[] = {std::numeric_limits<float>::quiet_NaN(), inf};
      (chance(random, 2) ? student : teacher)[uniform(random, 0, p.vocabulary - 1)] =
          one_of(random, strange);
    }
    if (chance(random, 30)) std::fill(student.begin(), student.end(), -inf);
    if (chance(random, 30)) std::fill(teacher.begin(), teacher.end(), -inf);
    std::copy(student.begin(), student.end(), p.student.begin() + r * p.vocabulary);
    std::copy(teacher.begin(), teacher.end(), p.teacher.begin() + r * p.vocabulary);
  }
  p.round();
  return p;
}

Placement draw_placement(Random& random, Problem const& problem, int ranks) {
  Placement p;
  p.route = one_of(random, routes);
  p.bounds = random_bounds(random, problem.vocabulary, ranks);
  auto const extra = [&] { return chance(random, 2) ? 0 : uniform(random, 1, 9); };
  p.student_padding = extra();
  p.teacher_padding = extra();
  p.student_gap = extra();
  p.teacher_gap = extra();
  p.gradient_gap = extra();
  p.student_shift = extra();
  p.teacher_shift = extra();
  p.gradient_shift = extra();
  RowForm const forms[] = {RowForm::strided, RowForm::nested, RowForm::offsets};
  p.student_form = one_of(random, forms);
  p.teacher_form = one_of(random, forms);
  p.gradient_form = one_of(random, forms);
  p.in_place = chance(random, 3);
  p.values_only = chance(random, 8);
  p.rows_per_call = chance(random, 2) ? 0 : uniform(random, 1, problem.rows);
  p.spare_rows = extra();
  p.known_teacher = chance(random, 3);
  p.empty_records = chance(random, 4);
  return p;
}

template <class Exec>
class DivergenceFuzz : public testing::Test {};
TYPED_TEST_SUITE(DivergenceFuzz, ExecutionSpaces, SpaceNames);

TYPED_TEST(DivergenceFuzz, AgreesWithTheOracle) {
  TypeParam const exec;
  Communicator const comm = world();
  std::uint64_t const seed = fuzz_seed(comm);
  std::int64_t const iterations = fuzz_iterations(comm.size() == 1 ? 1000 : 300);
  Closeness worst;
  for (std::int64_t i = 0; i < iterations; ++i) {
    Random random(seed + static_cast<std::uint64_t>(i));
    Problem const problem = draw_problem(random);
    Placement const placement = draw_placement(random, problem, comm.size());
    std::string const what =
        fmt::format("VPKL_FUZZ_SEED={} VPKL_FUZZ_ITERATIONS=1: {}", seed + i, placement.describe());
    SCOPED_TRACE(what);
    Outcome const outcome = run(exec, comm, problem, placement);
    Closeness const close = expect_close(comm, problem, outcome, what, !placement.values_only);
    worst.value_ratio = std::max(worst.value_ratio, close.value_ratio);
    worst.gradient_ratio = std::max(worst.gradient_ratio, close.gradient_ratio);
    if (!std::getenv("VPKL_FUZZ_CONTINUE") && !all_of(comm, !this->HasFailure())) break;
  }
  if (comm.rank() == 0)
    std::printf("largest error over its bound: value %.3f, gradient %.3f\n", worst.value_ratio,
                worst.gradient_ratio);
}

}  // namespace
