// SPDX-License-Identifier: Apache-2.0
// The streamed loss on micro-batches with known right values, by every route and plan.
#include "session.hpp"

#include <vpkl/parallel/process_grid.hpp>

#include <fmt/format.h>

#include <cmath>
#include <limits>

using namespace vpkl;
using namespace vpkl::test;

namespace {

using Kind = Normalization::Kind;
using Mask = std::vector<std::uint8_t>;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
constexpr PlanKind plans[] = {PlanKind::rows, PlanKind::chunks};

std::vector<float> const f1_student{0, 0, 0, 0}, f1_teacher{2, 1, 0, -1};
std::vector<float> const f2_student{0, 1, 2, 3}, f2_teacher{2, 0, 0, 1};
std::vector<float> const f3_student{1, 2, 0}, f3_teacher{3, 1, 0};

template <class Exec>
class StreamedLossValues : public CollectiveTest<Exec> {
 protected:
  void set_row(MicroBatch& batch, std::int64_t row, std::vector<float> const& student,
               std::vector<float> const& teacher) const {
    std::copy(student.begin(), student.end(), &batch.problem.s(row, 0));
    std::copy(teacher.begin(), teacher.end(), &batch.problem.t(row, 0));
  }

  /// Every route, plan, chunk width and cache mode, with and without skipping.
  template <class Check>
  void everywhere(MicroBatch const& batch, Check&& check) const {
    for (Route route : routes)
      for (PlanKind plan : plans)
        for (std::int64_t width = 1; width <= batch.length; ++width)
          for (bool skip : {true, false})
            for (CacheMode mode : {CacheMode::all, CacheMode::response}) {
              if (plan == PlanKind::rows && !skip) continue;
              Setup setup;
              setup.route = route;
              setup.plan = plan;
              setup.chunk_width = width;
              setup.skip = skip;
              setup.cache = mode;
              setup.statistics = width % 2 == 0;
              SCOPED_TRACE(setup.describe());
              Streamed const streamed = run_streamed(this->exec, this->comm, batch, setup);
              check(streamed);
            }
  }
};

TYPED_TEST_SUITE(StreamedLossValues, ExecutionSpaces, SpaceNames);

// Case 2.
TYPED_TEST(StreamedLossValues, rows_that_do_not_count_may_hold_anything) {
  MicroBatch batch(1, 3, 3, {0, 1, 0});
  this->set_row(batch, 0, f3_student, f3_teacher);
  this->set_row(batch, 1, {-inf, -inf, -inf}, {-inf, -inf, -inf});
  this->set_row(batch, 2, {nan_value, nan_value, nan_value}, {nan_value, nan_value, nan_value});
  this->everywhere(batch, [&](Streamed const& s) {
    EXPECT_NEAR(s.result.loss, 0.811154214466, 1e-6);
    for (std::size_t i = 3; i < 9; ++i)
      EXPECT_EQ(s.rows.gradient[i], 0.0f);
    expect_right(this->comm, batch, s, "case 2");
  });
}

// Case 9 and the plainest gradient.
TYPED_TEST(StreamedLossValues, direction) {
  struct Known {
    Divergence divergence;
    double loss;
    std::vector<double> gradient;
  };
  for (Known const& known :
       {Known{Divergence::forward_kl,
              0.438757397144,
              {-0.39391426, 0.01311718, 0.16285568, 0.21794140}},
        Known{Divergence::reverse_kl, 0.553895337441, {-0.375, -0.125, 0.125, 0.375}},
        Known{
            Divergence::jsd, 0.113339721095, {-0.08550563, -0.00955733, 0.03638171, 0.05868124}}}) {
    MicroBatch batch(1, 2, 4, {0, 1});
    this->set_row(batch, 0, f1_student, f1_teacher);
    batch.problem.options.divergence = known.divergence;
    this->everywhere(batch, [&](Streamed const& s) {
      EXPECT_NEAR(s.result.loss, known.loss, 1e-6);
      for (std::size_t i = 0; i < 4; ++i)
        EXPECT_NEAR(s.rows.gradient[i], known.gradient[i], 1e-6);
    });
  }
}

// Case 10.
TYPED_TEST(StreamedLossValues, temperature) {
  MicroBatch batch(1, 2, 4, {0, 1});
  this->set_row(batch, 0, f1_student, f1_teacher);
  batch.problem.options.temperature = 2;
  EXPECT_NEAR(run_streamed(this->exec, this->comm, batch, {}).result.loss, 0.564975734610, 1e-6);
  batch.problem.options.divergence = Divergence::reverse_kl;
  EXPECT_NEAR(run_streamed(this->exec, this->comm, batch, {}).result.loss, 0.604177242314, 1e-6);

  this->set_row(batch, 0, f2_student, f2_student);
  for (Divergence divergence : divergences)
    for (double temperature : {0.05, 0.7, 1.0, 2.0, 100.0})
      for (Route route : routes) {
        batch.problem.options = {divergence, 0.3, temperature};
        Setup setup;
        setup.route = route;
        Streamed const s = run_streamed(this->exec, this->comm, batch, setup);
        EXPECT_EQ(s.result.loss, 0) << describe(batch.problem) << setup.describe();
        for (float g : s.rows.gradient)
          EXPECT_EQ(g, 0.0f) << describe(batch.problem) << setup.describe();
      }
}

// Case 11: rows full of NaN show that nothing is read; a gradient full of NaN that it is written.
TYPED_TEST(StreamedLossValues, no_token) {
  for (std::int64_t length : {0, 1, 4}) {
    MicroBatch batch(2, length, 5, Mask(static_cast<std::size_t>(2 * length), 0));
    if (length == 1) batch.mask = {1, 1};
    std::fill(batch.problem.student.begin(), batch.problem.student.end(), nan_value);
    std::fill(batch.problem.teacher.begin(), batch.problem.teacher.end(), nan_value);
    batch.normalization.loss_scale = 1024;
    this->everywhere(batch, [&](Streamed const& s) {
      EXPECT_EQ(s.result.loss, 0);
      EXPECT_FALSE(std::signbit(s.result.loss));
      EXPECT_EQ(s.result.tokens, 0);
      for (float g : s.rows.gradient)
        EXPECT_EQ(g, 0.0f);
      EXPECT_EQ(s.cache.fetched_rows, s.result.chunks == 0 ? 0 : s.cache.fetched_rows);
      EXPECT_EQ(s.cache.fetches, s.result.chunks);
    });
    Setup setup;
    for (PlanKind plan : plans) {
      setup.plan = plan;
      Streamed const s = run_streamed(this->exec, this->comm, batch, setup);
      EXPECT_EQ(s.cache.fetches, 0);
      EXPECT_EQ(s.rows.plan.calls, 0);
    }
  }
}

// Case 12: tokens of micro-batches of different size weigh the same only under a global divisor.
TYPED_TEST(StreamedLossValues, two_micro_batches) {
  MicroBatch a(1, 2, 4, {0, 1}), b(1, 4, 4, {0, 1, 1, 1});
  this->set_row(a, 0, f1_student, f1_teacher);
  for (std::int64_t row = 0; row < 4; ++row)
    this->set_row(b, row, f2_student, f2_teacher);
  for (PlanKind plan : plans) {
    Setup setup;
    setup.plan = plan;
    setup.chunk_width = 2;
    for (MicroBatch* m : {&a, &b}) {
      m->normalization.kind = Kind::global_divisor;
      m->normalization.divisor = 4;
      m->normalization.gradient_accumulation_steps = 2;
    }
    Streamed ga = run_streamed(this->exec, this->comm, a, setup);
    Streamed gb = run_streamed(this->exec, this->comm, b, setup);
    EXPECT_NEAR(ga.result.loss + gb.result.loss, 1.212305802230, 1e-6);
    expect_right(this->comm, a, ga, "A, global divisor");
    expect_right(this->comm, b, gb, "B, global divisor");

    for (MicroBatch* m : {&a, &b})
      m->normalization.kind = Kind::token_mean;
    ga = run_streamed(this->exec, this->comm, a, setup);
    gb = run_streamed(this->exec, this->comm, b, setup);
    EXPECT_NEAR((ga.result.loss + gb.result.loss) / 2, 0.954456333866, 1e-6);
    expect_right(this->comm, a, ga, "A, token mean");
    expect_right(this->comm, b, gb, "B, token mean");
  }
}

// Case 13: the last row has no token to predict.
TYPED_TEST(StreamedLossValues, causal_shift) {
  MicroBatch batch(1, 3, 2, {0, 1, 1});
  this->set_row(batch, 0, {0, 0}, {1, 0});
  this->set_row(batch, 1, {0, 0}, {0, 1});
  this->set_row(batch, 2, {0, 0}, {9, -9});
  this->everywhere(batch, [&](Streamed const& s) {
    EXPECT_NEAR(s.result.loss, 0.110944071672, 1e-6);
    expect_right(this->comm, batch, s, "case 13");
  });
}

// Case 36.
TYPED_TEST(StreamedLossValues, mask_with_a_hole) {
  MicroBatch batch(1, 4, 2, {0, 1, 0, 1});
  this->set_row(batch, 0, {0, 0}, {1, 0});
  this->set_row(batch, 1, {0, 0}, {9, -9});
  this->set_row(batch, 2, {0, 0}, {0, 1});
  this->everywhere(batch, [&](Streamed const& s) {
    EXPECT_NEAR(s.result.loss, 0.110944071672, 1e-6);
    EXPECT_EQ(s.result.tokens, 2);
    expect_right(this->comm, batch, s, "case 36");
  });
}

// Case 37.
TYPED_TEST(StreamedLossValues, two_samples_with_different_starts) {
  MicroBatch batch(2, 6, 2, {0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1});
  for (std::int64_t row = 0; row < 12; ++row)
    this->set_row(batch, row, {0, 0}, {static_cast<float>(row) / 10, 0});
  this->everywhere(batch, [&](Streamed const& s) {
    EXPECT_NEAR(s.result.loss, 0.0399578605128, 1e-7);
    EXPECT_EQ(s.result.tokens, 6);
    expect_right(this->comm, batch, s, "case 37");
  });
}

// Case 38: a replica without samples, and every rank without columns in turn.
TYPED_TEST(StreamedLossValues, parts_of_no_size) {
  Random random(7);
  MicroBatch const none(0, 6, 5, {});
  for (Route route : routes)
    for (PlanKind plan : plans)
      for (bool skip : {true, false}) {
        Setup setup;
        setup.route = route;
        setup.plan = plan;
        setup.skip = skip;
        Streamed const s = run_streamed(this->exec, this->comm, none, setup);
        EXPECT_EQ(s.result.loss, 0);
        EXPECT_EQ(s.result.tokens, 0);
        EXPECT_TRUE(s.rows.value.empty());
      }
  MicroBatch const batch = random_batch(random, 2, 5, 7);
  for (auto const& bounds : interesting_bounds(7, this->comm.size()))
    for (Route route : routes)
      for (std::int64_t padding : {0, 3}) {
        Setup setup;
        setup.route = route;
        setup.bounds = std::vector<std::int64_t>(bounds);
        setup.student_padding = padding;
        setup.teacher_padding = 2 * padding;
        expect_right(this->comm, batch, run_streamed(this->exec, this->comm, batch, setup),
                     setup.describe());
      }
}

// A rank without columns may pass null pointers; only the others' gradients are asked for.
TYPED_TEST(StreamedLossValues, null_pointers_where_nothing_is) {
  Random random(8);
  MicroBatch const batch = random_batch(random, 2, 5, 7);
  for (auto const& bounds : interesting_bounds(7, this->comm.size()))
    for (PlanKind plan : plans)
      for (bool ask : {true, false}) {
        Setup setup;
        setup.bounds = std::vector<std::int64_t>(bounds);
        setup.plan = plan;
        setup.values_only = !ask;
        Session<TypeParam> session(this->exec, this->comm, batch, setup);
        if (session.shard.width() == 0) session.student.data = session.gradient.data = nullptr;
        session.store();
        expect_right(this->comm, batch, session.run(), setup.describe(), ask);
      }
}

TYPED_TEST(StreamedLossValues, routes_agree) {
  FloatingPointTraps const traps;
  Random random(9);
  MicroBatch batch = random_batch(random, 3, 7, 301);
  batch.mask.assign(21, 1);
  for (Divergence divergence : divergences)
    for (double temperature : {0.5, 1.0, 3.0})
      for (double beta : {0.5, 0.1}) {
        if (divergence != Divergence::jsd && beta != 0.5) continue;
        batch.problem.options = {divergence, beta, temperature};
        batch.normalization.gradient_accumulation_steps = 3;
        batch.normalization.loss_scale = 64;
        std::vector<Streamed> all;
        for (Route route : routes) {
          Setup setup;
          setup.route = route;
          setup.chunk_width = 3;
          all.push_back(run_streamed(this->exec, this->comm, batch, setup));
          expect_right(this->comm, batch, all.back(), setup.describe());
        }
        for (std::size_t i = 1; i < all.size(); ++i) {
          EXPECT_NEAR(all[i].result.loss, all[0].result.loss, 1e-6 * all[0].result.loss);
          double error = 0, norm = 0;
          for (std::size_t k = 0; k < all[0].rows.gradient.size(); ++k) {
            error += std::pow(all[i].rows.gradient[k] - all[0].rows.gradient[k], 2);
            norm += std::pow(all[0].rows.gradient[k], 2);
          }
          EXPECT_LE(std::sqrt(error / norm), 2e-6) << describe(batch.problem);
        }
      }
}

// One bad row shows in the loss and in its own gradient alone.
TYPED_TEST(StreamedLossValues, rows_without_a_finite_value) {
  MicroBatch batch(1, 4, 4, {0, 1, 1, 0});
  this->set_row(batch, 0, f1_student, f1_teacher);
  this->set_row(batch, 1, {0, -inf, 0, 0}, f1_teacher);
  this->everywhere(batch, [&](Streamed const& s) {
    EXPECT_EQ(s.result.loss, inf);
    expect_right(this->comm, batch, s, "no support in the student");
  });
  for (std::int64_t id = 0; id < 4; ++id) {
    this->set_row(batch, 1, f2_student, f2_teacher);
    batch.problem.s(1, id) = nan_value;
    for (Route route : routes) {
      Setup setup;
      setup.route = route;
      for (bool statistics : {false, true}) {
        setup.statistics = statistics;
        Streamed const s = run_streamed(this->exec, this->comm, batch, setup);
        EXPECT_TRUE(std::isnan(s.result.loss));
        expect_right(this->comm, batch, s, "NaN");
      }
    }
  }
}

// Views as users have them, and case F3 by the three calls of the README.
TYPED_TEST(StreamedLossValues, views) {
  using View = Kokkos::View<float***, Kokkos::LayoutRight, typename TypeParam::memory_space>;
  VocabShard::Spec spec;
  spec.vocabulary = 3;
  std::tie(spec.begin, spec.end) = even_range(3, this->comm.size(), this->comm.rank());
  spec.student_width = spec.teacher_width = spec.end - spec.begin;
  VocabShard const shard = VocabShard::make(this->comm, spec);
  View const student("student", 1, 2, spec.student_width);
  View const teacher("teacher", 1, 2, spec.student_width);
  View const gradient("gradient", 1, 2, spec.student_width);
  auto const s = Kokkos::create_mirror_view(student), t = Kokkos::create_mirror_view(teacher);
  for (std::int64_t c = 0; c < spec.student_width; ++c) {
    s(0, 0, c) = f3_student[spec.begin + c];
    t(0, 0, c) = f3_teacher[spec.begin + c];
  }
  Kokkos::deep_copy(student, s);
  Kokkos::deep_copy(teacher, t);
  Mask const mask{0, 1};

  TeacherCache<TypeParam> cache(this->comm, {});
  StreamedLoss<TypeParam> loss(this->comm, shard, {});
  cache.store(this->exec, const_rows(teacher), 1, 2);
  LossResult const result =
      loss.compute(this->exec, const_rows(student), cache, {mask.data(), 1, 2}, {}, rows(gradient));
  EXPECT_NEAR(result.loss, 0.811154214466, 1e-6);
}

// Case 18: only what is kept a row grows with T. The student's rows that do not count are never
// touched, so that their memory is never taken.
TYPED_TEST(StreamedLossValues, memory_does_not_grow_with_length) {
  std::int64_t const vocabulary = 4096 * this->comm.size(), width = 4096;
  VocabShard::Spec spec;
  spec.vocabulary = vocabulary;
  spec.begin = width * this->comm.rank();
  spec.end = spec.begin + width;
  spec.student_width = spec.teacher_width = width;
  VocabShard const shard = VocabShard::make(this->comm, spec);
  for (PlanKind plan : plans) {
    std::size_t bytes[2] = {};
    int i = 0;
    for (std::int64_t length : {1024, 8192}) {
      typename StreamedLoss<TypeParam>::Options options;
      options.plan = plan;
      StreamedLoss<TypeParam> loss(this->comm, shard, options);
      typename TeacherCache<TypeParam>::Options cached;
      cached.mode = CacheMode::response;
      TeacherCache<TypeParam> cache(this->comm, cached);
      Kokkos::View<float**, Kokkos::LayoutRight, typename TypeParam::memory_space> const logits(
          Kokkos::view_alloc("logits", Kokkos::WithoutInitializing), length, width);
      // 300 tokens of response at the end: two chunks of 256 positions or rows.
      Mask mask(static_cast<std::size_t>(length), 0);
      std::vector<std::int64_t> kept;
      for (std::int64_t t = length - 300; t < length; ++t) {
        mask[t] = 1;
        kept.push_back(t - 1);
      }
      Kokkos::deep_copy(Kokkos::subview(logits, std::make_pair(length - 301, length), Kokkos::ALL),
                        0.5f);
      cache.store(this->exec, const_rows(logits), 1, length, kept);
      LossResult const result =
          loss.compute(this->exec, const_rows(logits), cache, {mask.data(), 1, length}, {}, Rows{});
      EXPECT_EQ(result.loss, 0);
      EXPECT_EQ(result.tokens, 300);
      EXPECT_EQ(result.chunks, 2);
      bytes[i++] = loss.workspace_bytes();
    }
    EXPECT_GE(bytes[0], 256u * width * sizeof(float));
    EXPECT_LE(bytes[1], 1.05 * bytes[0]) << to_string(plan);
  }
}

// Data parallelism: replicas differ in samples, the last has none.
TYPED_TEST(StreamedLossValues, grids) {
  int const ranks = this->comm.size();
  for (int tensor = 1; tensor <= ranks; ++tensor) {
    if (ranks % tensor != 0) continue;
    int const replicas = ranks / tensor;
    SCOPED_TRACE(fmt::format("{} x {}", tensor, replicas));
    ProcessGrid const grid(this->comm, tensor, replicas);
    CommunicationCounters const world_before = grid.world().counters();
    auto batch_of = [&](int replica, Kind kind) {
      Random random(100 + static_cast<std::uint64_t>(replica));
      bool const none = replicas > 1 && replica == replicas - 1;
      MicroBatch batch = random_batch(random, none ? 0 : 1 + replica, 5 + replica, 23);
      for (std::size_t i = 0; i < batch.mask.size(); ++i)
        batch.mask[i] = i % 3 != 0;
      batch.normalization.kind = kind;
      batch.normalization.divisor = 40;
      return batch;
    };
    for (Kind kind : {Kind::token_mean, Kind::global_divisor}) {
      MicroBatch const batch = batch_of(grid.data_parallel_index(), kind);
      Setup setup;
      setup.chunk_width = 2;
      Streamed const s = run_streamed(this->exec, grid.tensor_parallel(), batch, setup);
      expect_right(grid.tensor_parallel(), batch, s, "replica");
      if (batch.batch == 0) {
        EXPECT_EQ(s.result.loss, 0);
      }

      // The loss over all replicas: a mean, empty ones counting as zero, or a sum.
      float total = static_cast<float>(s.result.loss);
      Kokkos::View<float*, typename TypeParam::memory_space> const device("total", 1);
      Kokkos::deep_copy(device, total);
      grid.data_parallel().all_reduce_sum(this->exec, device.data(), 1);
      Kokkos::deep_copy(Kokkos::View<float*, Kokkos::HostSpace, Kokkos::MemoryUnmanaged>(&total, 1),
                        device);
      double expected = 0;
      for (int replica = 0; replica < replicas; ++replica) {
        MicroBatch const other = batch_of(replica, kind);
        for (std::int64_t row = 0; row < other.batch * other.length; ++row)
          expected += static_cast<double>(other.loss_factor() *
                                          oracle(other.problem.student_row(row),
                                                 other.problem.teacher_row(row), other.counts(row),
                                                 oracle_options(other.problem.options))
                                              .value);
      }
      EXPECT_NEAR(total, expected, 1e-6 * expected);
    }
    CommunicationCounters const world_after = grid.world().counters();
    EXPECT_EQ(world_after.records, world_before.records);
    EXPECT_EQ(world_after.all_gathers, world_before.all_gathers);
    if (tensor == 1) {
      EXPECT_STREQ(grid.tensor_parallel().transport_name(), "self");
      EXPECT_EQ(grid.data_parallel().counters().records, 0);
      EXPECT_EQ(grid.data_parallel().counters().all_gathers, 0);
    }
  }
}

}  // namespace
