// SPDX-License-Identifier: Apache-2.0
// Rows with known right values: data/divergence.json, and inputs on which similar systems failed.
#include "support/harness.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <tuple>

#include <sys/mman.h>

using namespace vpkl;
using namespace vpkl::test;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

struct KnownRow {
  std::string id;
  std::vector<float> student, teacher;
  double temperature, beta;
  nlohmann::json expected;
};

double number(nlohmann::json const& j) {
  if (j.is_null()) return std::numeric_limits<double>::quiet_NaN();
  if (j.is_string()) return j == "inf" ? HUGE_VAL : -HUGE_VAL;
  return j.get<double>();
}

std::vector<KnownRow> const& known_rows() {
  static std::vector<KnownRow> const rows = [] {
    std::vector<KnownRow> out;
    std::ifstream file(VPKL_TEST_DATA_DIR "/divergence.json");
    for (auto const& c : nlohmann::json::parse(file)) {
      KnownRow row;
      row.id = c["id"];
      for (auto const& x : c["student"])
        row.student.push_back(static_cast<float>(number(x)));
      for (auto const& x : c["teacher"])
        row.teacher.push_back(static_cast<float>(number(x)));
      row.temperature = c["temperature"];
      row.beta = c.value("beta", 0.5);
      row.expected = c["expected"];
      out.push_back(row);
    }
    return out;
  }();
  return rows;
}

bool holds(ElementType type, std::vector<float> const& row) {
  for (float x : row)
    if (!holds_exactly(type, x)) return false;
  return true;
}

DivergenceOptions options_of(Divergence divergence, double temperature = 1, double beta = 0.5) {
  DivergenceOptions options;
  options.divergence = divergence;
  options.temperature = temperature;
  options.beta = beta;
  return options;
}

std::vector<float> const f1_s{0, 0, 0, 0}, f1_t{2, 1, 0, -1}, f2_s{0, 1, 2, 3}, f2_t{2, 0, 0, 1},
    f3_s{1, 2, 0}, f3_t{3, 1, 0};

template <class Exec>
class DivergenceCases : public testing::Test {
 protected:
  Exec exec;
  Communicator comm = world();

  /// Runs on every route and several shardings and compares values with `expected`.
  void expect_values(Problem const& problem, std::vector<double> const& expected,
                     double tolerance = 1e-6) {
    for (Route route : routes)
      for (auto const& bounds : interesting_bounds(problem.vocabulary, comm.size())) {
        Placement placement;
        placement.route = route;
        placement.bounds = bounds;
        for (int known : {0, 1, 2}) {
          placement.known_teacher = known > 0;
          placement.empty_records = known > 1;
          Outcome const outcome = run(exec, comm, problem, placement);
          for (std::size_t r = 0; r < expected.size(); ++r)
            EXPECT_NEAR(outcome.value[r], expected[r], tolerance)
                << "row " << r << ", " << placement.describe();
          expect_close(this->comm, problem, outcome, placement.describe());
          if (problem.options.divergence != Divergence::forward_kl || route == Route::gathered)
            break;
        }
      }
  }
};
TYPED_TEST_SUITE(DivergenceCases, ExecutionSpaces, SpaceNames);

void expect_known(Communicator const& comm, std::vector<KnownRow> const& rows,
                  Problem const& problem, Outcome const& got, std::string const& placement) {
  Divergence const divergence = problem.options.divergence;
  double const unit = problem.student_type == ElementType::fp32   ? 0x1p-24
                      : problem.student_type == ElementType::bf16 ? 0x1p-8
                                                                  : 0x1p-11;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::string const where = rows[r].id + ": " + describe(problem) + ", " + placement;
    double const value = number(rows[r].expected[to_string(divergence)]);
    if (std::isinf(value))
      EXPECT_EQ(got.value[r], value) << where;
    else
      EXPECT_NEAR(got.value[r], value, 1e-6) << where;
    auto const& gradient = rows[r].expected[std::string("grad_") + to_string(divergence)];
    for (std::size_t c = 0; c < gradient.size(); ++c) {
      double const want = number(gradient[c]);
      float const g = got.gradient[r * gradient.size() + c];
      if (std::isnan(want))
        EXPECT_TRUE(std::isnan(g)) << where;
      else
        EXPECT_NEAR(g, want, 1e-6 + unit * std::fabs(want) + 0x1p-25) << where << " column " << c;
    }
  }
  expect_close(comm, problem, got, placement);
}

