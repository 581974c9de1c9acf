// SPDX-License-Identifier: Apache-2.0
// How a micro-batch is cut up, laid out and cached never shows in a bit of the result.
#include "session.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

using namespace vpkl;
using namespace vpkl::test;

namespace {

struct Case {
  Route route;
  DivergenceOptions options;
  ElementType student, teacher;
};

constexpr Case cases[] = {
    {Route::dense, {Divergence::forward_kl, 0.5, 1.0}, ElementType::fp32, ElementType::fp32},
    {Route::dense, {Divergence::jsd, 0.2, 1.7}, ElementType::bf16, ElementType::fp32},
    {Route::gathered, {Divergence::forward_kl, 0.5, 0.6}, ElementType::bf16, ElementType::bf16},
    {Route::gathered, {Divergence::jsd, 0.5, 1.0}, ElementType::fp32, ElementType::bf16},
    {Route::vocab_parallel,
     {Divergence::forward_kl, 0.5, 2.0},
     ElementType::fp32,
     ElementType::bf16},
    {Route::vocab_parallel,
     {Divergence::reverse_kl, 0.5, 1.3},
     ElementType::bf16,
     ElementType::bf16},
    {Route::vocab_parallel,
     {Divergence::reverse_kl, 0.5, 0.4},
     ElementType::fp32,
     ElementType::fp16},
    {Route::vocab_parallel, {Divergence::jsd, 0.7, 1.0}, ElementType::fp16, ElementType::fp16},
};

template <class Exec>
class StreamedLossBits : public CollectiveTest<Exec> {
 protected:
  MicroBatch batch_of(Case const& c, std::int64_t batch, std::int64_t length,
                      std::int64_t vocabulary) const {
    Random random(42);
    MicroBatch out = random_batch(random, batch, length, vocabulary);
    for (std::size_t i = 0; i < out.mask.size(); ++i)
      out.mask[i] = i % 5 != 2 && i % static_cast<std::size_t>(length) > 2 ? 1 : 0;
    // Values of hundreds beside values of 1e-8: what is added to what shows in the sum.
    for (std::int64_t row = 0; row < batch * length; ++row)
      for (std::int64_t id = 0; id < vocabulary; ++id) {
        float const close = static_cast<float>(std::pow(10.0, -(row % 6))) * out.problem.t(row, id);
        out.problem.t(row, id) =
            row % 2 ? 100 * out.problem.t(row, id) : out.problem.s(row, id) + close;
      }
    out.problem.options = c.options;
    out.problem.student_type = c.student;
    out.problem.teacher_type = c.teacher;
    out.normalization.loss_scale = 3;
    out.normalization.gradient_accumulation_steps = 7;
    return out;
  }

