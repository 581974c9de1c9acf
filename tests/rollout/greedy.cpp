// SPDX-License-Identifier: Apache-2.0
// Greedy selection over shards: one answer, the same on every rank.
#include "support/harness.hpp"
#include "support/together.hpp"

#include <vpkl/rollout/greedy.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

using namespace vpkl;
using namespace vpkl::test;

namespace {

using Ids = std::vector<std::int64_t>;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

template <class Exec>
class GreedyTokens : public CollectiveTest<Exec> {
 protected:
  VocabShard shard(std::int64_t vocabulary, std::vector<std::int64_t> const& bounds) const {
    VocabShard::Spec spec;
    spec.vocabulary = vocabulary;
    spec.begin = bounds[this->comm.rank()];
    spec.end = bounds[this->comm.rank() + 1];
    spec.student_width = spec.teacher_width = spec.end - spec.begin;
    return VocabShard::make(this->comm, spec);
  }

  /// This rank's columns of whole rows; columns beyond the shard would win if they counted.
  Tensor<Exec> columns(VocabShard const& shard, ElementType type, std::vector<float> const& whole,
                       std::int64_t padding = 0, RowForm form = RowForm::strided) const {
    std::int64_t const rows = static_cast<std::int64_t>(whole.size()) / shard.vocabulary();
    Tensor<Exec> tensor(type, {rows, shard.width() + padding, padding, 1, form});
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < tensor.width(); ++c)
        tensor.set(r, c,
                   c < shard.width() ? whole[r * shard.vocabulary() + shard.begin() + c]
                   : c % 2           ? nan_value
                                     : inf);
    tensor.to_device();
    return tensor;
  }

  Ids select(std::vector<float> const& whole, std::int64_t vocabulary,
             std::vector<std::int64_t> const& bounds, ElementType type = ElementType::fp32,
             std::int64_t padding = 0, RowForm form = RowForm::strided) const {
    VocabShard const s = shard(vocabulary, bounds);
    std::int64_t const rows = static_cast<std::int64_t>(whole.size()) / vocabulary;
    auto const logits = columns(s, type, whole, padding, form);
    return greedy_tokens(this->exec, this->comm, s, logits.rows(0, rows));
  }

  Ids select(std::vector<float> const& row) const {
    auto const vocabulary = static_cast<std::int64_t>(row.size());
    return select(row, vocabulary, even_bounds(vocabulary, this->comm.size()));
  }
};

TYPED_TEST_SUITE(GreedyTokens, ExecutionSpaces, SpaceNames);

// Case 22.
TYPED_TEST(GreedyTokens, the_smaller_of_two_equals) {
  EXPECT_EQ(this->select({0, 0, 0, 5, 0, 0, 5, 0}), (Ids{3}));
  for (std::int64_t a = 0; a < 8; ++a)
    for (std::int64_t b = 0; b < 8; ++b) {
      std::vector<float> row(8, -3);
      row[a] = row[b] = -1;
      EXPECT_EQ(this->select(row), (Ids{std::min(a, b)})) << a << " " << b;
    }
}

TYPED_TEST(GreedyTokens, zeros_of_either_sign_are_equal) {
  EXPECT_EQ(this->select({-1, -0.0f, -1, -1, 0.0f, -1}), (Ids{1}));
  EXPECT_EQ(this->select({-1, 0.0f, -1, -1, -0.0f, -1}), (Ids{1}));
  EXPECT_EQ(this->select({-0.0f, 0.0f}), (Ids{0}));
}

TYPED_TEST(GreedyTokens, infinite_scores) {
  EXPECT_EQ(this->select({0, -inf, inf, 3, inf}), (Ids{2}));
  EXPECT_EQ(this->select({-inf, -inf, -inf, -3e38f, -inf}), (Ids{3}));
}

TYPED_TEST(GreedyTokens, any_layout_type_and_sharding) {
  Random random(31);
  std::int64_t const rows = 7, vocabulary = 41;
  for (ElementType type : element_types)
    for (auto const& bounds : interesting_bounds(vocabulary, this->comm.size()))
      for (RowForm form : {RowForm::strided, RowForm::nested, RowForm::offsets})
        for (std::int64_t padding : {0, 5}) {
          std::vector<float> whole;
          Ids expected;
          for (std::int64_t r = 0; r < rows; ++r) {
            // Few levels, so that there are ties.
            for (std::int64_t c = 0; c < vocabulary; ++c)
              whole.push_back(static_cast<float>(uniform(random, -9, 3)) / 4);
            auto const begin = whole.end() - vocabulary;
            expected.push_back(std::max_element(begin, whole.end()) - begin);
          }
          EXPECT_EQ(this->select(whole, vocabulary, bounds, type, padding, form), expected)
              << fmt::format("{} [{}] {} padding {}", to_string(type), fmt::join(bounds, ", "),
                             to_string(form), padding);
        }
}

TYPED_TEST(GreedyTokens, equal_after_rounding_is_equal) {
  EXPECT_EQ(
      this->select({1, 1.001f, 1.0015f}, 3, even_bounds(3, this->comm.size()), ElementType::bf16),
      (Ids{0}));
  EXPECT_EQ(this->select({1, 1.001f, 1.0015f}, 3, even_bounds(3, this->comm.size())), (Ids{2}));
}