// The oracle itself, before anything is measured with it.
TEST(Oracle, MatchesKnownRows) {
  ASSERT_EQ(known_rows().size(), 16u);
  for (auto const& row : known_rows())
    for (Divergence divergence : divergences) {
      auto const got = oracle(row.student, row.teacher, 1,
                              oracle_options(options_of(divergence, row.temperature, row.beta)));
      double const value = number(row.expected[to_string(divergence)]);
      if (std::isinf(value))
        EXPECT_EQ(got.value, value) << row.id;
      else
        EXPECT_NEAR(got.value, value, 1e-14) << row.id << " " << to_string(divergence);
      auto const& gradient = row.expected[std::string("grad_") + to_string(divergence)];
      ASSERT_EQ(gradient.size(), got.gradient.size());
      for (std::size_t c = 0; c < gradient.size(); ++c) {
        double const want = number(gradient[c]);
        if (std::isnan(want))
          EXPECT_TRUE(std::isnan(got.gradient[c])) << row.id;
        else
          EXPECT_NEAR(got.gradient[c], want, 1e-14) << row.id << " " << to_string(divergence);
      }
    }
}

TYPED_TEST(DivergenceCases, KnownRows) {
  FloatingPointTraps const traps;
  // Rows of the same shape and options make one call.
  std::map<std::tuple<std::size_t, double, double>, std::vector<KnownRow>> groups;
  for (auto const& row : known_rows())
    groups[{row.student.size(), row.temperature, row.beta}].push_back(row);
  for (auto const& [key, group] : groups)
    for (ElementType student_type : element_types)
      for (ElementType teacher_type : element_types) {
        Problem problem;
        problem.vocabulary = static_cast<std::int64_t>(std::get<0>(key));
        problem.student_type = student_type;
        problem.teacher_type = teacher_type;
        std::vector<KnownRow> held;
        for (auto const& row : group) {
          if (!holds(student_type, row.student) || !holds(teacher_type, row.teacher)) continue;
          held.push_back(row);
          problem.student.insert(problem.student.end(), row.student.begin(), row.student.end());
          problem.teacher.insert(problem.teacher.end(), row.teacher.begin(), row.teacher.end());
        }
        problem.rows = static_cast<std::int64_t>(held.size());
        for (Divergence divergence : divergences)
          for (Route route : routes)
            for (auto const& bounds : interesting_bounds(problem.vocabulary, this->comm.size())) {
              problem.options = options_of(divergence, std::get<1>(key), std::get<2>(key));
              Placement placement;
              placement.route = route;
              placement.bounds = bounds;
              placement.student_padding = placement.teacher_padding = 3;
              for (bool known : {false, true}) {
                placement.known_teacher = known;
                expect_known(this->comm, held, problem,
                             run(this->exec, this->comm, problem, placement), placement.describe());
                if (divergence != Divergence::forward_kl || route == Route::gathered ||
                    student_type != teacher_type)
                  break;
              }
              if (student_type != teacher_type) break;
            }
      }
}

// Case 2, 11: rows of weight 0 count as 0 whatever they hold, and their gradient is written.
TYPED_TEST(DivergenceCases, RowsOfWeightZero) {
  Problem problem(3, 3);
  for (int c = 0; c < 3; ++c) {
    problem.s(0, c) = f3_s[c];
    problem.t(0, c) = f3_t[c];
    problem.s(1, c) = problem.t(1, c) = -inf;
    problem.s(2, c) = problem.t(2, c) = nan_value;
  }
  problem.weight = {1, 0, 0};
  this->expect_values(problem, {0.811154214466, 0, 0});
  problem.weight = {0, 0, 0};
  this->expect_values(problem, {0, 0, 0});
  problem.weight = {-0.0f, 0, 0};
  this->expect_values(problem, {0, 0, 0});
}

// Case 3: the first blocks of the vocabulary all -inf in both models.
TYPED_TEST(DivergenceCases, FirstBlocksMasked) {
  FloatingPointTraps const traps;
  for (std::int64_t masked : {64, 2048, 4096, 5000}) {
    Problem problem(1, masked + 4);
    for (std::int64_t c = 0; c < masked; ++c)
      problem.s(0, c) = problem.t(0, c) = -inf;
    for (int c = 0; c < 4; ++c) {
      problem.s(0, masked + c) = f1_s[c];
      problem.t(0, masked + c) = f1_t[c];
    }
    for (auto const& [divergence, value] : {std::pair(Divergence::forward_kl, 0.438757397144),
                                            std::pair(Divergence::reverse_kl, 0.553895337441),
                                            std::pair(Divergence::jsd, 0.113339721095)}) {
      problem.options = options_of(divergence);
      this->expect_values(problem, {value});
    }
  }
}

