// SPDX-License-Identifier: Apache-2.0
#include <support/together.hpp>

#include <vpkl/vocab/shard.hpp>

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace {

using namespace vpkl;
using namespace vpkl::test;

class Shard : public CollectiveTest<Kokkos::DefaultHostExecutionSpace> {
 protected:
  VocabShard::Spec even(std::int64_t vocabulary) const {
    auto const [begin, end] = even_range(vocabulary, comm.size(), comm.rank());
    return {vocabulary, begin, end, end - begin, end - begin, {}};
  }
  /// One rank changes its spec; every rank must refuse.
  template <class Error, class F>
  void refused(int rank, F&& change, std::vector<std::string> const& texts) {
    VocabShard::Spec spec = even(12);
    if (on_rank(rank)) change(spec);
    expect_all_throw<Error>(
        comm, [&] { VocabShard::make(comm, spec); }, texts);
  }
};

TEST(EvenRange, tiles_and_differs_by_at_most_one) {
  for (std::int64_t vocabulary : {1, 2, 3, 7, 1031, 151936})
    for (int ranks : {1, 2, 3, 4, 7}) {
      std::int64_t next = 0;
      for (int r = 0; r < ranks; ++r) {
        auto const [begin, end] = even_range(vocabulary, ranks, r);
        EXPECT_EQ(begin, next);
        EXPECT_GE(end - begin, vocabulary / ranks);
        EXPECT_LE(end - begin, vocabulary / ranks + 1);
        next = end;
      }
      EXPECT_EQ(next, vocabulary);
    }
  EXPECT_THROW(even_range(4, 0, 0), InvalidArgument);
  EXPECT_THROW(even_range(4, 2, 2), InvalidArgument);
  EXPECT_THROW(even_range(4, 2, -1), InvalidArgument);
}

TEST(Alignment, different_widths_need_a_stated_policy) {
  EXPECT_EQ(align_vocabularies(4, 4, VocabularyPolicy::exact), 4);
  EXPECT_EQ(align_vocabularies(4, 6, VocabularyPolicy::common_prefix), 4);
  EXPECT_EQ(align_vocabularies(6, 4, VocabularyPolicy::common_prefix), 4);
  EXPECT_THROW(align_vocabularies(0, 4, VocabularyPolicy::common_prefix), InvalidArgument);
  try {
    align_vocabularies(4, 6, VocabularyPolicy::exact);
    FAIL();
  } catch (InvalidArgument const& error) {
    std::string const text = error.what();
    EXPECT_NE(text.find("4 ids (student)"), std::string::npos) << text;
    EXPECT_NE(text.find("6 ids (teacher)"), std::string::npos) << text;
  }
}

TEST_F(Shard, knows_all_ranges) {
  for (std::int64_t vocabulary : {1, 3, 12, 1031}) {
    VocabShard const shard = VocabShard::make(comm, even(vocabulary));
    EXPECT_EQ(shard.vocabulary(), vocabulary);
    EXPECT_EQ(shard.rank(), comm.rank());
    EXPECT_EQ(shard.ranks(), comm.size());
    EXPECT_EQ(shard.bounds().back(), vocabulary);
    EXPECT_EQ(shard.bounds()[comm.rank()], shard.begin());
    EXPECT_EQ(shard.bounds()[comm.rank() + 1], shard.end());
    EXPECT_EQ(shard.largest_width(), (vocabulary + comm.size() - 1) / comm.size());
  }
}

TEST_F(Shard, any_rank_may_hold_all_or_nothing) {
  for (int holder = 0; holder < comm.size(); ++holder) {
    VocabShard::Spec spec{10, 0, 0, 0, 3, {}};
    if (comm.rank() > holder) spec.begin = spec.end = 10;
    if (comm.rank() == holder) spec = {10, 0, 10, 11, 12, {}};
    VocabShard const shard = VocabShard::make(comm, spec);
    EXPECT_EQ(shard.width(), comm.rank() == holder ? 10 : 0);
    EXPECT_EQ(shard.largest_width(), 10);
  }
}

TEST_F(Shard, whole_needs_no_communication) {
  VocabShard const shard = VocabShard::whole(7, 8);
  EXPECT_EQ(shard.width(), 7);
  EXPECT_EQ(shard.student_width(), 8);
  EXPECT_EQ(shard.teacher_width(), 7);
  EXPECT_EQ(shard.ranks(), 1);
  EXPECT_THROW(VocabShard::whole(0), InvalidArgument);
  EXPECT_THROW(VocabShard::whole(7, 6), InvalidArgument);
}

TEST_F(Shard, full_width_as_a_shard_is_refused) {
  if (comm.size() == 1) GTEST_SKIP() << "one rank holds the whole vocabulary";
  VocabShard::Spec const spec{4, 0, 4, 4, 4, {}};
  expect_all_throw<AgreementError>(
      comm, [&] { VocabShard::make(comm, spec); },
      {std::to_string(4 * comm.size()) + " columns for a vocabulary of 4"});
}

TEST_F(Shard, gaps_overlaps_and_wrong_order_are_refused) {
  if (comm.size() == 1) GTEST_SKIP() << "needs neighbours";
  refused<AgreementError>(1, [](auto& s) { s.begin += 1; }, {"tile"});
  refused<AgreementError>(1, [](auto& s) { --s.begin, ++s.student_width, ++s.teacher_width; },
                          {"tile", "13 columns"});
  refused<AgreementError>(0, [](auto& s) { s.end -= 1; }, {"tile", "11 columns"});
  refused<AgreementError>(comm.size() - 1, [](auto& s) { s.end -= 1; }, {"tile"});
  VocabShard::Spec mirrored = even(12);
  auto const [begin, end] = even_range(12, comm.size(), comm.size() - 1 - comm.rank());
  mirrored.begin = begin;
  mirrored.end = end;
  mirrored.student_width = mirrored.teacher_width = 12;
  expect_all_throw<AgreementError>(comm, [&] { VocabShard::make(comm, mirrored); },
                                   {"in rank order"});
}

TEST_F(Shard, a_hole_at_one_rank_is_refused) {
  VocabShard::Spec spec = even(12);
  if (on_rank(comm.size() - 1)) spec.end -= 1;
  expect_all_throw<AgreementError>(comm, [&] { VocabShard::make(comm, spec); }, {"tile [0, 12)"});
}

TEST_F(Shard, bad_values_of_one_rank_are_refused_by_all) {
  for (int rank = 0; rank < comm.size(); ++rank) {
    std::string const from = from_rank(comm, rank);
    refused<InvalidArgument>(rank, [](auto& s) { s.begin = -1; }, {from, "[-1, "});
    refused<InvalidArgument>(rank, [](auto& s) { s.end = s.begin - 1; }, {from, "range is"});
    refused<InvalidArgument>(rank, [](auto& s) { s.end = 13; }, {from, "13)"});
    refused<InvalidArgument>(rank, [](auto& s) { --s.student_width; },
                             {from, "student physical width"});
    refused<InvalidArgument>(rank, [](auto& s) { --s.teacher_width; },
                             {from, "teacher physical width"});
    refused<InvalidArgument>(rank, [](auto& s) { s.vocabulary = 0; }, {from, "vocabulary is 0"});
  }
}

TEST_F(Shard, vocabulary_and_token_semantics_must_be_equal) {
  if (comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  refused<AgreementError>(1, [](auto& s) { s.vocabulary = 13; }, {"vocabularies differ", "13"});
  refused<AgreementError>(1, [](auto& s) { s.tokens.tokenizer_fingerprint = "b"; },
                          {"tokenizer fingerprints differ"});
  refused<AgreementError>(1, [](auto& s) { s.tokens.bos = 1; }, {"bos ids differ: -1"});
  refused<AgreementError>(1, [](auto& s) { s.tokens.eos = 2; }, {"eos ids differ"});
  refused<AgreementError>(1, [](auto& s) { s.tokens.pad = 0; }, {"pad ids differ"});
}

}  // namespace
