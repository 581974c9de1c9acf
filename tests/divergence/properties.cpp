// SPDX-License-Identifier: Apache-2.0
// What holds for any logits: how special values spread, what is read and written, how far numbers
// may reach.
#include <support/harness.hpp>
#include <support/together.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include <sys/mman.h>
#include <unistd.h>

namespace {

using namespace vpkl;
using namespace vpkl::test;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

template <class Exec>
class DivergenceProperties : public CollectiveTest<Exec> {
 protected:
  /// On every route and divergence, the teacher's statistics known or not, against the oracle.
  void expect_right(Problem problem, Placement placement = {}) {
    for (Route route : routes)
      for (Divergence divergence : divergences) {
        problem.options.divergence = divergence;
        placement.route = route;
        for (bool known : {false, true}) {
          placement.known_teacher = known;
          expect_close(this->comm, problem, run(this->exec, this->comm, problem, placement),
                       placement.describe());
          if (divergence != Divergence::forward_kl || route == Route::gathered) break;
        }
      }
  }
};
TYPED_TEST_SUITE(DivergenceProperties, ExecutionSpaces, SpaceNames);

Problem random_problem(std::int64_t rows, std::int64_t vocabulary, std::uint64_t seed) {
  Random random(seed);
  Problem problem(rows, vocabulary);
  for (float& x : problem.student)
    x = static_cast<float>(3 * normal(random));
  for (float& x : problem.teacher)
    x = static_cast<float>(3 * normal(random));
  return problem;
}

// NaN or +inf in either model, in the shard of any rank: NaN everywhere in that row alone.
TYPED_TEST(DivergenceProperties, nan_and_infinity_reach_every_rank) {
  std::int64_t const vocabulary = 41;
  auto const bounds = even_bounds(vocabulary, this->comm.size());
  for (float value : {nan_value, -nan_value, inf})
    for (bool in_student : {true, false})
      for (int rank = 0; rank < this->comm.size(); ++rank) {
        Problem problem = random_problem(3, vocabulary, 1);
        (in_student ? problem.s(1, bounds[rank]) : problem.t(1, bounds[rank])) = value;
        this->expect_right(problem);
        Outcome const got = run(this->exec, this->comm, problem);
        EXPECT_TRUE(std::isnan(got.value[1]));
        for (std::int64_t c = 0; c < vocabulary; ++c)
          EXPECT_TRUE(std::isnan(got.gradient[vocabulary + c]));
        EXPECT_TRUE(std::isfinite(got.value[0]) && std::isfinite(got.value[2]));
      }
}

// A NaN wins over a missing support, whatever rank sees which.
TYPED_TEST(DivergenceProperties, nan_wins_over_infinite_values) {
  Problem problem = random_problem(1, 16, 2);
  problem.s(0, 0) = -inf;
  problem.t(0, 1) = -inf;
  problem.s(0, 15) = nan_value;
  this->expect_right(problem);
}

// Whole blocks and whole shards of -inf, in both models or in one.
TYPED_TEST(DivergenceProperties, masked_blocks_and_shards) {
  FloatingPointTraps const traps;
  int const ranks = this->comm.size();
  std::int64_t const part = 2048, vocabulary = part * 4;
  for (int masked = 0; masked < 4; ++masked)
    for (int models : {1, 2, 3}) {
      Problem problem = random_problem(2, vocabulary, 3);
      for (std::int64_t c = masked * part; c < (masked + 1) * part; ++c) {
        if (models & 1) problem.s(1, c) = -inf;
        if (models & 2) problem.t(1, c) = -inf;
      }
      Placement placement;
      placement.bounds = even_bounds(vocabulary, ranks);
      for (int r = 1; r < ranks; ++r)
        placement.bounds[r] = r * part;
      this->expect_right(problem, placement);
    }
}

TYPED_TEST(DivergenceProperties, rows_without_support) {
  FloatingPointTraps const traps;
  for (int models : {1, 2, 3}) {
    Problem problem = random_problem(3, 100, 4);
    for (std::int64_t c = 0; c < 100; ++c) {
      if (models & 1) problem.s(1, c) = -inf;
      if (models & 2) problem.t(1, c) = -inf;
    }
    this->expect_right(problem);
    Outcome const got = run(this->exec, this->comm, problem);
    EXPECT_TRUE(std::isnan(got.value[1]));
    for (std::int64_t c = 0; c < 100; ++c)
      EXPECT_EQ(got.gradient[100 + c], 0.0f);
  }
}

// Support is decided by the logit: a probability that underflows is no missing support.
TYPED_TEST(DivergenceProperties, underflow_is_not_missing_support) {
  FloatingPointTraps const traps;
  Problem problem({0, -1000, -3e38f}, {-2000, 0, 5});
  this->expect_right(problem);
  problem = Problem({0, -inf}, {0, -1000});
  EXPECT_EQ(run(this->exec, this->comm, problem).value[0], inf);
}

// A common offset changes nothing, not even a bit, as long as the logits hold it exactly.
TYPED_TEST(DivergenceProperties, offsets) {
  FloatingPointTraps const traps;
  Random random(5);
  Problem base(2, 3000);
  for (float& x : base.student)
    x = static_cast<float>(8 * uniform(random, 0, 7));
  for (float& x : base.teacher)
    x = static_cast<float>(8 * uniform(random, 0, 7));
  base.options.temperature = 16;
  for (Divergence divergence : divergences) {
    base.options.divergence = divergence;
    Outcome const want = run(this->exec, this->comm, base);
    expect_close(this->comm, base, want, "no offset");
    for (auto const& [student_offset, teacher_offset] :
         {std::pair(1e8f, 1e8f), std::pair(-1e8f, -1e8f), std::pair(1e8f, 0.0f),
          std::pair(-1e8f, 1e8f), std::pair(8192.0f, -1e7f)}) {
      Problem moved = base;
      for (float& x : moved.student)
        x += student_offset;
      for (float& x : moved.teacher)
        x += teacher_offset;
      Outcome const got = run(this->exec, this->comm, moved);
      EXPECT_EQ(got.value, want.value) << student_offset << " " << teacher_offset;
      EXPECT_EQ(got.bits, want.bits) << student_offset << " " << teacher_offset;
    }
  }
}

// Differences beyond the largest float.
TYPED_TEST(DivergenceProperties, largest_logits) {
  FloatingPointTraps const traps;
  float const large = 3e38f;
  Problem problem({large, -large}, {large, -large});
  for (Divergence divergence : divergences) {
    problem.options.divergence = divergence;
    Outcome const got = run(this->exec, this->comm, problem);
    EXPECT_EQ(got.value[0], 0.0f);
    EXPECT_EQ(got.gradient, (std::vector<float>{0, 0}));
  }
  problem = Problem({0, 0}, {large, -large});
  this->expect_right(problem);
  problem.options.divergence = Divergence::reverse_kl;
  Outcome const got = run(this->exec, this->comm, problem);
  EXPECT_NEAR(got.value[0] / 3e38f, 1, 1e-6);
  EXPECT_NEAR(got.gradient[0] / -1.5e38f, 1, 1e-6);
  EXPECT_NEAR(got.gradient[1] / 1.5e38f, 1, 1e-6);
  Random random(6);
  for (double temperature : {2e-19, 1.0, 1e18}) {
    Problem spread(3, 2500);
    for (float& x : spread.student)
      x = static_cast<float>(uniform_real(random, -3.4e38, 3.4e38));
    for (float& x : spread.teacher)
      x = static_cast<float>(uniform_real(random, -3.4e38, 3.4e38));
    spread.options.temperature = temperature;
    this->expect_right(spread);
  }
  // Every column weighs the same, and brings a difference near the largest there is.
  for (std::int64_t width : {2, 1000, 1024, 2500, 9000})
    for (float farthest : {-3.4e38f, 3.4e38f})
      for (Divergence divergence : {Divergence::forward_kl, Divergence::reverse_kl}) {
        Problem even(2, width);
        even.options.divergence = divergence;
        bool const forward = divergence == Divergence::forward_kl;
        std::vector<float>& other = forward ? even.student : even.teacher;
        for (std::int64_t c = 0; c < width; ++c) {
          other[static_cast<std::size_t>(c)] = c == width / 3 ? -farthest : farthest;
          other[static_cast<std::size_t>(width + c)] =
              static_cast<float>(uniform_real(random, -3.4e38, 3.4e38));
        }
        this->expect_right(even);
      }
}

TYPED_TEST(DivergenceProperties, strongly_negative) {
  FloatingPointTraps const traps;
  Problem problem = random_problem(2, 500, 7);
  for (float& x : problem.student)
    x -= 30000;
  for (float& x : problem.teacher)
    x -= 50000;
  this->expect_right(problem);
}

// The teacher's only support outside the student's lies as far below the largest logit as it can.
TYPED_TEST(DivergenceProperties, support_at_the_far_end) {
  for (std::int64_t vocabulary : {3, 3000}) {
    Problem problem = random_problem(1, vocabulary, 5);
    problem.t(0, 0) = std::numeric_limits<float>::max();
    problem.t(0, vocabulary - 1) = std::numeric_limits<float>::lowest();
    problem.s(0, vocabulary - 1) = -inf;
    this->expect_right(problem);
  }
}

// 16-bit gradients beyond the type's range are infinite, with the sign they have.
TYPED_TEST(DivergenceProperties, overflow_is_infinite) {
  Problem problem({0, 0, 0, 0}, {2, 1, 0, -1});
  problem.weight = {1e6f};
  problem.student_type = ElementType::fp16;
  this->expect_right(problem);
  Outcome const got = run(this->exec, this->comm, problem);
  EXPECT_EQ(got.gradient[0], -inf);
  EXPECT_EQ(got.gradient[3], inf);
  EXPECT_TRUE(std::isfinite(got.gradient[1]));
  problem.student_type = ElementType::fp32;
  problem.weight = {3e38f};
  problem.teacher = {-20, 20, 0, 0};
  this->expect_right(problem);
}

TYPED_TEST(DivergenceProperties, subnormal_gradients_are_kept) {
  FloatingPointTraps const traps;
  for (ElementType type : element_types) {
    Problem problem = random_problem(1, 64, 8);
    problem.student_type = type;
    problem.round();
    problem.weight = {type == ElementType::fp16 ? 1e-5f : 1e-37f};
    this->expect_right(problem);
    Outcome const got = run(this->exec, this->comm, problem);
    EXPECT_TRUE(std::any_of(got.gradient.begin(), got.gradient.end(),
                            [](float g) { return g != 0 && std::fabs(g) < 1e-4f; }));
  }
}

// Where one id, or some equal ones, have all the probability that counts, the gradient consists of
// what the others have, however little that is.
TYPED_TEST(DivergenceProperties, gradients_of_tiny_probabilities) {
  FloatingPointTraps const traps;
  for (std::int64_t width : {4, 1024, 3000})
    for (int largest : {1, 2})
      for (float next : {-40.0f, -88.0f})
        for (Divergence divergence : {Divergence::reverse_kl, Divergence::jsd}) {
          Problem problem(1, width);
          problem.options.divergence = divergence;
          std::fill(problem.student.begin(), problem.student.end(), -200.0f);
          for (int i = 0; i < largest; ++i)
            problem.student[static_cast<std::size_t>(i)] = 0;
          std::size_t const last = static_cast<std::size_t>(width - 1);
          problem.student[last] = next;
          problem.teacher = problem.student;
          problem.teacher[last] += 1;
          Outcome const got = run(this->exec, this->comm, problem);
          expect_close(this->comm, problem, got, "tiny");
          double const want =
              static_cast<double>(oracle(problem.student_row(0), problem.teacher_row(0), 1,
                                         oracle_options(problem.options))
                                      .gradient[last]);
          EXPECT_NEAR(got.gradient[last] / want, 1, 1e-5)
              << got.gradient[last] << ", expected " << want;
        }
}

// The gradient is linear in the weight: exactly so for powers of two and for the sign.
TYPED_TEST(DivergenceProperties, weights_scale_the_gradient) {
  for (Divergence divergence : divergences) {
    Problem problem = random_problem(1, 300, 9);
    problem.options.divergence = divergence;
    Outcome const one = run(this->exec, this->comm, problem);
    for (float weight : {-1.0f, 2.0f, -1024.0f, 0.125f, 1048576.0f}) {
      problem.weight = {weight};
      Outcome const got = run(this->exec, this->comm, problem);
      EXPECT_EQ(got.value, one.value);
      for (std::size_t c = 0; c < one.gradient.size(); ++c)
        ASSERT_EQ(got.gradient[c], weight * one.gradient[c]);
    }
  }
}

/// Rows on pages of their own; those of weight 0 cannot be read.
class ProtectedRows {
 public:
  ProtectedRows(std::vector<std::vector<float>> const& rows, std::vector<float> const& weight)
      : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
    pitch_ = (rows[0].size() * sizeof(float) + page_) / page_ * page_;
    bytes_ = pitch_ * rows.size();
    void* const p =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<unsigned char*>(p);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      if (!rows[r].empty())
        std::memcpy(data_ + r * pitch_, rows[r].data(), rows[r].size() * sizeof(float));
      if (weight[r] == 0) mprotect(data_ + r * pitch_, pitch_, PROT_NONE);
    }
  }
  ~ProtectedRows() { munmap(data_, bytes_); }
  ProtectedRows(ProtectedRows const&) = delete;
  ProtectedRows& operator=(ProtectedRows const&) = delete;

  ConstRows rows(std::int64_t first, std::int64_t last, std::int64_t width) const {
    return {data_ + static_cast<std::size_t>(first) * pitch_, ElementType::fp32, width,
            RowIndex::strided(last - first, static_cast<std::int64_t>(pitch_ / sizeof(float)))};
  }

 private:
  std::size_t page_, pitch_, bytes_;
  unsigned char* data_;
};