// Case 4: padding columns hold 0, 1e4, NaN (run() fills them) and never enter.
TYPED_TEST(DivergenceCases, PaddingColumns) {
  Problem const problem({1, 1, 1, 1}, f1_t);
  for (std::int64_t padding : {1, 2, 5, 60, 64, 3000})
    for (bool in_place : {false, true}) {
      Placement placement;
      placement.student_padding = padding;
      placement.teacher_padding = padding + 1;
      placement.in_place = in_place;
      Outcome const got = run(this->exec, this->comm, problem, placement);
      EXPECT_NEAR(got.value[0], 0.438757397144, 1e-6);
      expect_close(this->comm, problem, got, placement.describe());
    }
}

// Case 5: ids beyond the common prefix are physical padding.
TYPED_TEST(DivergenceCases, CommonPrefix) {
  std::int64_t const vocabulary = align_vocabularies(4, 6, VocabularyPolicy::common_prefix);
  ASSERT_EQ(vocabulary, 4);
  VocabShard const shard = VocabShard::whole(vocabulary, 4, 6);
  typename DivergencePlan<TypeParam>::Options options;
  options.route = Route::dense;
  options.max_rows = 1;
  DivergencePlan<TypeParam> plan(this->exec, this->comm, shard, options);
  using Memory = typename TypeParam::memory_space;
  using Logits = Kokkos::View<float**, Kokkos::LayoutRight, Memory>;
  Logits student("student", 1, 4), teacher("teacher", 1, 6), gradient("gradient", 1, 4);
  Kokkos::View<float*, Memory> value("value", 1);
  auto const t = Kokkos::create_mirror_view(teacher);
  float const logits[] = {2, 1, 0, -1, 9, 9};
  for (int c = 0; c < 6; ++c)
    t(0, c) = logits[c];
  Kokkos::deep_copy(teacher, t);
  plan.execute(this->exec, const_rows(student), const_rows(teacher), nullptr, value.data(),
               rows(gradient));
  this->exec.fence();
  auto const got = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), value);
  EXPECT_NEAR(got(0), 0.438757397144, 1e-6);
}

// Case 7: gradient of F2 over two ranks; its sum over all ranks is 0.
TYPED_TEST(DivergenceCases, GradientOfTheGlobalNormaliser) {
  Problem const problem(f2_s, f2_t);
  Outcome const got = run(this->exec, this->comm, problem);
  double const want[] = {-0.578237, 0.004550, 0.154288, 0.419399};
  double sum = 0;
  for (int c = 0; c < 4; ++c) {
    EXPECT_NEAR(got.gradient[c], want[c], 1e-6);
    sum += got.gradient[c];
  }
  EXPECT_NEAR(sum, 0, 1e-7);
}

// Case 9: the two directions are told apart.
TYPED_TEST(DivergenceCases, Direction) {
  Problem problem(f1_s, f1_t);
  this->expect_values(problem, {0.438757397144});
  problem.options.divergence = Divergence::reverse_kl;
  this->expect_values(problem, {0.553895337441});
}

// Case 10: temperature divides both sides; T² multiplies the value; equal models give exactly 0.
TYPED_TEST(DivergenceCases, Temperature) {
  FloatingPointTraps const traps;
  Problem problem(f1_s, f1_t, options_of(Divergence::forward_kl, 2));
  this->expect_values(problem, {0.564975734610});
  problem.options.divergence = Divergence::reverse_kl;
  this->expect_values(problem, {0.604177242314});
  Random random(7);
  for (double temperature : {2e-19, 1e-6, 0.1, 0.7, 1.0, 3.0, 1e3, 1e6, 1e19})
    for (Divergence divergence : divergences) {
      Problem same(2, 2500);
      for (std::size_t i = 0; i < same.student.size(); ++i)
        same.student[i] = same.teacher[i] = static_cast<float>(5 * normal(random));
      same.options = options_of(divergence, temperature);
      Outcome const got = run(this->exec, this->comm, same);
      for (float value : got.value)
        EXPECT_EQ(value, 0.0f) << describe(same);
      for (float gradient : got.gradient)
        EXPECT_EQ(gradient, 0.0f) << describe(same);
    }
}

