// SPDX-License-Identifier: Apache-2.0
// Random micro-batches, cut up and laid out at random, against the oracle. VPKL_FUZZ_SEED repeats a
// run, VPKL_FUZZ_ITERATIONS sets its length.
#include "session.hpp"

#include <fmt/format.h>

using namespace vpkl;
using namespace vpkl::test;

namespace {

template <class Exec>
class StreamedLossFuzz : public CollectiveTest<Exec> {};

TYPED_TEST_SUITE(StreamedLossFuzz, ExecutionSpaces, SpaceNames);

template <class T, std::size_t N>
T pick(Random& random, T const (&from)[N]) {
  return from[uniform(random, 0, N - 1)];
}

bool chance(Random& random, std::int64_t one_in) { return uniform(random, 1, one_in) == 1; }

MicroBatch fuzz_batch(Random& random) {
  std::int64_t const batch = chance(random, 12) ? 0 : uniform(random, 1, 4);
  std::int64_t const length = chance(random, 12) ? uniform(random, 0, 1) : uniform(random, 2, 14);
  std::int64_t const vocabulary = chance(random, 20)  ? uniform(random, 2040, 2060)
                                  : chance(random, 2) ? uniform(random, 1, 70)
                                                      : uniform(random, 60, 400);
  MicroBatch out = random_batch(random, batch, length, vocabulary);
  Problem& p = out.problem;
  p.options.divergence = pick(random, divergences);
  p.options.temperature = chance(random, 2) ? 1 : uniform_real(random, 0.3, 4);
  p.options.beta = chance(random, 2) ? 0.5 : uniform_real(random, 0.02, 0.98);
  p.student_type = pick(random, element_types);
  p.teacher_type = pick(random, element_types);
  double const spread = uniform_real(random, 0.01, 3);
  for (std::size_t i = 0; i < p.student.size(); ++i) {
    p.student[i] = static_cast<float>(spread * p.student[i]);
    // Close models and far ones.
    p.teacher[i] = chance(random, 2) ? p.teacher[i] : p.student[i];
  }
  if (chance(random, 2)) {
    out.normalization.gradient_accumulation_steps = uniform(random, 1, 8);
    out.normalization.loss_scale = std::ldexp(1.0, static_cast<int>(uniform(random, -4, 10)));
  }
  if (chance(random, 3)) {
    out.normalization.kind = Normalization::Kind::global_divisor;
    out.normalization.divisor = static_cast<double>(uniform(random, 1, 100));
  }
  return out;
}

Setup fuzz_setup(Random& random, MicroBatch const& batch, int ranks) {
  Setup setup;
  setup.route = pick(random, routes);
  setup.plan = chance(random, 2) ? PlanKind::rows : PlanKind::chunks;
  setup.chunk_width = uniform(random, 1, std::max<std::int64_t>(1, batch.length + 2));
  setup.skip = !chance(random, 3);
  setup.cache = chance(random, 2) ? CacheMode::all : CacheMode::response;
  if (chance(random, 4)) setup.store_type = pick(random, element_types);
  setup.statistics = chance(random, 2);
  setup.bounds = random_bounds(random, batch.problem.vocabulary, ranks);
  std::int64_t* const layout[] = {
      &setup.student_padding,   &setup.teacher_padding,    &setup.student_gap, &setup.gradient_gap,
      &setup.student_batch_gap, &setup.gradient_batch_gap, &setup.mask_gap};
  for (std::int64_t* value : layout)
    if (chance(random, 3)) *value = uniform(random, 1, 5);
  setup.flat = chance(random, 4);
  setup.in_place = chance(random, 3);
  setup.packed = setup.plan == PlanKind::rows && !setup.in_place && chance(random, 3);
  setup.values_only = chance(random, 8);
  return setup;
}

TYPED_TEST(StreamedLossFuzz, against_the_oracle) {
  std::uint64_t const seed = fuzz_seed(this->comm);
  std::int64_t const iterations = fuzz_iterations(300);
  for (std::int64_t i = 0; i < iterations; ++i) {
    Random random(seed + static_cast<std::uint64_t>(i));
    MicroBatch batch = fuzz_batch(random);
    Setup const setup = fuzz_setup(random, batch, this->comm.size());
    std::string const what = fmt::format("VPKL_FUZZ_SEED={} VPKL_FUZZ_ITERATIONS=1: [{}, {}] {}",
                                         seed + static_cast<std::uint64_t>(i), batch.batch,
                                         batch.length, setup.describe());
    SCOPED_TRACE(what);
    FloatingPointTraps const traps;
    Streamed const streamed = run_streamed(this->exec, this->comm, batch, setup);
    batch.problem.round();
    if (setup.store_type) batch.problem.teacher_type = *setup.store_type;
    expect_right(this->comm, batch, streamed, what, !setup.values_only);
    if (!all_of(this->comm, !this->HasFailure())) break;
  }
}

}  // namespace