TYPED_TEST(DivergenceProperties, rows_of_weight_zero_are_never_read) {
  if (!vpkl::impl::is_host_space<TypeParam>) GTEST_SKIP() << "host memory protection";
  std::int64_t const rows = 6, vocabulary = 5000;
  std::vector<float> const weight{1, 0, 2, 0, 0, 1};
  Problem problem = random_problem(rows, vocabulary, 10);
  problem.weight = weight;
  auto const bounds = even_bounds(vocabulary, this->comm.size());
  for (Route route : routes) {
    bool const dense = route == Route::dense, gathered = route == Route::gathered;
    std::int64_t const begin = dense ? 0 : bounds[this->comm.rank()];
    std::int64_t const end = dense ? vocabulary : bounds[this->comm.rank() + 1];
    auto const part = [&](std::vector<float> const& row, bool whole) {
      return whole ? row : std::vector<float>(row.begin() + begin, row.begin() + end);
    };
    std::vector<std::vector<float>> student, teacher;
    for (std::int64_t r = 0; r < rows; ++r) {
      student.push_back(part(problem.student_row(r), false));
      teacher.push_back(part(problem.teacher_row(r), gathered));
    }
    ProtectedRows const s(student, weight), t(teacher, weight);
    VocabShard::Spec spec;
    spec.vocabulary = vocabulary;
    spec.begin = begin;
    spec.end = end;
    spec.student_width = spec.teacher_width = end - begin;
    VocabShard const shard =
        dense ? VocabShard::whole(vocabulary) : VocabShard::make(this->comm, spec);
    for (Divergence divergence : divergences)
      for (std::int64_t per_call : {std::int64_t(1), rows}) {  // rows split over threads, or not
        typename DivergencePlan<TypeParam>::Options options;
        options.divergence.divergence = divergence;
        options.route = route;
        options.max_rows = per_call;
        DivergencePlan<TypeParam> plan(this->exec, this->comm, shard, options);
        std::vector<float> value(rows, nan_value), gradient((end - begin) * rows, nan_value);
        for (std::int64_t r = 0; r < rows; r += per_call)
          plan.execute(this->exec, s.rows(r, r + per_call, end - begin),
                       t.rows(r, r + per_call, gathered ? vocabulary : end - begin),
                       weight.data() + r, value.data() + r,
                       Rows{gradient.data() + r * (end - begin), ElementType::fp32, end - begin,
                            RowIndex::strided(per_call, end - begin)});
        for (std::int64_t r = 0; r < rows; ++r) {
          EXPECT_EQ(value[r] == 0, weight[r] == 0);
          EXPECT_EQ(gradient[r * (end - begin)] == 0, weight[r] == 0);
        }
      }
  }
}