// Ids beyond 2^24 have no exact float.
TYPED_TEST(GreedyTokens, large_id) {
  std::int64_t const vocabulary = (std::int64_t(1) << 24) + 10, best = 16'777'217;
  VocabShard const shard = this->shard(vocabulary, even_bounds(vocabulary, this->comm.size()));
  Kokkos::View<bfloat16**, Kokkos::LayoutRight, typename TypeParam::memory_space> const logits(
      Kokkos::view_alloc("logits", Kokkos::WithoutInitializing), 1, shard.width());
  auto const host = Kokkos::create_mirror_view(logits);
  for (std::int64_t c = 0; c < shard.width(); ++c)
    host(0, c) = bfloat16::from_float(shard.begin() + c == best ? 1.0f : 0.0f);
  Kokkos::deep_copy(logits, host);
  EXPECT_EQ(greedy_tokens(this->exec, this->comm, shard, const_rows(logits)), (Ids{best}));
}

TYPED_TEST(GreedyTokens, no_rows) {
  EXPECT_EQ(this->select({}, 8, even_bounds(8, this->comm.size())), Ids{});
}

TYPED_TEST(GreedyTokens, one_all_gather) {
  CommunicationCounters const before = this->comm.counters();
  VocabShard const shard = this->shard(9, even_bounds(9, this->comm.size()));
  auto const logits = this->columns(shard, ElementType::fp32, std::vector<float>(27, 0.5f));
  CommunicationCounters const start = this->comm.counters();
  greedy_tokens(this->exec, this->comm, shard, logits.rows(0, 3));
  CommunicationCounters const end = this->comm.counters();
  bool const several = this->comm.size() > 1;
  EXPECT_EQ(end.records - start.records, several ? 1 : 0);
  EXPECT_EQ(end.all_gathers - before.all_gathers, several ? 1 : 0);
  EXPECT_EQ(end.all_gather_bytes - before.all_gather_bytes, several ? 3 * 16 : 0);
}

// One defined error on every rank, whichever shard holds the row's trouble.
TYPED_TEST(GreedyTokens, rows_without_an_answer) {
  std::int64_t const vocabulary = 6;
  auto const bounds = even_bounds(vocabulary, this->comm.size());
  std::vector<float> whole(3 * vocabulary, 0.0f);
  std::fill(whole.begin() + vocabulary, whole.begin() + 2 * vocabulary, -inf);
  expect_all_throw<NumericalError>(this->comm, [&] { this->select(whole, vocabulary, bounds); },
                                   {"row 1", "-inf everywhere"});
  expect_all_throw<NumericalError>(
      this->comm, [&] { this->select(whole, vocabulary, bounds, ElementType::bf16, 4); },
      {"row 1", "-inf everywhere"});
  for (std::int64_t id = 0; id < vocabulary; ++id)
    for (float rest : {0.0f, -inf, inf}) {
      std::vector<float> row(vocabulary, rest);
      row[id] = nan_value;
      expect_all_throw<NumericalError>(this->comm, [&] { this->select(row); }, {"row 0", "NaN"});
    }
  EXPECT_EQ(this->select({0, 1, 0, 0, 0, 0}), (Ids{1}));
}

TYPED_TEST(GreedyTokens, one_rank_is_wrong) {
  auto const bounds = even_bounds(12, this->comm.size());
  VocabShard const shard = this->shard(12, bounds);
  auto const logits = this->columns(shard, ElementType::fp32, std::vector<float>(24, 0.25f));
  for (int bad_rank = 0; bad_rank < this->comm.size(); ++bad_rank) {
    bool const here = this->on_rank(bad_rank);
    auto const bent = [&](auto&& bend) {
      ConstRows rows = logits.rows(0, 2);
      if (here) bend(rows);
      return [this, &shard, rows] { greedy_tokens(this->exec, this->comm, shard, rows); };
    };
    std::string const blame = from_rank(this->comm, bad_rank);
    expect_all_throw<InvalidArgument>(this->comm, bent([](ConstRows& r) { r.data = nullptr; }),
                                      {blame, "data is null"});
    expect_all_throw<InvalidArgument>(this->comm, bent([](ConstRows& r) { r.width = 2; }),
                                      {blame, "2 columns wide"});
    expect_all_throw<InvalidArgument>(this->comm, bent([](ConstRows& r) { r.index.count = -1; }),
                                      {blame, "row count is -1"});
    expect_all_throw<InvalidArgument>(this->comm,
                                      bent([](ConstRows& r) { r.index.inner_stride = 1; }),
                                      {blame, "row stride is 1"});
    if (this->comm.size() == 1) continue;
    expect_all_throw<AgreementError>(this->comm, bent([](ConstRows& r) { r.index.count = 1; }),
                                     {"row counts differ"});
    VocabShard const alone = VocabShard::whole(12);
    Tensor<TypeParam> const wide(ElementType::fp32, {2, 12});
    expect_all_throw<InvalidArgument>(
        this->comm,
        [&] {
          greedy_tokens(this->exec, this->comm, here ? alone : shard,
                        here ? ConstRows(wide.rows(0, 2)) : ConstRows(logits.rows(0, 2)));
        },
        {blame, "the shard is rank 0 of 1"});
    EXPECT_EQ(greedy_tokens(this->exec, this->comm, shard, logits.rows(0, 2)), (Ids{0, 0}));
  }
}

}  // namespace
