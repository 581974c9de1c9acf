// SPDX-License-Identifier: Apache-2.0
// What the operator refuses, how ranks fail together, and what it communicates.
#include <support/harness.hpp>
#include <support/together.hpp>

#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <limits>

namespace {

using namespace vpkl;
using namespace vpkl::test;

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

/// A plan over [3, 11] with buffers of its own; each test spoils one thing.
template <class Exec>
class DivergenceErrors : public CollectiveTest<Exec> {
 protected:
  using Plan = DivergencePlan<Exec>;
  static constexpr std::int64_t vocabulary = 11, max_rows = 4;

  struct Call {
    ConstRows student, teacher;
    DeviceArray<Exec, float> value_memory{"vpkl_test::value", max_rows};
    float* value = value_memory.data();
    Rows gradient;
    std::exception_ptr error;
  };

  VocabShard shard(Route route) const {
    if (route == Route::dense) return VocabShard::whole(vocabulary);
    auto const [begin, end] = even_range(vocabulary, this->comm.size(), this->comm.rank());
    VocabShard::Spec spec;
    spec.vocabulary = vocabulary;
    spec.begin = begin;
    spec.end = end;
    spec.student_width = spec.teacher_width = end - begin;
    return VocabShard::make(this->comm, spec);
  }

  typename Plan::Options options(Route route) const {
    typename Plan::Options out;
    out.route = route;
    out.max_rows = max_rows;
    return out;
  }

  void prepare(Route route, Call& call, std::int64_t rows = 3) {
    VocabShard const s = shard(route);
    std::int64_t const whole = route == Route::gathered ? vocabulary : s.width();
    call.student = {student_.data(), ElementType::fp32, s.width(),
                    RowIndex::strided(rows, s.width())};
    call.teacher = {teacher_.data(), ElementType::fp32, whole, RowIndex::strided(rows, whole)};
    call.gradient = {gradient_.data(), ElementType::fp32, s.width(),
                     RowIndex::strided(rows, s.width())};
  }

  void execute(Plan& plan, Call& call) {
    plan.execute(this->exec, call.student, call.teacher, nullptr, call.value, call.gradient,
                 call.error);
    vpkl::impl::fence(this->exec, "vpkl_test::execute");
  }

  /// A call of all ranks that must work.
  void expect_works(Plan& plan, Route route) {
    Call call;
    prepare(route, call);
    EXPECT_NO_THROW(execute(plan, call));
    for (float value : to_host(call.value_memory))
      EXPECT_EQ(value, 0.0f);
  }

  /// `spoil` the call of one rank after the other: all throw `Error`, and the plan still works.
  template <class Error = InvalidArgument>
  void expect_refused(std::function<void(Call&)> const& spoil, std::vector<std::string> texts,
                      std::vector<Route> const& on = {Route::vocab_parallel, Route::gathered}) {
    for (Route route : on) {
      Plan plan(this->exec, this->comm, shard(route), options(route));
      for (int rank = 0; rank < this->comm.size(); ++rank) {
        Call call;
        prepare(route, call);
        if (this->on_rank(rank)) spoil(call);
        auto expected = texts;
        expected.push_back(from_rank(this->comm, rank));
        expect_all_throw<Error>(
            this->comm, [&] { execute(plan, call); }, expected);
        expect_works(plan, route);
      }
    }
    // Without communication the error stays where it is.
    Plan plan(this->exec, this->comm, shard(Route::dense), options(Route::dense));
    Call call;
    prepare(Route::dense, call);
    spoil(call);
    EXPECT_THROW(execute(plan, call), Error);
    expect_works(plan, Route::dense);
  }