// Rows are wherever their offsets say: scattered, in any order, the same one twice.
TYPED_TEST(DivergenceProperties, row_offsets) {
  std::int64_t const vocabulary = 200, rows = 5;
  Problem const problem = random_problem(rows, vocabulary, 11);
  Outcome const want = run(this->exec, this->comm, problem);
  auto const bounds = even_bounds(vocabulary, this->comm.size());
  std::int64_t const begin = bounds[this->comm.rank()];
  std::int64_t const width = bounds[this->comm.rank() + 1] - begin;
  std::int64_t const picks[] = {3, 0, 3, 4, 1, 1, 2};
  std::int64_t const calls = 7;
  std::vector<float> student(7000, nan_value), teacher = student;
  std::vector<std::int64_t> from, to;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < width; ++c) {
      student[1000 - 211 * r + c] = problem.student[r * vocabulary + begin + c];
      teacher[333 + 500 * r + c] = problem.teacher[r * vocabulary + begin + c];
    }
  std::vector<std::int64_t> student_offsets, teacher_offsets, gradient_offsets;
  for (std::int64_t i = 0; i < calls; ++i) {
    student_offsets.push_back(-211 * picks[i]);  // negative ones too
    teacher_offsets.push_back(333 + 500 * picks[i]);
    gradient_offsets.push_back((i * 3 % calls) * 900);
  }
  VocabShard::Spec spec;
  spec.vocabulary = vocabulary;
  spec.begin = begin;
  spec.end = begin + width;
  spec.student_width = spec.teacher_width = width;
  typename DivergencePlan<TypeParam>::Options options;
  options.max_rows = calls;
  DivergencePlan<TypeParam> plan(this->exec, this->comm, VocabShard::make(this->comm, spec),
                                 options);
  auto const index = [calls](DeviceArray<TypeParam, std::int64_t> const& offsets) {
    RowIndex out;
    out.count = calls;
    out.offsets = offsets.data();
    return out;
  };
  auto const s = to_device<TypeParam>(student), t = to_device<TypeParam>(teacher),
             g = to_device<TypeParam>(std::vector<float>(7000, nan_value));
  auto const s_offsets = to_device<TypeParam>(student_offsets),
             t_offsets = to_device<TypeParam>(teacher_offsets),
             g_offsets = to_device<TypeParam>(gradient_offsets);
  DeviceArray<TypeParam, float> const values("vpkl_test::values", calls);
  plan.execute(this->exec, ConstRows{s.data() + 1000, ElementType::fp32, width, index(s_offsets)},
               ConstRows{t.data(), ElementType::fp32, width, index(t_offsets)}, nullptr,
               values.data(), Rows{g.data(), ElementType::fp32, width, index(g_offsets)});
  vpkl::impl::fence(this->exec, "vpkl_test::row_offsets");
  auto const value = to_host(values), gradient = to_host(g);
  std::int64_t written = 0;
  for (std::int64_t i = 0; i < calls; ++i) {
    EXPECT_EQ(value[i], want.value[picks[i]]);
    for (std::int64_t c = 0; c < width; ++c)
      ASSERT_EQ(gradient[gradient_offsets[i] + c],
                want.gradient[picks[i] * vocabulary + begin + c]);
    written += width;
  }
  EXPECT_EQ(std::count_if(gradient.begin(), gradient.end(), [](float g) { return !std::isnan(g); }),
            written);
}