  Setup setup_of(Case const& c, std::int64_t vocabulary) const {
    Setup setup;
    setup.route = c.route;
    // One shard of several blocks, the others small.
    std::int64_t const ranks = this->comm.size();
    for (std::int64_t r = 0; r < ranks; ++r)
      setup.bounds.push_back(r == 0 ? 0 : vocabulary - 31 * (ranks - r));
    setup.bounds.push_back(vocabulary);
    return setup;
  }
};

TYPED_TEST_SUITE(StreamedLossBits, ExecutionSpaces, SpaceNames);

TYPED_TEST(StreamedLossBits, every_plan_width_and_cache) {
  for (Case const& c : cases)
    for (std::int64_t batch : {1, 2}) {
      // Rows of several blocks are split over threads where they are few.
      std::int64_t const length = 8, vocabulary = batch == 1 ? 2300 : 95;
      MicroBatch const given = this->batch_of(c, batch, length, vocabulary);
      Setup setup = this->setup_of(c, vocabulary);
      setup.plan = PlanKind::chunks;
      setup.chunk_width = length;
      setup.skip = false;
      Streamed const base = run_streamed(this->exec, this->comm, given, setup);
      expect_right(this->comm, given, base, setup.describe());
      for (PlanKind plan : {PlanKind::rows, PlanKind::chunks})
        for (std::int64_t width = 1; width <= length; ++width)
          for (bool skip : {true, false}) {
            if (plan == PlanKind::rows && !skip) continue;
            setup.plan = plan;
            setup.chunk_width = width;
            setup.skip = skip;
            setup.cache = width % 2 ? CacheMode::response : CacheMode::all;
            expect_same_bits(base, run_streamed(this->exec, this->comm, given, setup),
                             describe(given.problem) + " " + setup.describe());
          }
    }
}

TYPED_TEST(StreamedLossBits, every_layout) {
  for (Case const& c : cases) {
    MicroBatch const given = this->batch_of(c, 2, 6, 95);
    Setup const plain = this->setup_of(c, 95);
    Streamed const base = run_streamed(this->exec, this->comm, given, plain);
    for (PlanKind plan : {PlanKind::rows, PlanKind::chunks})
      for (bool in_place : {false, true})
        for (int layout = 0; layout < 5; ++layout) {
          Setup setup = this->setup_of(c, 95);
          setup.plan = plan;
          setup.chunk_width = 4;
          setup.in_place = in_place;
          setup.student_gap = layout == 1 ? 5 : 0;
          setup.gradient_gap = layout == 1 ? 2 : 0;
          setup.student_batch_gap = layout == 2 ? 1 : 0;
          setup.gradient_batch_gap = layout == 2 ? 3 : 0;
          setup.mask_gap = layout == 3 ? 4 : 0;
          setup.flat = layout == 4;
          expect_same_bits(base, run_streamed(this->exec, this->comm, given, setup),
                           describe(given.problem) + " " + setup.describe());
        }
  }
}

TYPED_TEST(StreamedLossBits, gradient_of_the_counted_rows_alone) {
  for (Case const& c : cases)
    for (std::int64_t width : {1, 3, 6}) {
      MicroBatch const given = this->batch_of(c, 2, 6, 95);
      Setup setup = this->setup_of(c, 95);
      setup.chunk_width = width;
      setup.student_padding = 3;
      Streamed const base = run_streamed(this->exec, this->comm, given, setup);
      setup.packed = true;
      for (std::int64_t gap : {0, 5}) {
        setup.gradient_gap = gap;
        Streamed const packed = run_streamed(this->exec, this->comm, given, setup);
        expect_right(this->comm, given, packed, setup.describe());
        expect_same_bits(base, packed, setup.describe());
      }
    }
}

// The gradient does not show whether the teacher's statistics were known; values are other sums.
TYPED_TEST(StreamedLossBits, statistics_of_the_teacher) {
  for (Case const& c : cases)
    for (std::optional<ElementType> const store_type :
         {std::optional<ElementType>(), std::optional<ElementType>(ElementType::bf16)}) {
      std::int64_t const length = 6, vocabulary = 2300;
      MicroBatch given = this->batch_of(c, 2, length, vocabulary);
      Setup setup = this->setup_of(c, vocabulary);
      setup.store_type = store_type;
      setup.teacher_padding = 2;
      Streamed const without = run_streamed(this->exec, this->comm, given, setup);
      setup.statistics = true;
      Streamed const base = run_streamed(this->exec, this->comm, given, setup);
      given.problem.round();
      if (store_type) given.problem.teacher_type = *store_type;
      expect_right(this->comm, given, base, setup.describe());
      EXPECT_EQ(without.local, base.local) << setup.describe();
      for (PlanKind plan : {PlanKind::rows, PlanKind::chunks})
        for (std::int64_t width : {1, 2, 6})
          for (CacheMode mode : {CacheMode::all, CacheMode::response}) {
            setup.plan = plan;
            setup.chunk_width = width;
            setup.cache = mode;
            MicroBatch const again = this->batch_of(c, 2, length, vocabulary);
            expect_same_bits(base, run_streamed(this->exec, this->comm, again, setup),
                             setup.describe());
          }
    }
}

TYPED_TEST(StreamedLossBits, run_to_run) {
  for (Case const& c : cases) {
    MicroBatch const given = this->batch_of(c, 2, 6, 2300);
    Setup const setup = this->setup_of(c, 2300);
    Session<TypeParam> session(this->exec, this->comm, given, setup);
    session.store();
    Streamed const first = session.run();
    for (int i = 0; i < 5; ++i)
      expect_same_bits(first, session.run(), setup.describe());
    // The loss is the same with and without its gradient.
    Setup values_only = this->setup_of(c, 2300);
    values_only.values_only = true;
    Streamed values = run_streamed(this->exec, this->comm, given, values_only);
    values.local = first.local;
    expect_same_bits(first, values, values_only.describe());
  }
}

TYPED_TEST(StreamedLossBits, other_samples_of_the_micro_batch) {
  Case const& c = cases[5];
  MicroBatch const both = this->batch_of(c, 2, 6, 95);
  MicroBatch one(1, 6, 95, {both.mask.begin(), both.mask.begin() + 6});
  std::copy_n(both.problem.student.begin(), 6 * 95, one.problem.student.begin());
  std::copy_n(both.problem.teacher.begin(), 6 * 95, one.problem.teacher.begin());
  one.problem.options = both.problem.options;
  one.problem.student_type = both.problem.student_type;
  one.problem.teacher_type = both.problem.teacher_type;
  Streamed const b = run_streamed(this->exec, this->comm, both, this->setup_of(c, 95));
  Streamed const o = run_streamed(this->exec, this->comm, one, this->setup_of(c, 95));
  for (std::size_t row = 0; row < 6; ++row)
    EXPECT_EQ(b.rows.value[row], o.rows.value[row]);
}

}  // namespace
