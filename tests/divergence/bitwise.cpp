// SPDX-License-Identifier: Apache-2.0
// A row's bits depend on its own logits alone. Runs with several numbers of OpenMP threads, see
// CMakeLists.txt.
#include <support/harness.hpp>
#include <support/together.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace {

using namespace vpkl;
using namespace vpkl::test;

Problem problem_of(Divergence divergence, ElementType student, ElementType teacher,
                   std::int64_t rows = 7, std::int64_t vocabulary = 6007) {
  Random random(100 + static_cast<std::uint64_t>(divergence));
  Problem problem(rows, vocabulary);
  for (float& x : problem.student)
    x = static_cast<float>(3 * normal(random));
  for (float& x : problem.teacher)
    x = static_cast<float>(3 * normal(random));
  problem.options.divergence = divergence;
  problem.options.temperature = 1.3;
  problem.options.beta = 0.3;
  problem.student_type = student;
  problem.teacher_type = teacher;
  problem.round();
  return problem;
}

bool same_bits(Outcome const& a, Outcome const& b, bool with_gradient = true) {
  return a.value.size() == b.value.size() &&
         std::memcmp(a.value.data(), b.value.data(), a.value.size() * sizeof(float)) == 0 &&
         (!with_gradient || a.bits == b.bits);
}

template <class Exec>
class DivergenceBits : public CollectiveTest<Exec> {
 protected:
  template <class F>
  void for_each_problem(F&& f) {
    for (Route route : routes)
      for (Divergence divergence : divergences)
        for (auto const& [student, teacher] : {std::pair(ElementType::fp32, ElementType::fp32),
                                               std::pair(ElementType::bf16, ElementType::fp16)}) {
          Placement placement;
          placement.route = route;
          Problem const problem = problem_of(divergence, student, teacher);
          f(problem, placement, run(this->exec, this->comm, problem, placement));
        }
  }
};
TYPED_TEST_SUITE(DivergenceBits, ExecutionSpaces, SpaceNames);

TYPED_TEST(DivergenceBits, run_to_run) {
  this->for_each_problem(
      [&](Problem const& problem, Placement const& placement, Outcome const& want) {
        for (int repeat = 0; repeat < 3; ++repeat)
          EXPECT_TRUE(same_bits(run(this->exec, this->comm, problem, placement), want))
              << placement.describe();
      });
}

// Few rows are split over threads, many are not.
TYPED_TEST(DivergenceBits, any_split_of_rows_into_calls) {
  this->for_each_problem([&](Problem const& problem, Placement placement, Outcome const& want) {
    for (std::int64_t rows : {1, 2, 3, 4, 5, 6}) {
      placement.rows_per_call = rows;
      placement.spare_rows = rows % 3;
      EXPECT_TRUE(same_bits(run(this->exec, this->comm, problem, placement), want))
          << placement.describe();
    }
  });
}

TYPED_TEST(DivergenceBits, alignment_stride_and_order) {
  this->for_each_problem([&](Problem const& problem, Placement const& placement,
                             Outcome const& want) {
    std::vector<Placement> others(6, placement);
    others[0].student_shift = 1;
    others[1].teacher_shift = 3;
    others[1].gradient_shift = 5;
    others[2].student_gap = 1;
    others[2].teacher_gap = 7;
    others[2].gradient_gap = 64;
    others[3].student_padding = 61;
    others[3].teacher_padding = 2;
    others[4].student_form = others[4].gradient_form = RowForm::offsets;
    others[4].teacher_form = RowForm::nested;
    others[5].in_place = true;
    for (Placement const& other : others)
      EXPECT_TRUE(same_bits(run(this->exec, this->comm, problem, other), want)) << other.describe();
    Placement values = placement;
    values.values_only = true;
    EXPECT_TRUE(same_bits(run(this->exec, this->comm, problem, values), want, false));
  });
}

