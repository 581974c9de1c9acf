// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/error.hpp>
#include <vpkl/parallel/agreement.hpp>
#include <vpkl/vocab/shard.hpp>

#include <fmt/format.h>

#include <algorithm>

namespace vpkl {

namespace {

void check_spec(VocabShard::Spec const& spec) {
  if (spec.vocabulary < 1)
    throw InvalidArgument(
        fmt::format("vocabulary shard: vocabulary is {}, expected at least 1", spec.vocabulary));
  if (spec.begin < 0 || spec.end < spec.begin || spec.end > spec.vocabulary)
    throw InvalidArgument(
        fmt::format("vocabulary shard: range is [{}, {}), expected it inside [0, {})", spec.begin,
                    spec.end, spec.vocabulary));
  auto const width = [&](char const* who, std::int64_t physical) {
    if (physical < spec.end - spec.begin)
      throw InvalidArgument(fmt::format(
          "vocabulary shard: {} physical width is {}, expected at least the {} columns of [{}, {})",
          who, physical, spec.end - spec.begin, spec.begin, spec.end));
  };
  width("student", spec.student_width);
  width("teacher", spec.teacher_width);
}

}  // namespace

std::int64_t align_vocabularies(std::int64_t student_vocabulary, std::int64_t teacher_vocabulary,
                                VocabularyPolicy policy) {
  if (student_vocabulary < 1 || teacher_vocabulary < 1)
    throw InvalidArgument(
        fmt::format("vocabularies have {} (student) and {} (teacher) ids, expected at least 1 each",
                    student_vocabulary, teacher_vocabulary));
  if (policy == VocabularyPolicy::exact && student_vocabulary != teacher_vocabulary)
    throw InvalidArgument(
        fmt::format("vocabularies differ: {} ids (student) and {} ids (teacher); pass "
                    "VocabularyPolicy::common_prefix if the shorter one is a prefix of the longer",
                    student_vocabulary, teacher_vocabulary));
  return std::min(student_vocabulary, teacher_vocabulary);
}

std::pair<std::int64_t, std::int64_t> even_range(std::int64_t vocabulary, int ranks, int rank) {
  if (ranks < 1 || rank < 0 || rank >= ranks)
    throw InvalidArgument(fmt::format("rank is {} of {}, expected 0 <= rank < ranks", rank, ranks));
  std::int64_t const base = vocabulary / ranks, rest = vocabulary % ranks;
  std::int64_t const begin = base * rank + std::min<std::int64_t>(rank, rest);
  return {begin, begin + base + (rank < rest ? 1 : 0)};
}

VocabShard VocabShard::make(Communicator const& comm, Spec const& spec) {
  auto const told = Agreement("vocabulary shard")
                        .equal("vocabularies", spec.vocabulary)
                        .equal("tokenizer fingerprints", spec.tokens.tokenizer_fingerprint)
                        .equal("bos ids", spec.tokens.bos)
                        .equal("eos ids", spec.tokens.eos)
                        .equal("pad ids", spec.tokens.pad)
                        .tell("begin", spec.begin)
                        .tell("end", spec.end)
                        .check([&] { check_spec(spec); })
                        .exchange(comm);
  VocabShard shard;
  shard.spec_ = spec;
  shard.rank_ = comm.rank();
  std::int64_t held = 0;
  std::string ranges;
  bool tiles = true;
  shard.bounds_.push_back(0);
  for (auto const& range : told) {
    tiles = tiles && range[0] == shard.bounds_.back();
    shard.bounds_.push_back(range[1]);
    held += range[1] - range[0];
    ranges += fmt::format("{}[{}, {})", ranges.empty() ? "" : ", ", range[0], range[1]);
  }
  if (!tiles || shard.bounds_.back() != spec.vocabulary)
    throw AgreementError(
        fmt::format("vocabulary shard: the logical ranges {} hold {} columns for a vocabulary of "
                    "{}; expected them to tile [0, {}) in rank order",
                    ranges, held, spec.vocabulary, spec.vocabulary));
  return shard;
}

VocabShard VocabShard::whole(std::int64_t vocabulary, std::int64_t student_width,
                             std::int64_t teacher_width) {
  Spec spec;
  spec.vocabulary = spec.end = vocabulary;
  spec.student_width = student_width < 0 ? vocabulary : student_width;
  spec.teacher_width = teacher_width < 0 ? vocabulary : teacher_width;
  return make(Communicator::self(), spec);
}

std::int64_t VocabShard::largest_width() const {
  std::int64_t largest = 0;
  for (std::size_t r = 1; r < bounds_.size(); ++r)
    largest = std::max(largest, bounds_[r] - bounds_[r - 1]);
  return largest;
}

}  // namespace vpkl