// Case 12, operator level: weights carry the divisor.
TYPED_TEST(DivergenceCases, WeightsCarryTheDivisor) {
  Problem problem(4, 4);
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) {
      problem.s(r, c) = (r == 0 ? f1_s : f2_s)[c];
      problem.t(r, c) = (r == 0 ? f1_t : f2_t)[c];
    }
  problem.weight = {0.25f, 0.25f, 0.25f, 0.25f};
  Outcome const got = run(this->exec, this->comm, problem);
  double loss = 0;
  for (int r = 0; r < 4; ++r)
    loss += 0.25 * got.value[r];
  EXPECT_NEAR(loss, 1.212305802230, 1e-6);
  expect_close(this->comm, problem, got, "weights");
}

// Case 14: identical rows of magnitude 60 in bf16, and a small difference at magnitude 1 in fp32.
TYPED_TEST(DivergenceCases, WideRows) {
  FloatingPointTraps const traps;
  std::int64_t const vocabulary = 248320;
  Random random(14);
  Problem same(1, vocabulary);
  same.student_type = same.teacher_type = ElementType::bf16;
  for (float& x : same.student)
    x = static_cast<float>(uniform_real(random, -60, 60));
  same.teacher = same.student;
  same.round();
  Problem near(1, vocabulary);
  for (std::int64_t c = 0; c < vocabulary; ++c) {
    near.s(0, c) = static_cast<float>(normal(random));
    near.t(0, c) = near.s(0, c) + 0.01f * static_cast<float>(c % 7 - 3);
  }
  for (Divergence divergence : divergences) {
    same.options = near.options = options_of(divergence);
    Outcome got = run(this->exec, this->comm, same);
    EXPECT_LT(std::fabs(got.value[0]), 1e-6) << describe(same);
    for (float g : got.gradient)
      ASSERT_EQ(g, 0.0f);
    got = run(this->exec, this->comm, near);
    expect_close(this->comm, near, got, "near");
    if (this->comm.rank() != 0) continue;
    OracleRow const want = oracle(near.student, near.teacher, 1, oracle_options(near.options));
    long double error2 = 0, norm2 = 0;
    for (std::int64_t c = 0; c < vocabulary; ++c) {
      long double const d = got.gradient[c] - want.gradient[c];
      error2 += d * d;
      norm2 += want.gradient[c] * want.gradient[c];
    }
    EXPECT_LT(std::sqrt(error2 / norm2), 0.005) << describe(near);
  }
}

// Case 15: an almost equal student; nothing is clamped at 0.
TYPED_TEST(DivergenceCases, AlmostEqual) {
  FloatingPointTraps const traps;
  Random random(15);
  for (std::int64_t vocabulary : {2, 3, 4, 5, 8, 17, 64, 100, 1000, 32000})
    for (int repeat = 0; repeat < (vocabulary < 1000 ? 20 : 2); ++repeat) {
      Problem problem(1, vocabulary);
      for (std::int64_t c = 0; c < vocabulary; ++c) {
        problem.t(0, c) = static_cast<float>(2 * normal(random));
        problem.s(0, c) = problem.t(0, c) + static_cast<float>(1e-4 * normal(random));
      }
      for (Divergence divergence : divergences) {
        problem.options = options_of(divergence);
        Outcome const got = run(this->exec, this->comm, problem);
        EXPECT_GE(got.value[0], -1e-7f) << describe(problem);
        expect_close(this->comm, problem, got, "almost equal");
      }
    }
}