TYPED_TEST(DivergenceBits, whatever_is_computed_beside_it) {
  this->for_each_problem(
      [&](Problem const& problem, Placement const& placement, Outcome const& want) {
        std::size_t const row_bytes = want.bits.size() / static_cast<std::size_t>(problem.rows);
        for (std::int64_t row : {std::int64_t(0), problem.rows / 2, problem.rows - 1}) {
          auto const expect_row = [&](Outcome const& got, std::string const& what) {
            EXPECT_EQ(std::memcmp(&got.value[row], &want.value[row], sizeof(float)), 0) << what;
            EXPECT_TRUE(std::equal(got.bits.begin() + row * row_bytes,
                                   got.bits.begin() + (row + 1) * row_bytes,
                                   want.bits.begin() + row * row_bytes))
                << what << ", " << placement.describe();
          };
          Problem skipped = problem;
          skipped.weight.assign(static_cast<std::size_t>(problem.rows), 0.0f);
          skipped.weight[row] = 1;
          expect_row(run(this->exec, this->comm, skipped, placement), "others skipped");
          Problem strange = problem;
          for (std::int64_t r = 0; r < problem.rows; ++r)
            for (std::int64_t c = 0; r != row && c < problem.vocabulary; ++c) {
              strange.s(r, c) = r % 2 ? -std::numeric_limits<float>::infinity() : 1e4f;
              strange.t(r, c) = r % 3 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
            }
          expect_row(run(this->exec, this->comm, strange, placement), "others strange");
        }
      });
}

// Also across numbers of threads: each process compares its threads with one.
TYPED_TEST(DivergenceBits, number_of_threads) {
#ifdef KOKKOS_ENABLE_SERIAL
  if (!vpkl::impl::is_host_space<TypeParam>) GTEST_SKIP() << "host and device round differently";
  this->for_each_problem(
      [&](Problem const& problem, Placement const& placement, Outcome const& want) {
        EXPECT_TRUE(same_bits(run(Kokkos::Serial(), this->comm, problem, placement), want))
            << placement.describe();
      });
#else
  GTEST_SKIP() << "Kokkos has no Serial backend";
#endif
}

// The gradient is the same, bit by bit; the values are other sums, of any split of rows.
TYPED_TEST(DivergenceBits, known_teacher) {
  for (auto const& [student, teacher] : {std::pair(ElementType::fp32, ElementType::fp32),
                                         std::pair(ElementType::bf16, ElementType::bf16),
                                         std::pair(ElementType::bf16, ElementType::fp16),
                                         std::pair(ElementType::fp16, ElementType::fp32)})
    for (Route route : {Route::dense, Route::vocab_parallel})
      // Blocks of a GPU share the rows of the last one.
      for (std::int64_t vocabulary : {40, 1030, 6007, 40000}) {
        if (vocabulary == 40000 && student != teacher) continue;
        Problem problem = problem_of(Divergence::forward_kl, student, teacher, 7, vocabulary);
        // One id has most of the probability in one model, in the other, in both.
        for (std::int64_t r = 1; r < 4; ++r) {
          if (r != 2) problem.s(r, vocabulary / 2) = 60;
          if (r != 1) problem.t(r, vocabulary / 2) = 60;
        }
        problem.round();
        Placement placement;
        placement.route = route;
        Outcome const want = run(this->exec, this->comm, problem, placement);
        placement.known_teacher = true;
        Outcome const known = run(this->exec, this->comm, problem, placement);
        expect_close(this->comm, problem, known, placement.describe());
        EXPECT_TRUE(known.bits == want.bits) << placement.describe() << " " << describe(problem);
        if (student == ElementType::fp16) continue;
        for (std::int64_t rows : {1, 5}) {
          placement.rows_per_call = rows;
          placement.student_padding = placement.teacher_gap = placement.student_shift = rows;
          EXPECT_TRUE(same_bits(run(this->exec, this->comm, problem, placement), known))
              << placement.describe();
        }
        placement.values_only = true;
        EXPECT_TRUE(same_bits(run(this->exec, this->comm, problem, placement), known, false))
            << placement.describe();
      }
}

/// How a row's logits and weight are out of the ordinary, by its number.
enum Kind { plain, skipped, nan, infinite, empty, equal, certain, masked, kinds };

