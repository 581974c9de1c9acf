// SPDX-License-Identifier: Apache-2.0
// What is wrong on one rank fails on all, in time, and the next call works.
#include "session.hpp"

#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <limits>

using namespace vpkl;
using namespace vpkl::test;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

template <class Exec>
class StreamedLossFailures : public CollectiveTest<Exec> {
 protected:
  static MicroBatch batch() {
    Random random(21);
    MicroBatch out = random_batch(random, 2, 6, 23);
    for (std::size_t i = 0; i < out.mask.size(); ++i)
      out.mask[i] = i % 4 != 1;
    return out;
  }

  /// The call failed everywhere; the next one gives the right result.
  void expect_recovered(Session<Exec>& session, MicroBatch const& given, Setup const& setup) const {
    EXPECT_FALSE(session.cache.holds_rows());
    EXPECT_EQ(session.cache.counters().bytes, 0u);
    EXPECT_TRUE(this->comm.alive());
    session.store();
    expect_right(this->comm, given, session.run(), "after a failure: " + setup.describe());
  }
};

TYPED_TEST_SUITE(StreamedLossFailures, ExecutionSpaces, SpaceNames);

// Cases 10 and 21: also when one rank alone has the bad option.
TYPED_TEST(StreamedLossFailures, options) {
  struct Bad {
    std::string text;
    DivergenceOptions options;
    std::int64_t width = 4;
  };
  std::vector<Bad> const all = {{"temperature is 0", {Divergence::forward_kl, 0.5, 0}},
                                {"temperature is -1", {Divergence::forward_kl, 0.5, -1}},
                                {"temperature is nan", {Divergence::jsd, 0.5, nan_value}},
                                {"temperature is inf", {Divergence::reverse_kl, 0.5, infinity}},
                                {"beta is 0", {Divergence::jsd, 0, 1}},
                                {"beta is 1", {Divergence::jsd, 1, 1}},
                                {"beta is nan", {Divergence::jsd, nan_value, 1}},
                                {"chunk width is 0", {}, 0},
                                {"chunk width is -4", {}, -4}};
  Session<TypeParam> const good(this->exec, this->comm, this->batch(), {});
  for (Route route : routes)
    for (Bad const& bad : all)
      for (int first = 0; first <= this->comm.size(); ++first) {
        bool const everywhere = first == this->comm.size() || route == Route::dense;
        typename StreamedLoss<TypeParam>::Options options;
        options.route = route;
        if (everywhere || this->on_rank(first)) {
          options.divergence = bad.options;
          options.chunk_width = bad.width;
        }
        auto const shard = route == Route::dense ? VocabShard::whole(23) : good.shard;
        expect_all_throw<InvalidArgument>(
            this->comm, [&] { StreamedLoss<TypeParam>(this->comm, shard, options); }, {bad.text});
      }
}

/// One rank's mistake; `bend` is called there alone.
template <class Exec>
struct Mistake {
  std::string text;
  std::function<void(Session<Exec>&)> bend;
  bool agreement = false;  ///< the mistake is only seen beside the other ranks
};