/// Memory that is only reserved: pages come into being when touched.
class Reservation {
 public:
  explicit Reservation(std::size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Reservation() {
    if (data_ != MAP_FAILED) munmap(data_, bytes_);
  }
  Reservation(Reservation const&) = delete;
  Reservation& operator=(Reservation const&) = delete;
  explicit operator bool() const { return data_ != MAP_FAILED; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  std::size_t bytes_;
  void* data_;
};

// Case 16: offsets beyond 2^31 and, for the strided form, beyond 2^32 elements.
TYPED_TEST(DivergenceCases, RowsFarApart) {
  if (!vpkl::impl::is_host_space<TypeParam>) GTEST_SKIP() << "reserves host memory";
  std::int64_t const vocabulary = 151936;
  auto const bounds = even_bounds(vocabulary, this->comm.size());
  std::int64_t const width = bounds[this->comm.rank() + 1] - bounds[this->comm.rank()];
  std::int64_t const distance = (std::int64_t(1) << 31) + 64;
  std::size_t const bytes = static_cast<std::size_t>(2 * distance + vocabulary) * 2;
  Reservation const student(bytes), teacher(bytes), gradient(bytes);
  if (!all_of(this->comm, student && teacher && gradient))
    GTEST_SKIP() << "address space for " << bytes << " bytes is not to be had";

  VocabShard::Spec spec;
  spec.vocabulary = vocabulary;
  spec.begin = bounds[this->comm.rank()];
  spec.end = bounds[this->comm.rank() + 1];
  spec.student_width = spec.teacher_width = width;
  typename DivergencePlan<TypeParam>::Options options;
  options.student_type = options.teacher_type = ElementType::bf16;
  options.max_rows = 3;
  DivergencePlan<TypeParam> plan(this->exec, this->comm, VocabShard::make(this->comm, spec),
                                 options);
  if (spec.begin == 0 && width > 0)
    teacher.template as<bfloat16>()[2 * distance] = bfloat16::from_float(10);
  std::int64_t const offsets[] = {0, distance, 2 * distance};
  for (bool explicit_offsets : {false, true}) {
    RowIndex index = RowIndex::strided(3, distance);
    if (explicit_offsets) index.offsets = offsets;
    float value[3] = {-1, -1, -1};
    plan.execute(this->exec,
                 ConstRows{student.template as<void>(), ElementType::bf16, width, index},
                 ConstRows{teacher.template as<void>(), ElementType::bf16, width, index}, nullptr,
                 value, Rows{gradient.template as<void>(), ElementType::bf16, width, index});
    EXPECT_EQ(value[0], 0.0f);
    EXPECT_EQ(value[1], 0.0f);
    EXPECT_NEAR(value[2], 1.130794811630, 1.5e-6);
    if (spec.begin == 0 && width > 0) {
      auto const* g = gradient.template as<bfloat16>();
      // ps - pt of id 0: 1/V - e^10/(e^10 + V - 1)
      EXPECT_NEAR(g[2 * distance].to_float(), 1.0 / 151936 - 0.12661, 1e-3);
      EXPECT_EQ(g[distance].to_float(), 0.0f);
    }
  }
}

// Case 17: a huge second extent is not skipped.
TYPED_TEST(DivergenceCases, TwoWideRows) {
  Problem problem(2, 131072);
  problem.t(0, 131071) = 10;
  problem.t(1, 0) = 5;
  for (Divergence divergence : divergences) {
    problem.options = options_of(divergence);
    Outcome const got = run(this->exec, this->comm, problem);
    EXPECT_GT(got.value[0], 0.01f);
    EXPECT_GT(got.value[1], 0.0f);
    expect_close(this->comm, problem, got, "wide");
  }
}

// Case 34: each row's own weight, as an upstream gradient brings it.
TYPED_TEST(DivergenceCases, WeightOfEachRow) {
  Problem problem(3, 4);
  for (int r = 0; r < 3; ++r)
    for (int c = 0; c < 4; ++c) {
      problem.s(r, c) = (r == 1 ? f2_s : f1_s)[c];
      problem.t(r, c) = (r == 1 ? f2_t : f1_t)[c];
    }
  problem.weight = {1, 2, 3};
  double const want[3][4] = {
      {-0.39391426, 0.01311718, 0.16285568, 0.21794140},
      {-1.15647416, 0.00909956, 0.30857656, 0.83879805},
      {-1.18174278, 0.03935155, 0.48856704, 0.65382419},
  };
  for (Route route : routes) {
    Placement placement;
    placement.route = route;
    Outcome const got = run(this->exec, this->comm, problem, placement);
    for (int r = 0; r < 3; ++r)
      for (int c = 0; c < 4; ++c)
        EXPECT_NEAR(got.gradient[r * 4 + c], want[r][c], 1e-6);
  }
}

// Case 36, operator level: a masked row between two that count.
TYPED_TEST(DivergenceCases, MaskWithAHole) {
  Problem problem(3, 2);
  float const teacher[3][2] = {{1, 0}, {9, -9}, {0, 1}};
  for (int r = 0; r < 3; ++r)
    for (int c = 0; c < 2; ++c)
      problem.t(r, c) = teacher[r][c];
  problem.weight = {0.5f, 0, 0.5f};
  Outcome const got = run(this->exec, this->comm, problem);
  double loss = 0;
  for (int r = 0; r < 3; ++r)
    loss += problem.weight[r] * got.value[r];
  EXPECT_NEAR(loss, 0.110944071672, 1e-7);
  for (int c = 0; c < 2; ++c)
    EXPECT_EQ(got.gradient[2 + c], 0.0f);
}

}  // namespace