// One rank: the fused kernels against statistics, merge and finish.
/// \return number of fused kernels
template <class Exec>
int compare_fused(Exec const& exec, DivergenceOptions options, ElementType type, std::int64_t rows,
                  std::int64_t columns, std::int64_t shift, bool in_place, std::int64_t padding) {
  float const infinity = std::numeric_limits<float>::infinity();
  Divergence const divergence = options.divergence;
  typename Tensor<Exec>::Shape const shape{rows, columns + padding, shift, shift};
  Tensor<Exec> student[] = {{type, shape}, {type, shape}};
  Tensor<Exec> gradient[] = {{type, shape}, {type, shape}};
  Tensor<Exec> teacher(type, shape);
  std::vector<float> logits(8191), weight(static_cast<std::size_t>(rows), 0.7f);
  Random random(static_cast<std::uint64_t>(rows + columns));
  for (float& x : logits)
    x = rounded(type, static_cast<float>(3 * normal(random)));
  for (std::int64_t r = 0; r < rows; ++r) {
    // Of all kinds in each cluster, too, whatever their number.
    Kind const kind = static_cast<Kind>((r + r / kinds) % kinds);
    // Of very many rows those in the middle are left out: more than twice what a warp has lanes, in
    // turn.
    bool const middle = rows > 4000 && r > rows / 10 && r < rows - rows / 10;
    if (kind == skipped || middle) weight[r] = 0;
    if (middle) continue;
    for (std::int64_t c = 0; c < columns; ++c) {
      float s = logits[(r * 7919 + c * 31) % logits.size()];
      float t = kind == equal ? s : logits[(r * 6007 + c * 17) % logits.size()];
      bool const marked = c == columns / 2 + r % 64;
      if (kind == nan && marked) s = std::numeric_limits<float>::quiet_NaN();
      if (kind == infinite && marked) t = infinity;
      if (kind == empty) s = -infinity;
      if (kind == certain) (marked ? s : t) += marked ? 200.0f : 0.0f;
      if (kind == masked && c % 3 == 0) s = -infinity;
      if (kind == masked && c % 5 == 0) t = -infinity;
      student[0].set(r, c, s);
      student[1].set(r, c, s);
      teacher.set(r, c, t);
    }
  }
  for (auto* tensor : {&student[0], &student[1], &teacher, &gradient[0], &gradient[1]})
    tensor->to_device();
  auto const weights = to_device<Exec>(weight);
  DeviceArray<Exec, float> const value[] = {DeviceArray<Exec, float>("value", rows),
                                            DeviceArray<Exec, float>("value", rows)};
  DeviceArray<Exec, RowStatistics> const own("own", rows), merged("merged", rows);
  DeviceArray<Exec, vpkl::impl::JsdSums> const sums("sums", rows);
  vpkl::impl::RowJob job;
  job.teacher = teacher.rows(0, rows);
  job.columns = columns;
  job.weight = weights.data();
  job.options = vpkl::impl::KernelOptions::make(options);
  vpkl::impl::DivergenceKernels<Exec> const kernels(exec, rows, columns);
  bool const jsd = divergence == Divergence::jsd;
  auto const to = [&](int i) {
    return in_place ? student[i].rows(0, rows) : gradient[i].rows(0, rows);
  };
  job.student = student[0].rows(0, rows);
  int const launched = kernels.fused(exec, job, merged.data(), sums.data(), value[0].data(), to(0));
  job.student = student[1].rows(0, rows);
  kernels.statistics(exec, job, own.data());
  kernels.combine(exec, job, own.data(), 1, rows, merged.data());
  if (jsd) kernels.jsd_sums(exec, job, merged.data(), sums.data());
  kernels.finish(exec, job, merged.data(), jsd ? sums.data() : nullptr, 1, rows, value[1].data(),
                 to(1));
  vpkl::impl::fence(exec, "vpkl_test::fused_and_in_phases");
  auto const got = to_host(value[0]), want = to_host(value[1]);
  for (int i = 0; i < 2; ++i)
    (in_place ? student[i] : gradient[i]).to_host();
  for (std::int64_t r = 0; r < rows; ++r) {
    std::string const what = fmt::format("{} {} beta {} [{}, {}] row {} shift {}{}",
                                         to_string(divergence), to_string(type), options.beta, rows,
                                         columns, r, shift, in_place ? " in place" : "");
    bool const same = std::memcmp(&got[r], &want[r], sizeof(float)) == 0;
    auto const& results = in_place ? student : gradient;
    EXPECT_TRUE(same) << what;
    EXPECT_TRUE(results[0].bits(r, columns + padding) == results[1].bits(r, columns + padding))
        << what;
    if (!same) break;
  }
  return launched;
}