template <class Exec>
std::vector<Mistake<Exec>> mistakes() {
  using S = Session<Exec>;
  static std::vector<std::uint8_t> const other_mask{0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1};
  static std::vector<std::int64_t> const offsets(12, 0);
  return {
      {"response mask: data is null", [](S& s) { s.mask.data = nullptr; }},
      {"response mask: shape is [-1, 6]", [](S& s) { s.mask.batch = -1; }},
      {"response mask: row stride is 5", [](S& s) { s.mask.row_stride = 5; }},
      {"student logits: shape is [12, ", [](S& s) { s.mask.length = 3; }},
      {"masks differ: ", [](S& s) { s.mask.data = other_mask.data(); }, true},
      {"student logits: data is null", [](S& s) { s.student.data = nullptr; }},
      {"student logits: shape is [12, 1000]",
       [](S& s) {
         s.student.width = 1000;
         s.student.index.inner_stride = s.student.index.outer_stride = 1000;
       }},
      {"student logits: shape is [11, ", [](S& s) { s.student.index.count = 11; }},
      {"student logits: row count is -1", [](S& s) { s.student.index.count = -1; }},
      {"student logits: width is -2", [](S& s) { s.student.width = -2; }},
      {"student logits: row stride is 1 elements", [](S& s) { s.student.index.inner_stride = 1; }},
      {"student logits: batch stride is 2", [](S& s) { s.student.index.outer_stride = 2; }},
      {"student logits: 2 rows per outer step", [](S& s) { s.student.index.inner = 2; }},
      {"student logits: rows have explicit offsets",
       [](S& s) { s.student.index.offsets = offsets.data(); }},
      {"not aligned", [](S& s) { s.student.data = static_cast<char const*>(s.student.data) + 1; }},
      {"gradient: type is fp16", [](S& s) { s.gradient.type = ElementType::fp16; }},
      {"gradient: shape is [11, ", [](S& s) { s.gradient.index.count = 11; }},
      {"gradient: shape is [0, ", [](S& s) { s.gradient.index.count = 0; }},
      {"gradient: shape is [1, ", [](S& s) { s.gradient.index.count = 1; }},
      {"gradient: shape is [12, 1000]",
       [](S& s) {
         s.gradient.width = 1000;
         s.gradient.index.inner_stride = s.gradient.index.outer_stride = 1000;
       }},
      {"gradient: rows have explicit offsets",
       [](S& s) { s.gradient.index.offsets = offsets.data(); }},
      {"gradient: starts at the student's logits",
       [](S& s) {
         s.gradient.data = const_cast<void*>(s.student.data);
         s.gradient.index.outer_stride += 1;
       }},
      {"gradients asked differ", [](S& s) { s.gradient = Rows{}; }, true},
      {"student types differ", [](S& s) { s.student.type = s.gradient.type = ElementType::bf16; },
       true},
      {"teacher cache: it is empty", [](S& s) { s.cache.free(); }},
      {"loss scale is nan", [](S& s) { s.normalization.loss_scale = nan_value; }},
      {"loss scale is 0", [](S& s) { s.normalization.loss_scale = 0; }},
      {"the weight of a row is", [](S& s) { s.normalization.loss_scale = 1e-60; }},
      {"the weight of a row is", [](S& s) { s.normalization.loss_scale = 1e60; }},
      {"loss scales differ: ", [](S& s) { s.normalization.loss_scale = 2; }, true},
      {"gradient accumulation steps are 0",
       [](S& s) { s.normalization.gradient_accumulation_steps = 0; }},
      {"gradient accumulation steps differ",
       [](S& s) { s.normalization.gradient_accumulation_steps = 3; }, true},
      {"global divisor is 0",
       [](S& s) { s.normalization.kind = Normalization::Kind::global_divisor; }},
      {"normalizations differ",
       [](S& s) {
         s.normalization.kind = Normalization::Kind::global_divisor;
         s.normalization.divisor = 5;
       },
       true},
  };
}

TYPED_TEST(StreamedLossFailures, arguments_of_one_rank) {
  MicroBatch const given = this->batch();
  for (Route route : {Route::vocab_parallel, Route::gathered})
    for (PlanKind plan : {PlanKind::rows, PlanKind::chunks}) {
      Setup setup;
      setup.route = route;
      setup.plan = plan;
      setup.chunk_width = 4;
      Session<TypeParam> session(this->exec, this->comm, given, setup);
      auto const good_student = session.student;
      auto const good_gradient = session.gradient;
      auto const good_mask = session.mask;
      int bad_rank = 0;
      for (auto const& mistake : mistakes<TypeParam>()) {
        if (mistake.agreement && this->comm.size() == 1) continue;
        ++bad_rank;
        SCOPED_TRACE(fmt::format("{} on rank {}: {}", setup.describe(),
                                 bad_rank % this->comm.size(), mistake.text));
        session.store();
        if (this->on_rank(bad_rank)) mistake.bend(session);
        auto const call = [&] { session.compute(); };
        if (mistake.agreement)
          expect_all_throw<AgreementError>(
              this->comm, call,
              {mistake.text, "rank 0",
               fmt::format("rank {}", std::max(1, bad_rank % this->comm.size()))});
        else
          expect_all_throw<InvalidArgument>(this->comm, call,
                                            {from_rank(this->comm, bad_rank), mistake.text});
        session.student = good_student;
        session.gradient = good_gradient;
        session.mask = good_mask;
        session.normalization = given.normalization;
        this->expect_recovered(session, given, setup);
      }
    }
}