  DeviceArray<Exec, float> student_{"vpkl_test::student", 1000},
      teacher_{"vpkl_test::teacher", 1000}, gradient_{"vpkl_test::gradient", 1000};
};
TYPED_TEST_SUITE(DivergenceErrors, ExecutionSpaces, SpaceNames);

TYPED_TEST(DivergenceErrors, null_pointers) {
  using Call = typename TestFixture::Call;
  this->expect_refused([](Call& call) { call.student.data = nullptr; }, {"student", "null"});
  this->expect_refused([](Call& call) { call.teacher.data = nullptr; }, {"teacher", "null"});
  this->expect_refused([](Call& call) { call.value = nullptr; }, {"value", "null"});
}

TYPED_TEST(DivergenceErrors, known_teacher) {
  using Call = typename TestFixture::Call;
  DeviceArray<TypeParam, double> shares("vpkl_test::shares", 4 * this->comm.size());
  auto const execute = [&](typename TestFixture::Plan& plan, Call const& call, double* share) {
    plan.execute_known(this->exec, call.student, call.teacher, {}, nullptr, share, call.gradient,
                       call.error);
    vpkl::impl::fence(this->exec, "vpkl_test::execute_known");
  };
  Route const route = Route::vocab_parallel;
  typename TestFixture::Plan plan(this->exec, this->comm, this->shard(route), this->options(route));
  for (int rank = 0; rank < this->comm.size(); ++rank) {
    Call call;
    this->prepare(route, call);
    bool const here = this->on_rank(rank);
    expect_all_throw<InvalidArgument>(
        this->comm, [&] { execute(plan, call, here ? nullptr : shares.data()); },
        {"share: pointer is null, expected 3 numbers", from_rank(this->comm, rank)});
    if (here) call.student.type = ElementType::fp16;
    expect_all_throw<InvalidArgument>(
        this->comm, [&] { execute(plan, call, shares.data()); },
        {"student logits: type is fp16", from_rank(this->comm, rank)});
    this->expect_works(plan, route);
  }
  for (auto const& [other, divergence] :
       {std::pair(Route::gathered, Divergence::forward_kl),
        std::pair(route, Divergence::reverse_kl), std::pair(route, Divergence::jsd)}) {
    auto options = this->options(other);
    options.divergence.divergence = divergence;
    typename TestFixture::Plan refuses(this->exec, this->comm, this->shard(other), options);
    Call call;
    this->prepare(other, call);
    EXPECT_THROW(execute(refuses, call, shares.data()), InvalidArgument);
  }
}

TYPED_TEST(DivergenceErrors, types) {
  using Call = typename TestFixture::Call;
  this->expect_refused([](Call& call) { call.student.type = ElementType::bf16; },
                       {"student", "bf16", "fp32"});
  this->expect_refused([](Call& call) { call.teacher.type = ElementType::fp16; },
                       {"teacher", "fp16", "fp32"});
  this->expect_refused([](Call& call) { call.gradient.type = ElementType::bf16; },
                       {"gradient", "bf16", "fp32"});
}

// Cases 8, 21: nothing is broadcast.
TYPED_TEST(DivergenceErrors, shapes) {
  using Call = typename TestFixture::Call;
  this->expect_refused([](Call& call) { call.teacher.index.count = 1; }, {"teacher", "[1, "});
  this->expect_refused([](Call& call) { call.teacher.width = 1; }, {"teacher", ", 1]"},
                       this->comm.size() > 3
                           ? std::vector<Route>{Route::gathered}
                           : std::vector<Route>{Route::gathered, Route::vocab_parallel});
  this->expect_refused(
      [](Call& call) {
        call.teacher.width += 1;
        call.teacher.index.inner_stride += 1;
      },
      {"teacher", "expected [3, "});
  this->expect_refused(
      [](Call& call) {
        call.student.width += 2;
        call.student.index.inner_stride += 2;
      },
      {"student", "expected [3, "});
  this->expect_refused(
      [](Call& call) {
        call.gradient.width += 2;
        call.gradient.index.inner_stride += 2;
      },
      {"gradient", "expected [3, "});
  this->expect_refused([](Call& call) { call.gradient.index.count = 2; }, {"gradient", "[2, "});
  // A teacher row expanded over the batch has stride 0.
  this->expect_refused([](Call& call) { call.teacher.index.inner_stride = 0; },
                       {"teacher", "stride is 0"});
}

TYPED_TEST(DivergenceErrors, addresses_and_places) {
  using Call = typename TestFixture::Call;
  this->expect_refused(
      [](Call& call) { call.student.data = static_cast<char const*>(call.student.data) + 1; },
      {"student", "aligned"});
  this->expect_refused(
      [](Call& call) {
        call.gradient.data = const_cast<void*>(call.student.data);
        call.gradient.index.inner_stride += 8;
      },
      {"gradient", "in place"});
}

// Ranks that bring different numbers of rows send messages of the same size nevertheless.
TYPED_TEST(DivergenceErrors, row_counts) {
  using Call = typename TestFixture::Call;
  auto const rows = [](std::int64_t count) {
    return [count](Call& call) {
      for (RowIndex* index : {&call.student.index, &call.teacher.index, &call.gradient.index}) {
        index->count = count;
        index->inner = std::max<std::int64_t>(count, 1);
      }
    };
  };
  this->expect_refused(rows(5), {"5 rows", "at most the plan's 4"}, {Route::vocab_parallel});
  this->expect_refused(rows(-1), {"row count is -1"}, {Route::vocab_parallel});
  if (this->comm.size() == 1) return;
  typename TestFixture::Plan plan(this->exec, this->comm, this->shard(Route::vocab_parallel),
                                  this->options(Route::vocab_parallel));
  for (std::int64_t count : {0, 2, 4})
    for (int rank = 0; rank < this->comm.size(); ++rank) {
      Call call;
      this->prepare(Route::vocab_parallel, call);
      if (this->on_rank(rank)) rows(count)(call);
      expect_all_throw<AgreementError>(this->comm, [&] { this->execute(plan, call); },
                                       {"row counts differ", std::to_string(count), "3"});
      this->expect_works(plan, Route::vocab_parallel);
    }
}

TYPED_TEST(DivergenceErrors, a_failure_before_the_call) {
  using Call = typename TestFixture::Call;
  this->template expect_refused<FileError>(
      [](Call& call) { call.error = std::make_exception_ptr(FileError("x.h5: torn")); },
      {"x.h5: torn"});
  this->template expect_refused<OutOfMemory>(
      [](Call& call) { call.error = std::make_exception_ptr(OutOfMemory("8 bytes")); },
      {"8 bytes"});
}

// Case 10 and the rest of the options.
TYPED_TEST(DivergenceErrors, options_out_of_range) {
  using Plan = typename TestFixture::Plan;
  using Options = typename Plan::Options;
  auto const refuse = [&](std::function<void(Options&)> const& spoil,
                          std::vector<std::string> const& texts) {
    for (Route route : routes) {
      VocabShard const shard = this->shard(route);
      Options options = this->options(route);
      spoil(options);
      auto expected = texts;
      if (route != Route::dense) expected.push_back(from_rank(this->comm, 0));
      expect_all_throw<InvalidArgument>(
          this->comm, [&] { Plan(this->exec, this->comm, shard, options); }, expected);
    }
    // On one rank alone.
    VocabShard const shard = this->shard(Route::vocab_parallel);
    Options options = this->options(Route::vocab_parallel);
    if (this->on_rank(1)) spoil(options);
    auto expected = texts;
    expected.push_back(from_rank(this->comm, 1));
    expect_all_throw<InvalidArgument>(
        this->comm, [&] { Plan(this->exec, this->comm, shard, options); }, expected);
  };
  for (double temperature : {0.0, -1.0, nan_value, inf, -inf, 1e-30, 1e30, 5e-324})
    refuse([temperature](Options& o) { o.divergence.temperature = temperature; },
           {fmt::format("temperature is {},", temperature)});
  for (double beta : {0.0, 1.0, -0.5, 1.5, nan_value, inf, 1e-60})
    refuse(
        [beta](Options& o) {
          o.divergence.divergence = Divergence::jsd;
          o.divergence.beta = beta;
        },
        {fmt::format("beta is {},", beta)});
  refuse([](Options& o) { o.max_rows = -1; }, {"max_rows is -1"});
  refuse([](Options& o) { o.divergence.divergence = static_cast<Divergence>(7); },
         {"divergence is 7"});
  refuse([](Options& o) { o.student_type = static_cast<ElementType>(9); }, {"student", "9"});
  refuse([](Options& o) { o.teacher_type = static_cast<ElementType>(-1); }, {"teacher", "-1"});
}

TYPED_TEST(DivergenceErrors, options_that_differ) {
  if (this->comm.size() == 1) GTEST_SKIP() << "one rank";
  using Plan = typename TestFixture::Plan;
  using Options = typename Plan::Options;
  auto const differ = [&](std::function<void(Options&)> const& spoil, std::string const& text) {
    VocabShard const shard = this->shard(Route::vocab_parallel);
    Options options = this->options(Route::vocab_parallel);
    if (this->on_rank(-1 + this->comm.size())) spoil(options);
    expect_all_throw<AgreementError>(this->comm,
                                     [&] { Plan(this->exec, this->comm, shard, options); },
                                     {text, fmt::format("on rank {}", this->comm.size() - 1)});
  };
  differ([](Options& o) { o.divergence.divergence = Divergence::jsd; }, "divergences differ");
  differ([](Options& o) { o.divergence.temperature = 2; }, "temperatures differ: 1 on rank 0, 2");
  differ([](Options& o) { o.divergence.beta = 0.25; }, "betas differ: 0.5 on rank 0, 0.25");
  differ([](Options& o) { o.route = Route::gathered; }, "routes differ");
  differ([](Options& o) { o.student_type = ElementType::bf16; }, "student types differ");
  differ([](Options& o) { o.teacher_type = ElementType::bf16; }, "teacher types differ");
  differ([](Options& o) { o.max_rows = 9; }, "maximum rows differ: 4 on rank 0, 9");
}

TYPED_TEST(DivergenceErrors, shards_that_do_not_fit_the_route) {
  using Plan = typename TestFixture::Plan;
  if (this->comm.size() == 1) GTEST_SKIP() << "one rank";
  expect_all_throw<InvalidArgument>(this->comm,
                                    [&] {
                                      Plan(this->exec, this->comm, VocabShard::whole(11),
                                           this->options(Route::vocab_parallel));
                                    },
                                    {"rank 0 of 1"});
  VocabShard const part = this->shard(Route::vocab_parallel);
  expect_all_throw<InvalidArgument>(
      this->comm, [&] { Plan(this->exec, this->comm, part, this->options(Route::dense)); },
      {"route dense", fmt::format("{} ranks", this->comm.size())});
}

// Case 38: more rows than memory holds, on all ranks or on one; then the operator still works.
TYPED_TEST(DivergenceErrors, more_rows_than_memory) {
  using Plan = typename TestFixture::Plan;
  for (Route route : routes)
    for (std::int64_t rows :
         {std::int64_t(1) << 40, std::int64_t(1) << 59, std::numeric_limits<std::int64_t>::max()}) {
      VocabShard const shard = this->shard(route);
      auto options = this->options(route);
      options.max_rows = rows;
      // The dense route does not communicate: each rank names what it finds available.
      expect_all_throw<OutOfMemory>(route == Route::dense ? Communicator::self() : this->comm,
                                    [&] { Plan(this->exec, this->comm, shard, options); },
                                    {"bytes"});
      Plan plan(this->exec, this->comm, shard, this->options(route));
      this->expect_works(plan, route);
    }
}

// One all-gather a call, JSD over shards two, none on one rank and on the dense route.
TYPED_TEST(DivergenceErrors, collectives) {
  for (Route route : routes)
    for (Divergence divergence : divergences)
      for (std::int64_t rows : {1, 5}) {
        Problem problem(rows, 40);
        problem.options.divergence = divergence;
        Placement placement;
        placement.route = route;
        placement.rows_per_call = 2;
        std::int64_t const calls = (rows + 1) / 2;
        Outcome const got = run(this->exec, this->comm, problem, placement);
        bool const alone = this->comm.size() == 1 || route == Route::dense;
        bool const twice = route == Route::vocab_parallel && divergence == Divergence::jsd;
        std::int64_t const expected = alone ? 0 : calls * (twice ? 2 : 1);
        EXPECT_EQ(got.communication.all_gathers, expected) << placement.describe();
        EXPECT_EQ(got.plan.collectives, expected);
        EXPECT_EQ(got.communication.records, 0);
        EXPECT_EQ(got.communication.all_reduces, 0);
        EXPECT_EQ(got.plan.calls, calls);
        EXPECT_EQ(got.plan.rows, rows);
      }
}

// Texts of options are read back, and nothing else is accepted.
TEST(DivergenceOptions, texts) {
  for (Divergence d : divergences)
    EXPECT_EQ(divergence_from_string(to_string(d)), d);
  for (Route r : routes)
    EXPECT_EQ(route_from_string(to_string(r)), r);
  for (char const* text : {"", "kl", "JSD", "forward_kl "})
    EXPECT_THROW(divergence_from_string(text), InvalidArgument);
  for (char const* text : {"", "vocab-parallel", "Dense"})
    EXPECT_THROW(route_from_string(text), InvalidArgument);
}

}  // namespace
