// SPDX-License-Identifier: Apache-2.0
// What a profiler sees through Kokkos Tools: every kernel and allocation carries the library's
// label, every range that opens closes.
#include <support/harness.hpp>
#include <support/together.hpp>

#include <vpkl/trace/range.hpp>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

namespace {

using namespace vpkl;
using namespace vpkl::test;
namespace tools = Kokkos::Tools::Experimental;

struct Seen {
  std::vector<std::string> kernels, allocations, copies, regions;
  int depth = 0, deepest = 0;
  bool underflow = false;
};
Seen seen;

void on_kernel(char const* name, std::uint32_t, std::uint64_t*) { seen.kernels.push_back(name); }
void on_allocation(Kokkos::Tools::SpaceHandle, char const* name, void const*, std::uint64_t) {
  seen.allocations.push_back(name);
}
void on_copy(Kokkos::Tools::SpaceHandle, char const* to, void const*, Kokkos::Tools::SpaceHandle,
             char const*, void const*, std::uint64_t) {
  seen.copies.push_back(to);
}
void on_push(char const* name) {
  seen.regions.push_back(name);
  seen.deepest = std::max(seen.deepest, ++seen.depth);
}
void on_pop() {
  if (--seen.depth < 0) seen.underflow = true;
}

/// Listens while it lives.
class Listening {
 public:
  Listening() {
    seen = Seen{};
    set(on_kernel, on_allocation, on_copy, on_push, on_pop);
  }
  ~Listening() { set(nullptr, nullptr, nullptr, nullptr, nullptr); }
  Listening(Listening const&) = delete;
  Listening& operator=(Listening const&) = delete;

 private:
  static void set(decltype(&on_kernel) kernel, decltype(&on_allocation) allocation,
                  decltype(&on_copy) copy, decltype(&on_push) push, decltype(&on_pop) pop) {
    tools::set_begin_parallel_for_callback(kernel);
    tools::set_begin_parallel_reduce_callback(kernel);
    tools::set_begin_parallel_scan_callback(kernel);
    tools::set_allocate_data_callback(allocation);
    tools::set_begin_deep_copy_callback(copy);
    tools::set_push_region_callback(push);
    tools::set_pop_region_callback(pop);
  }
};

void expect_labelled(std::vector<std::string> const& names) {
  for (std::string const& name : names) {
    if (name == "Kokkos::CudaSpace::TeamScratchMemory") continue;  // Kokkos' own, once an instance
    EXPECT_EQ(name.compare(0, 6, "vpkl::"), 0) << "label '" << name << "'";
  }
}

template <class Exec>
class DivergenceTools : public CollectiveTest<Exec> {};
TYPED_TEST_SUITE(DivergenceTools, ExecutionSpaces, SpaceNames);

TYPED_TEST(DivergenceTools, labels_and_counters) {
  std::int64_t const vocabulary = 5000, rows = 5;
  auto const bounds = even_bounds(vocabulary, this->comm.size());
  for (Route route : routes)
    for (Divergence divergence : divergences)
      for (std::int64_t count : {std::int64_t(1), rows}) {
        bool const dense = route == Route::dense;
        std::int64_t const begin = dense ? 0 : bounds[this->comm.rank()];
        std::int64_t const width = (dense ? vocabulary : bounds[this->comm.rank() + 1]) - begin;
        std::int64_t const teacher_width = route == Route::gathered ? vocabulary : width;
        DeviceArray<TypeParam, float> const student("vpkl_test::student", width * rows),
            teacher("vpkl_test::teacher", teacher_width * rows),
            gradient("vpkl_test::gradient", width * rows), value("vpkl_test::value", rows);
        VocabShard::Spec spec;
        spec.vocabulary = vocabulary;
        spec.begin = begin;
        spec.end = begin + width;
        spec.student_width = spec.teacher_width = width;
        typename DivergencePlan<TypeParam>::Options options;
        options.divergence.divergence = divergence;
        options.route = route;
        options.max_rows = rows;
        Listening const listening;
        DivergencePlan<TypeParam> plan(
            this->exec, this->comm,
            dense ? VocabShard::whole(vocabulary) : VocabShard::make(this->comm, spec), options);
        plan.execute(
            this->exec,
            ConstRows{student.data(), ElementType::fp32, width, RowIndex::strided(count, width)},
            ConstRows{teacher.data(), ElementType::fp32, teacher_width,
                      RowIndex::strided(count, teacher_width)},
            nullptr, value.data(),
            Rows{gradient.data(), ElementType::fp32, width, RowIndex::strided(count, width)});
        vpkl::impl::fence(this->exec, "vpkl_test::labels");
        expect_labelled(seen.kernels);
        expect_labelled(seen.allocations);
        expect_labelled(seen.copies);
        expect_labelled(seen.regions);
        EXPECT_EQ(plan.counters().kernels, static_cast<std::int64_t>(seen.kernels.size()));
        EXPECT_GE(seen.regions.size(), 1u);
        EXPECT_EQ(seen.depth, 0);
        EXPECT_FALSE(seen.underflow);
      }
}

// Case 33: a range closes also when an exception leaves it.
TYPED_TEST(DivergenceTools, ranges_close_when_an_exception_leaves) {
  for (Route route : {Route::gathered, Route::vocab_parallel}) {
    auto const [begin, end] = even_range(40, this->comm.size(), this->comm.rank());
    std::int64_t const width = end - begin;
    VocabShard::Spec spec;
    spec.vocabulary = 40;
    spec.begin = begin;
    spec.end = end;
    spec.student_width = spec.teacher_width = width;
    typename DivergencePlan<TypeParam>::Options options;
    options.route = route;
    options.max_rows = 1;
    DivergencePlan<TypeParam> plan(this->exec, this->comm, VocabShard::make(this->comm, spec),
                                   options);
    DeviceArray<TypeParam, float> const logits("vpkl_test::logits", 40),
        value("vpkl_test::value", 1);
    std::int64_t const teacher_width = route == Route::gathered ? 40 : width;
    Listening const listening;
    EXPECT_THROW(plan.execute(this->exec,
                              ConstRows{this->on_rank(1) ? nullptr : logits.data(),
                                        ElementType::fp32, width, RowIndex::strided(1, width)},
                              ConstRows{logits.data(), ElementType::fp32, teacher_width,
                                        RowIndex::strided(1, teacher_width)},
                              nullptr, value.data(), Rows{}),
                 InvalidArgument);
    EXPECT_EQ(seen.depth, 0);
    EXPECT_FALSE(seen.underflow);
    EXPECT_GE(seen.deepest, this->comm.size() > 1 ? 1 : 0);
  }
}

TEST(TraceRange, nests_and_closes) {
  Listening const listening;
  try {
    trace::Range const outer(trace::Phase::update, trace::Category::phase, 3);
    trace::Range const inner(trace::Phase::fetch, trace::Category::cache, 4096);
    EXPECT_EQ(seen.depth, 2);
    throw InvalidArgument("out");
  } catch (InvalidArgument const&) {
  }
  EXPECT_EQ(seen.depth, 0);
  EXPECT_FALSE(seen.underflow);
  EXPECT_EQ(seen.regions, (std::vector<std::string>{"vpkl::update", "vpkl::fetch"}));
}

}  // namespace