// What only a packed gradient can get wrong, each rank in turn.
TYPED_TEST(StreamedLossFailures, packed_gradient) {
  using S = Session<TypeParam>;
  MicroBatch const given = this->batch();
  static std::vector<std::int64_t> const offsets(12, 0);
  struct Bad {
    std::string text;
    PlanKind plan;
    std::function<void(S&)> bend;
  };
  std::string const shape = fmt::format("gradient: shape is [{}, ", given.tokens());
  std::vector<Bad> const all = {
      // Chunks compute rows that do not count, too: there is no place for those.
      {shape, PlanKind::chunks, [](S&) {}},
      {"gradient: rows have explicit offsets", PlanKind::rows,
       [](S& s) { s.gradient.index.offsets = offsets.data(); }},
      {"gradient: starts at the student's logits", PlanKind::rows,
       [](S& s) { s.gradient.data = const_cast<void*>(s.student.data); }},
      {"gradient: type is fp16", PlanKind::rows, [](S& s) { s.gradient.type = ElementType::fp16; }},
      {"gradient: row stride is 1 elements", PlanKind::rows,
       [](S& s) { s.gradient.index.inner_stride = 1; }},
  };
  for (Bad const& bad : all)
    for (int rank = 0; rank < this->comm.size(); ++rank) {
      SCOPED_TRACE(fmt::format("{} on rank {}", bad.text, rank));
      Setup setup;
      setup.plan = bad.plan;
      setup.packed = true;
      S session(this->exec, this->comm, given, setup);
      session.store();
      if (this->on_rank(rank)) bad.bend(session);
      expect_all_throw<InvalidArgument>(this->comm, [&] { session.compute(); }, {bad.text});
      EXPECT_FALSE(session.cache.holds_rows());
      if (bad.plan == PlanKind::chunks) break;
    }
}

// One rank asks for a packed gradient of no rows, another for none: not to be told apart.
TYPED_TEST(StreamedLossFailures, packed_gradient_of_no_rows) {
  MicroBatch given = this->batch();
  std::fill(given.mask.begin(), given.mask.end(), std::uint8_t{0});
  Setup setup;
  setup.packed = true;
  Session<TypeParam> session(this->exec, this->comm, given, setup);
  session.store();
  ASSERT_NE(session.gradient.data, nullptr);
  if (this->on_rank(0)) session.gradient = Rows{};
  EXPECT_EQ(session.compute().tokens, 0);
  EXPECT_TRUE(session.cache.holds_rows());
}

// The dense route makes no communication: an error stays with the rank that has it.
TYPED_TEST(StreamedLossFailures, arguments_of_the_dense_route) {
  MicroBatch const given = this->batch();
  Setup setup;
  setup.route = Route::dense;
  Session<TypeParam> session(this->exec, this->comm, given, setup);
  for (auto const& mistake : mistakes<TypeParam>()) {
    if (mistake.agreement) continue;
    SCOPED_TRACE(mistake.text);
    Session<TypeParam> bent(this->exec, this->comm, given, setup);
    bent.store();
    mistake.bend(bent);
    expect_all_throw<InvalidArgument>(Communicator::self(), [&] { bent.compute(); },
                                      {mistake.text});
    EXPECT_FALSE(bent.cache.holds_rows());
  }
  session.store();
  expect_right(this->comm, given, session.run(), "dense");
}