TYPED_TEST(DivergenceBits, fused_and_in_phases) {
  TypeParam const exec;
  bool const many_rows = !vpkl::impl::is_host_space<TypeParam>;
  for (DivergenceOptions const options : {DivergenceOptions{Divergence::forward_kl, 0.5, 1.3},
                                          {Divergence::reverse_kl, 0.5, 1.3},
                                          {Divergence::jsd, 0.3, 1.3},
                                          {Divergence::jsd, 0.5, 1.3}}) {
    auto const compare = [&](ElementType type, std::int64_t rows, std::int64_t columns,
                             std::int64_t shift) {
      return compare_fused(exec, options, type, rows, columns, shift, shift == 8, shift);
    };
    for (ElementType type : element_types)
      for (std::int64_t shift : {0, 1, 8})
        for (std::int64_t rows :
             many_rows ? std::vector<std::int64_t>{1, 8, 70} : std::vector<std::int64_t>{1, 8})
          compare(type, rows, 9001, shift);
    // What a few large clusters, many small ones, and none hold.
    if constexpr (!vpkl::impl::is_host_space<TypeParam>)
      for (ElementType type : element_types)
        for (std::int64_t shift : {0, 1, 8})
          for (auto const& [rows, columns] : {std::pair(8, 75968), std::pair(8, 151936),
                                              std::pair(70, 31001), std::pair(2, 400001)})
            compare(type, rows, columns, shift);
  }
}

// Calls that follow each other without a fence, on one rank: each reads the gradient of the one
// before as logits and, if weighted, its values as weights, 0 in some rows and never 0 in those
// places before. So a call shows that reads, or only looks where to read, too early, if it is early
// in time.
template <class Exec>
void compare_chains(Exec const& exec, ElementType type, ElementType teacher_type, std::int64_t rows,
                    std::int64_t columns, bool weighted, int calls) {
  Random random(static_cast<std::uint64_t>(rows + columns));
  std::vector<float> logits(8191);
  for (float& x : logits)
    x = static_cast<float>(3 * normal(random));
  auto const fill = [&](Tensor<Exec>& tensor, std::int64_t seed) {
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c)
        tensor.set(r, c, logits[(seed * 523 + r * 7919 + c * 31) % logits.size()]);
    tensor.to_device();
  };
  typename Tensor<Exec>::Shape const shape{rows, columns, 0, 0};
  Tensor<Exec> teacher(teacher_type, shape);
  fill(teacher, 100);
  std::vector<DivergencePlan<Exec>> plans;
  for (Divergence divergence : divergences) {
    typename DivergencePlan<Exec>::Options options;
    options.divergence.divergence = divergence;
    options.route = Route::dense;
    options.student_type = type;
    options.teacher_type = teacher_type;
    options.max_rows = rows;
    plans.emplace_back(exec, Communicator::self(), VocabShard::whole(columns, columns, columns),
                       options);
  }
  std::vector<Tensor<Exec>> chained, fenced;
  std::vector<DeviceArray<Exec, float>> chained_values, fenced_values;
  auto const chain = [&](std::vector<Tensor<Exec>>& tensors,
                         std::vector<DeviceArray<Exec, float>>& values, bool with_fences) {
    for (int i = 0; i <= calls; ++i) {
      fill(tensors.emplace_back(type, shape), i);
      std::vector<float> stale(static_cast<std::size_t>(rows), 7.0f);
      if (i == 0)
        for (std::int64_t r = 0; r < rows; r += 5)
          stale[r] = 0;
      values.push_back(to_device<Exec>(stale));
    }
    for (int i = 0; i < calls; ++i) {
      plans[i % plans.size()].execute(exec, tensors[i].rows(0, rows), teacher.rows(0, rows),
                                      weighted ? values[i].data() : nullptr, values[i + 1].data(),
                                      tensors[i + 1].rows(0, rows));
      if (with_fences) vpkl::impl::fence(exec, "vpkl_test::compare_chains");
    }
    vpkl::impl::fence(exec, "vpkl_test::compare_chains");
    for (Tensor<Exec>& tensor : tensors)
      tensor.to_host();
  };
  chain(chained, chained_values, false);
  chain(fenced, fenced_values, true);
  for (int i = 1; i <= calls; ++i) {
    std::string const what =
        fmt::format("{} {} [{}, {}] call {}{}", to_string(type), to_string(teacher_type), rows,
                    columns, i, weighted ? " weighted" : "");
    EXPECT_EQ(to_host(chained_values[i]), to_host(fenced_values[i])) << what;
    for (std::int64_t r = 0; r < rows; ++r)
      ASSERT_TRUE(chained[i].bits(r, columns) == fenced[i].bits(r, columns))
          << what << " row " << r;
  }
}

