// SPDX-License-Identifier: Apache-2.0
// What a call exchanges and fetches: the counts prove that the intended path ran.
#include "session.hpp"

#include <fmt/format.h>

#include <algorithm>

using namespace vpkl;
using namespace vpkl::test;

namespace {

template <class Exec>
class StreamedLossCounts : public CollectiveTest<Exec> {};

TYPED_TEST_SUITE(StreamedLossCounts, ExecutionSpaces, SpaceNames);

/// Chunks of `width` positions that hold rows that count.
std::int64_t chunks_with_tokens(MicroBatch const& batch, std::int64_t width) {
  std::int64_t n = 0;
  for (std::int64_t begin = 0; begin < batch.length; begin += width) {
    bool some = false;
    for (std::int64_t b = 0; b < batch.batch; ++b)
      for (std::int64_t t = begin; t < std::min(batch.length, begin + width); ++t)
        some = some || batch.counts(b * batch.length + t);
    n += some ? 1 : 0;
  }
  return n;
}

TYPED_TEST(StreamedLossCounts, exchanges_and_fetches) {
  Random random(11);
  std::int64_t const batch_size = 2, length = 12, vocabulary = 19;
  MicroBatch batch = random_batch(random, batch_size, length, vocabulary);
  std::fill(batch.mask.begin(), batch.mask.end(), std::uint8_t{0});
  for (std::int64_t t : {3, 4, 8})
    batch.mask[t] = 1;
  for (std::int64_t t : {8, 9, 10, 11})
    batch.mask[length + t] = 1;
  std::int64_t const tokens = 7;
  ASSERT_EQ(batch.tokens(), tokens);
  bool const alone = this->comm.size() == 1;

  for (Route route : routes)
    for (Divergence divergence : divergences)
      for (PlanKind plan : {PlanKind::rows, PlanKind::chunks})
        for (std::int64_t width : {1, 3, 5, 12})
          for (bool skip : {true, false})
            for (CacheMode mode : {CacheMode::all, CacheMode::response}) {
              if (plan == PlanKind::rows && !skip) continue;
              Setup setup;
              setup.route = route;
              setup.plan = plan;
              setup.chunk_width = width;
              setup.skip = skip;
              setup.cache = mode;
              setup.statistics = width == 3;
              SCOPED_TRACE(fmt::format("{} {}", to_string(divergence), setup.describe()));
              batch.problem.options.divergence = divergence;
              Session<TypeParam> session(this->exec, this->comm, batch, setup);
              session.store();
              // The first call also agrees on the operator's plan.
              Streamed const first = session.run();
              Streamed const s = session.run();

              std::int64_t const ranges = (length + width - 1) / width;
              std::int64_t const chunks = plan == PlanKind::rows
                                              ? (tokens + 2 * width - 1) / (2 * width)
                                          : skip ? chunks_with_tokens(batch, width)
                                                 : ranges;
              EXPECT_EQ(s.result.chunks, chunks);
              EXPECT_EQ(s.result.skipped_chunks,
                        plan == PlanKind::chunks && skip ? ranges - chunks : 0);
              EXPECT_EQ(s.result.tokens, tokens);

              std::int64_t const rounds =
                  alone || route == Route::dense                                    ? 0
                  : route == Route::vocab_parallel && divergence == Divergence::jsd ? 2
                                                                                    : 1;
              EXPECT_EQ(s.rows.communication.records, rounds > 0 ? 1 : 0);
              EXPECT_LE(first.rows.communication.records, rounds > 0 ? 2 : 0);
              // Values of rows whose teacher's statistics are known are brought together at the
              // end.
              std::int64_t const last = setup.statistics && !alone &&
                                                route == Route::vocab_parallel &&
                                                divergence == Divergence::forward_kl
                                            ? 1
                                            : 0;
              EXPECT_EQ(s.rows.communication.all_gathers, rounds * chunks + last);
              EXPECT_EQ(first.rows.communication.all_gathers, rounds * chunks + last);
              EXPECT_EQ(s.rows.communication.all_reduces, 0);
              if (wants_nccl() && !vpkl::impl::is_host_space<TypeParam>) {
                // More than 16 collectives may wait for the device.
                EXPECT_LE(s.host_waits, 2 + std::max<std::int64_t>(0, rounds * chunks + last - 16));
              }
              EXPECT_EQ(s.rows.plan.calls, chunks);
              EXPECT_EQ(s.rows.plan.collectives, rounds * chunks + last);

              std::int64_t rows = tokens;
              if (plan == PlanKind::chunks && mode == CacheMode::all) {
                rows = 0;
                for (std::int64_t begin = 0; begin < length; begin += width) {
                  std::int64_t const n = std::min(width, length - begin);
                  bool some = !skip;
                  for (std::int64_t b = 0; b < batch_size; ++b)
                    for (std::int64_t t = begin; t < begin + n; ++t)
                      some = some || batch.counts(b * length + t);
                  rows += some ? batch_size * n : 0;
                }
              }
              EXPECT_EQ(s.cache.fetches, chunks);
              EXPECT_EQ(s.cache.fetched_rows, rows);
              EXPECT_EQ(s.cache.fetched_bytes, rows * session.cache.width() * 4);
            }
}

// Bytes: the gathered route moves columns, the vocabulary-parallel one 32 bytes a row.
TYPED_TEST(StreamedLossCounts, bytes_a_rank_contributes) {
  if (this->comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  Random random(12);
  MicroBatch batch = random_batch(random, 1, 9, 4000);
  std::fill(batch.mask.begin(), batch.mask.end(), std::uint8_t{1});
  Setup setup;
  EXPECT_EQ(run_streamed(this->exec, this->comm, batch, setup).rows.communication.all_gather_bytes,
            (8 + 1) * 32);
  setup.statistics = true;
  EXPECT_EQ(run_streamed(this->exec, this->comm, batch, setup).rows.communication.all_gather_bytes,
            (8 + 1) * 32 + 8 * 8);
  setup.statistics = false;
  setup.route = Route::gathered;
  EXPECT_GE(run_streamed(this->exec, this->comm, batch, setup).rows.communication.all_gather_bytes,
            8 * (4000 / this->comm.size()) * 4);
  setup.route = Route::dense;
  EXPECT_EQ(run_streamed(this->exec, this->comm, batch, setup).rows.communication.all_gather_bytes,
            0);
}

// The cache of the gathered route holds whole rows, on every rank.
TYPED_TEST(StreamedLossCounts, cache_of_a_rank) {
  Random random(13);
  MicroBatch const batch = random_batch(random, 1, 4, 640);
  for (Route route : routes) {
    Setup setup;
    setup.route = route;
    std::int64_t const width = route == Route::vocab_parallel ? 640 / this->comm.size() + 1 : 640;
    Streamed const s = run_streamed(this->exec, this->comm, batch, setup);
    EXPECT_LE(s.cache.bytes, static_cast<std::size_t>(4 * (width * 4 + 128))) << to_string(route);
    EXPECT_GE(s.cache.bytes, static_cast<std::size_t>(4 * (width - 1) * 4)) << to_string(route);
  }
}

}  // namespace