// No rows, an empty vocabulary part, no gradient wanted.
TYPED_TEST(DivergenceProperties, nothing_to_do) {
  for (Route route : routes) {
    Placement placement;
    placement.route = route;
    placement.spare_rows = 2;
    Problem empty(0, 10);
    run(this->exec, this->comm, empty, placement);
    Problem const one = random_problem(1, 1, 12);  // all but one rank hold no column
    Outcome const got = run(this->exec, this->comm, one, placement);
    EXPECT_EQ(got.value[0], 0.0f);
    EXPECT_EQ(got.gradient[0], 0.0f);
    Problem const some = random_problem(3, 77, 13);
    placement.values_only = true;
    Outcome const values = run(this->exec, this->comm, some, placement);
    placement.values_only = false;
    EXPECT_EQ(values.value, run(this->exec, this->comm, some, placement).value);
  }
}

// Case 35: a view with a row stride above its width works, a transposed one is refused.
TYPED_TEST(DivergenceProperties, views) {
  using Wide = Kokkos::View<float**, Kokkos::LayoutRight, typename TypeParam::memory_space>;
  Wide const memory("memory", 3, 9), teacher("teacher", 3, 4), gradient("gradient", 3, 4);
  DeviceArray<TypeParam, float> const values("value", 3);
  auto const s = Kokkos::create_mirror_view(memory);
  auto const t = Kokkos::create_mirror_view(teacher);
  Kokkos::deep_copy(s, nan_value);
  float const student_logits[] = {0, 1, 2, 3}, teacher_logits[] = {2, 0, 0, 1};
  for (int r = 0; r < 3; ++r)
    for (int c = 0; c < 4; ++c) {
      s(r, 2 + c) = student_logits[c];
      t(r, c) = teacher_logits[c];
    }
  Kokkos::deep_copy(memory, s);
  Kokkos::deep_copy(teacher, t);
  auto const student = Kokkos::subview(memory, Kokkos::ALL, std::make_pair(2, 6));
  typename DivergencePlan<TypeParam>::Options options;
  options.route = Route::dense;
  options.max_rows = 3;
  DivergencePlan<TypeParam> plan(this->exec, this->comm, VocabShard::whole(4), options);
  plan.execute(this->exec, const_rows(student), const_rows(teacher), nullptr, values.data(),
               rows(gradient));
  vpkl::impl::fence(this->exec, "vpkl_test::views");
  auto const value = to_host(values), g = to_host(gradient);
  for (int r = 0; r < 3; ++r) {
    EXPECT_NEAR(value[r], 1.470155270587, 1e-6);
    EXPECT_NEAR(g[4 * r], -0.578237, 1e-6);
  }
  Kokkos::View<float**, Kokkos::LayoutLeft, Kokkos::HostSpace> const transposed("transposed", 3, 4);
  EXPECT_THROW(const_rows(transposed), InvalidArgument);
}

}  // namespace