TYPED_TEST(DivergenceBits, calls_read_what_the_one_before_wrote) {
  if (this->comm.rank() != 0) return;
  bool const device = !vpkl::impl::is_host_space<TypeParam>;
  std::vector<std::pair<std::int64_t, std::int64_t>> shapes = {{3, 9001}};
  // On an H100 or H200: one row a cluster, two, three, ten.
  if (device) shapes.insert(shapes.end(), {{8, 75968}, {70, 9001}, {200, 3001}, {600, 3072}});
  for (auto const& [type, teacher] : {std::pair(ElementType::bf16, ElementType::bf16),
                                      std::pair(ElementType::fp32, ElementType::fp32),
                                      std::pair(ElementType::bf16, ElementType::fp32)})
    for (auto const& [rows, columns] : shapes)
      for (bool weighted : {false, true})
        compare_chains(TypeParam(), type, teacher, rows, columns, weighted, 7);
  // Two launches a call, of clusters of four and of two.
  if (device)
    compare_chains(TypeParam(), ElementType::bf16, ElementType::bf16, 264, 46000, false, 4);
}

#ifdef VPKL_ENABLE_CUDA
// Rows that a cluster has many of: slots, places and what lanes remember of rows are used again.
TEST(DivergenceBitsOnChip, many_rows_a_cluster) {
  Kokkos::Cuda const exec;
  bool const clusters = exec.cuda_device_prop().major >= 9;
  // Where clusters of four leave some over: H100 and H200 of 132.
  bool const pairs = clusters && exec.cuda_device_prop().multiProcessorCount == 132;
  auto const compare = [&](ElementType type, double beta, std::int64_t rows, std::int64_t columns,
                           std::int64_t padding) {
    int const launched =
        compare_fused(exec, {Divergence::jsd, beta, 1.3}, type, rows, columns, 0, true, padding);
    if (clusters) {
      EXPECT_EQ(launched, 1) << rows << " " << columns;
    }
    return compare_fused(exec, {Divergence::forward_kl, 0.5, 1.3}, type, rows, columns, 0, false,
                         padding);
  };
  compare(ElementType::bf16, 0.5, 2200, 30728, 0);
  compare(ElementType::bf16, 0.5, 6600, 30728, 0);
  int const launched = compare(ElementType::bf16, 0.5, 300, 75968, 1100);
  if (pairs) {
    EXPECT_EQ(launched, 2);
  }
  compare(ElementType::bf16, 0.3, 70, 151936, 0);
  compare(ElementType::bf16, 0.5, 70, 151936, 8);
  compare(ElementType::fp16, 0.5, 40, 200000, 0);
  compare(ElementType::fp32, 0.5, 40, 151936, 4);
  // Not so many: the 2, 4 or 8 blocks of a cluster take segments in turn.
  compare(ElementType::bf16, 0.5, 200, 31001, 0);
  compare(ElementType::bf16, 0.5, 120, 75968, 0);
  compare(ElementType::bf16, 0.5, 60, 151936, 0);
}
#endif

}  // namespace