// Case 20.
TYPED_TEST(StreamedLossFailures, masks_that_differ) {
  if (this->comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  Random random(22);
  MicroBatch given = random_batch(random, 1, 4, 23);
  for (PlanKind plan : {PlanKind::rows, PlanKind::chunks}) {
    given.mask = {1, 1, 1, 1};
    if (this->on_rank(0)) given.mask = {1, 1, 0, 0};
    Setup setup;
    setup.plan = plan;
    setup.chunk_width = 2;
    Session<TypeParam> session(this->exec, this->comm, given, setup);
    session.store();
    expect_all_throw<AgreementError>(this->comm, [&] { session.compute(); },
                                     {"masks differ", "rank 0", "rank 1"});
  }
}

// Whole and sound on each rank by itself.
TYPED_TEST(StreamedLossFailures, extents_that_differ) {
  if (this->comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  Random random(23);
  bool const here = this->on_rank(1);
  MicroBatch given = random_batch(random, here ? 1 : 2, here ? 6 : 3, 23);
  Session<TypeParam> session(this->exec, this->comm, given, {});
  // A cache of this rank's own.
  TeacherCache<TypeParam> own(Communicator::self(), {});
  session.store(own);
  expect_all_throw<AgreementError>(this->comm,
                                   [&] {
                                     session.loss.compute(this->exec, session.student, own,
                                                          session.mask, {}, session.gradient);
                                   },
                                   {"batch sizes differ: 2 on rank 0, 1 on rank 1"});
  EXPECT_FALSE(own.holds_rows());
}

TYPED_TEST(StreamedLossFailures, options_that_differ) {
  if (this->comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  struct Difference {
    std::string text;
    std::function<void(MicroBatch&, Setup&)> make;
  };
  for (Difference const &difference : std::vector<Difference>{
           {"plans differ", [](MicroBatch&, Setup&s) { s.plan = PlanKind::chunks; }},
           {"chunk widths differ: 256 on rank 0, 3 on rank 1",
            [](MicroBatch&, Setup&s) { s.chunk_width = 3; }},
           {"skipping differ", [](MicroBatch&, Setup&s) { s.skip = false; }},
           {"divergences differ",
            [](MicroBatch&b, Setup&) { b.problem.options.divergence = Divergence::jsd; }},
           {"temperatures differ: 1 on rank 0, 2 on rank 1",
            [](MicroBatch&b, Setup&) { b.problem.options.temperature = 2; }},
           {"betas differ", [](MicroBatch&b, Setup&) { b.problem.options.beta = 0.1; }}}) {
    MicroBatch given = this->batch();
    Setup setup;
    if (this->on_rank(1)) difference.make(given, setup);
    Session<TypeParam> session(this->exec, this->comm, given, setup);
    session.store();
    expect_all_throw<AgreementError>(this->comm, [&] { session.compute(); }, {difference.text});
    EXPECT_FALSE(session.cache.holds_rows());
  }
}

// Cases 8 and 21: a cache of another batch, length or width is refused, not spread.
TYPED_TEST(StreamedLossFailures, cache_of_another_shape) {
  MicroBatch const given = this->batch();
  for (Route route : routes) {
    Setup setup;
    setup.route = route;
    Session<TypeParam> session(this->exec, this->comm, given, setup);
    std::int64_t const width = route == Route::gathered ? 23 : session.shard.teacher_width();
    struct Shape {
      std::int64_t batch, length, width;
    };
    for (Shape const shape : {Shape{1, 6, width}, Shape{2, 1, width}, Shape{2, 6, 1},
                              Shape{2, 6, width + 1}, Shape{3, 4, width}, Shape{6, 2, width}})
      for (int bad_rank = 0; bad_rank < this->comm.size(); ++bad_rank) {
        if (route == Route::dense && bad_rank > 0) continue;
        bool const here = route == Route::dense || this->on_rank(bad_rank);
        SCOPED_TRACE(fmt::format("{} [{}, {}, {}]", to_string(route), shape.batch, shape.length,
                                 shape.width));
        TeacherCache<TypeParam> cache(Communicator::self(), {});
        if (here) {
          std::int64_t const rows = shape.batch * shape.length;
          Tensor<TypeParam> const logits(ElementType::fp32, {rows, shape.width});
          cache.store(this->exec, logits.rows(0, rows), shape.batch, shape.length);
        } else {
          Tensor<TypeParam> const logits(ElementType::fp32, {12, width});
          cache.store(this->exec, logits.rows(0, 12), 2, 6);
        }
        std::string const blame = route == Route::dense ? "" : from_rank(this->comm, bad_rank);
        std::string const found = fmt::format("teacher cache: shape is [{}, {}, {}]", shape.batch,
                                              shape.length, shape.width);
        auto const call = [&] {
          session.loss.compute(this->exec, session.student, cache, session.mask, {},
                               session.gradient);
        };
        // Widths differ between ranks, so that only the failing rank's message is known there.
        expect_all_throw<InvalidArgument>(
            this->comm, call, {blame, here ? found : std::string("teacher cache: shape")});
        EXPECT_FALSE(cache.holds_rows());
      }
    session.store();
    expect_right(this->comm, given, session.run(), setup.describe());
  }
}

TYPED_TEST(StreamedLossFailures, caches_that_differ) {
  if (this->comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  MicroBatch const given = this->batch();
  Session<TypeParam> session(this->exec, this->comm, given, {});
  typename TeacherCache<TypeParam>::Options type, mode;
  if (this->on_rank(1)) {
    type.store_type = ElementType::fp16;
    mode.mode = CacheMode::response;
  }
  for (auto const& [options, text] :
       {std::pair(type, "teacher types differ"), std::pair(mode, "cache modes differ")}) {
    TeacherCache<TypeParam> cache(Communicator::self(), options);
    session.store(cache);
    expect_all_throw<AgreementError>(this->comm,
                                     [&] {
                                       session.loss.compute(this->exec, session.student, cache,
                                                            session.mask, {}, session.gradient);
                                     },
                                     {text});
    EXPECT_FALSE(cache.holds_rows());
  }
}

// The statistics of one rank's cache do not fit the loss.
TYPED_TEST(StreamedLossFailures, statistics_of_another_kind) {
  if (this->comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  MicroBatch const given = this->batch();
  Setup setup;
  setup.teacher_padding = 2;
  Session<TypeParam> session(this->exec, this->comm, given, setup);
  std::int64_t const width = session.shard.width();
  struct Bad {
    std::optional<TeacherStatistics> statistics;
    std::string text;
    bool agreement = false;
  };
  for (Bad const& bad : {Bad{TeacherStatistics{2, width},
                             "its statistics are of temperature 2, expected the loss's 1"},
                         Bad{TeacherStatistics{1, width - 1}, "columns, expected the shard's"},
                         Bad{TeacherStatistics{1, -1}, "columns, expected the shard's"},
                         Bad{std::nullopt, "use of statistics differ", true}})
    for (int rank = 0; rank < this->comm.size(); ++rank) {
      typename TeacherCache<TypeParam>::Options options;
      options.statistics = TeacherStatistics{1, width};
      if (this->on_rank(rank)) options.statistics = bad.statistics;
      TeacherCache<TypeParam> cache(Communicator::self(), options);
      session.store(cache);
      auto const call = [&] {
        session.loss.compute(this->exec, session.student, cache, session.mask, {},
                             session.gradient);
      };
      if (bad.agreement)
        expect_all_throw<AgreementError>(this->comm, call, {bad.text});
      else
        expect_all_throw<InvalidArgument>(this->comm, call,
                                          {from_rank(this->comm, rank), bad.text});
      EXPECT_FALSE(cache.holds_rows());
    }
  session.store();
  expect_right(this->comm, given, session.run(), setup.describe());
}

// A failure half-way, after some chunks have been exchanged: one rank's cache lacks a row.
TYPED_TEST(StreamedLossFailures, a_fetch_fails_in_the_middle) {
  MicroBatch given = this->batch();
  std::fill(given.mask.begin(), given.mask.end(), std::uint8_t{1});
  for (Route route : {Route::vocab_parallel, Route::gathered})
    for (Divergence divergence : {Divergence::forward_kl, Divergence::jsd})
      for (PlanKind plan : {PlanKind::rows, PlanKind::chunks})
        for (int bad_rank = 0; bad_rank < this->comm.size(); ++bad_rank)
          for (std::int64_t missing : {0, 10}) {
            given.problem.options.divergence = divergence;
            Setup setup;
            setup.route = route;
            setup.plan = plan;
            setup.chunk_width = 2;
            setup.cache = CacheMode::response;
            SCOPED_TRACE(
                fmt::format("{} row {} missing on rank {}", setup.describe(), missing, bad_rank));
            Session<TypeParam> session(this->exec, this->comm, given, setup);
            std::vector<std::int64_t> kept;
            for (std::int64_t row = 0; row < 12; ++row)
              if (row % 6 != 5 && !(this->on_rank(bad_rank) && row == missing)) kept.push_back(row);
            typename TeacherCache<TypeParam>::Options options;
            options.mode = CacheMode::response;
            if (missing == 10) options.statistics = TeacherStatistics{};
            TeacherCache<TypeParam> cache(Communicator::self(), options);
            std::int64_t const width =
                route == Route::gathered ? 23 : session.shard.teacher_width();
            Tensor<TypeParam> const logits(ElementType::fp32, {12, width});
            cache.store(this->exec, logits.rows(0, 12), 2, 6, kept);
            expect_all_throw<InvalidArgument>(
                this->comm,
                [&] {
                  session.loss.compute(this->exec, session.student, cache, session.mask, {},
                                       session.gradient);
                },
                {from_rank(this->comm, bad_rank), fmt::format("row {} ", missing), "not held"});
            EXPECT_FALSE(cache.holds_rows());
            session.store();
            expect_right(this->comm, given, session.run(), "after a failed fetch");
          }
}

// A shard of another group of ranks.
TYPED_TEST(StreamedLossFailures, shard_of_other_ranks) {
  if (this->comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  MicroBatch const given = this->batch();
  Session<TypeParam> session(this->exec, this->comm, given, {});
  VocabShard const alone = VocabShard::whole(23);
  StreamedLoss<TypeParam> loss(this->comm, this->on_rank(1) ? alone : session.shard, {});
  Tensor<TypeParam> const logits(ElementType::fp32, {12, 23});
  TeacherCache<TypeParam> cache(Communicator::self(), {});
  bool const here = this->on_rank(1);
  if (here)
    cache.store(this->exec, logits.rows(0, 12), 2, 6);
  else
    session.store(cache);
  Tensor<TypeParam> const gradient(ElementType::fp32, {12, 23});
  expect_all_throw<InvalidArgument>(
      this->comm,
      [&] {
        loss.compute(this->exec, here ? ConstRows(logits.rows(0, 12)) : session.student, cache,
                     session.mask, {}, here ? gradient.rows(0, 12) : session.gradient);
      },
      {from_rank(this->comm, 1), "the shard is rank 0 of 1"});
  EXPECT_FALSE(cache.holds_rows());
}

TYPED_TEST(StreamedLossFailures, check_batch) {
  MicroBatch const given = this->batch();
  Session<TypeParam> session(this->exec, this->comm, given, {});
  std::vector<std::int32_t> tokens(12);
  for (int i = 0; i < 12; ++i)
    tokens[i] = 100 + i;
  EXPECT_NO_THROW(session.loss.check_batch(tokens.data(), session.mask));
  EXPECT_NO_THROW(session.loss.check_batch(nullptr, {nullptr, 0, 6, 0}));
  bool const here = this->on_rank(1);
  expect_all_throw<InvalidArgument>(
      this->comm, [&] { session.loss.check_batch(here ? nullptr : tokens.data(), session.mask); },
      {from_rank(this->comm, 1), "tokens", "null"});
  ResponseMask mask = session.mask;
  if (here) mask.data = nullptr;
  expect_all_throw<InvalidArgument>(this->comm,
                                    [&] { session.loss.check_batch(tokens.data(), mask); },
                                    {from_rank(this->comm, 1), "response mask: data is null"});
  if (this->comm.size() == 1) return;

  auto const differ = [&](std::string const& text, std::vector<std::int32_t> const& ids,
                          ResponseMask const& m) {
    expect_all_throw<AgreementError>(this->comm, [&] { session.loss.check_batch(ids.data(), m); },
                                     {text, "rank 0", "rank 1"});
  };
  auto other = tokens;
  if (here) other[7] = 1;
  differ("tokens differ", other, session.mask);
  std::vector<std::uint8_t> bytes = given.mask;
  if (here) bytes[7] ^= 1;
  differ("masks differ", tokens, {bytes.data(), 2, 6, 0});
  differ("batch sizes differ", tokens, {bytes.data(), here ? 1 : 2, 6, 0});
  differ("sequence lengths differ", tokens, {bytes.data(), 2, here ? 5 : 6, 0});
  EXPECT_NO_THROW(session.loss.check_batch(tokens.data(), session.mask));
}

// Case 38: after memory that cannot be had, the loss still works.
TYPED_TEST(StreamedLossFailures, memory_that_cannot_be_had) {
  MicroBatch const given = this->batch();
  Session<TypeParam> session(this->exec, this->comm, given, {});
  Kokkos::View<std::int64_t*, typename TypeParam::memory_space> const offsets("offsets", 12);
  ConstRows huge = session.student;
  huge.width = std::int64_t(1) << 50;
  huge.index.offsets = offsets.data();
  session.store();
  expect_all_throw<OutOfMemory>(this->comm, [&] { session.cache.store(this->exec, huge, 2, 6); },
                                {from_rank(this->comm, 0), "12 rows", "bytes"});
  this->expect_recovered(session, given, {});
}

}  // namespace
