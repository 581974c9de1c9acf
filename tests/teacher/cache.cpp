// SPDX-License-Identifier: Apache-2.0
// The teacher cache: what is stored comes back, and failures leave nothing behind.
#include "support/tensor.hpp"
#include "support/together.hpp"

#include <vpkl/core/allocate.hpp>
#include <vpkl/teacher/cache.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

using namespace vpkl;
using namespace vpkl::test;

namespace {

using Numbers = std::vector<std::int64_t>;

constexpr ElementType element_types[] = {ElementType::fp32, ElementType::bf16, ElementType::fp16};
constexpr float before = -7;  // what memory holds that a fetch may leave alone

/// A value of its own for each element; rounding shows in every type, overflow and NaN in some.
float element(std::int64_t row, std::int64_t column) {
  switch ((row * 31 + column * 7) % 11) {
    case 0: return -std::numeric_limits<float>::infinity();
    case 1: return std::numeric_limits<float>::quiet_NaN();
    case 2: return 7e4f + static_cast<float>(row);       // beyond fp16
    case 3: return 3e-6f * static_cast<float>(1 + row);  // subnormal in fp16
    default: return 1.2345678f * static_cast<float>(1 + row * 100 + column);
  }
}

void expect_same(float got, float expected, std::string const& where) {
  if (std::isnan(expected))
    EXPECT_TRUE(std::isnan(got)) << where << ": " << got << ", expected NaN";
  else
    EXPECT_EQ(got, expected) << where;
}

template <class Exec>
class TeacherCacheTest : public CollectiveTest<Exec> {
 protected:
  using Cache = TeacherCache<Exec>;
  using Shape = typename Tensor<Exec>::Shape;

  static Tensor<Exec> logits(ElementType type, Shape const& shape) {
    Tensor<Exec> tensor(type, shape);
    for (std::int64_t r = 0; r < shape.rows; ++r)
      for (std::int64_t c = 0; c < shape.width; ++c)
        tensor.set(r, c, element(r, c));
    tensor.to_device();
    return tensor;
  }

  static Tensor<Exec> room(ElementType type, Shape const& shape) {
    Tensor<Exec> tensor(type, shape);
    for (std::int64_t r = 0; r < shape.rows; ++r)
      for (std::int64_t c = 0; c < shape.width; ++c)
        tensor.set(r, c, before);
    tensor.to_device();
    return tensor;
  }

  /// A cache that holds `[batch, length, width]` of fp32.
  Cache full(std::int64_t batch, std::int64_t length, std::int64_t width,
             typename Cache::Options options = {}, Numbers const& rows = {}) {
    Cache cache(this->comm, options);
    auto const source = logits(ElementType::fp32, {batch * length, width});
    cache.store(this->exec, source.rows(0, batch * length), batch, length, rows);
    return cache;
  }

  void fence() const { vpkl::impl::fence(this->exec, "vpkl_test::cache"); }
};

TYPED_TEST_SUITE(TeacherCacheTest, ExecutionSpaces, SpaceNames);

TYPED_TEST(TeacherCacheTest, every_type_through_store_and_fetch) {
  std::int64_t const batch = 2, length = 5, width = 37;
  for (ElementType from : element_types)
    for (ElementType kept : element_types)
      for (ElementType to : element_types) {
        SCOPED_TRACE(fmt::format("{} kept as {} fetched as {}", to_string(from), to_string(kept),
                                 to_string(to)));
        typename TestFixture::Cache::Options options;
        if (kept != from) options.store_type = kept;
        TeacherCache<TypeParam> cache(this->comm, options);
        auto const source = this->logits(from, {batch * length, width});
        cache.store(this->exec, source.rows(0, batch * length), batch, length);
        EXPECT_EQ(cache.type(), kept);
        EXPECT_EQ(cache.width(), width);
        EXPECT_EQ(cache.batch(), batch);
        EXPECT_EQ(cache.length(), length);

        Numbers const listed{7, 0, 7, 9};
        auto chunk = this->room(to, {batch * 3, width, 2, 1});
        auto rows = this->room(to, {4, width, 0, 0, RowForm::offsets});
        cache.fetch_chunk(this->exec, 1, 4, chunk.rows(0, batch * 3));
        cache.fetch_rows(this->exec, listed, rows.rows(0, 4));
        this->fence();
        chunk.to_host();
        rows.to_host();
        auto const check = [&](Tensor<TypeParam> const& got, std::int64_t at, std::int64_t row) {
          for (std::int64_t c = 0; c < width; ++c)
            expect_same(got.get(at, c), rounded(to, rounded(kept, rounded(from, element(row, c)))),
                        fmt::format("row {} column {}", row, c));
          if (from == kept && kept == to) {
            EXPECT_EQ(got.bits(at, width), source.bits(row, width));
          }
        };
        for (std::int64_t i = 0; i < batch * 3; ++i)
          check(chunk, i, i / 3 * length + 1 + i % 3);
        for (std::int64_t i = 0; i < 4; ++i)
          check(rows, i, listed[i]);
        EXPECT_TRUE(chunk.untouched());
        EXPECT_TRUE(rows.untouched());
      }
}

TYPED_TEST(TeacherCacheTest, payload_of_nan_survives_where_the_type_stays) {
  Tensor<TypeParam> source(ElementType::bf16, {1, 5});
  Kokkos::View<std::uint16_t*, Kokkos::HostSpace> const words("words", 5);
  for (int i = 0; i < 5; ++i)
    words(i) = std::uint16_t{0x7fa3} - static_cast<std::uint16_t>(i);
  ConstRows rows = source.rows(0, 1);
  Kokkos::View<std::uint16_t*, typename TypeParam::memory_space, Kokkos::MemoryUnmanaged> const
      device(static_cast<std::uint16_t*>(const_cast<void*>(rows.data)), 5);
  Kokkos::deep_copy(device, words);
  source.to_host();
  TeacherCache<TypeParam> cache(this->comm, {});
  cache.store(this->exec, rows, 1, 1);
  auto out = this->room(ElementType::bf16, {1, 5});
  cache.fetch_chunk(this->exec, 0, 1, out.rows(0, 1));
  this->fence();
  out.to_host();
  EXPECT_EQ(out.bits(0, 5), source.bits(0, 5));
}

TYPED_TEST(TeacherCacheTest, logits_may_lie_anywhere) {
  std::int64_t const batch = 3, length = 4, width = 9, rows = batch * length;
  for (RowForm form : {RowForm::strided, RowForm::nested, RowForm::offsets})
    for (bool response : {false, true}) {
      SCOPED_TRACE(fmt::format("{} response {}", to_string(form), response));
      Numbers const listed = response ? Numbers{0, 3, 4, 7, 10} : Numbers{};
      typename TestFixture::Cache::Options options;
      if (response) options.mode = CacheMode::response;
      TeacherCache<TypeParam> cache(this->comm, options);
      auto const source = this->logits(ElementType::bf16, {rows, width, 5, 3, form});
      cache.store(this->exec, source.rows(0, rows), batch, length, listed);
      for (std::int64_t row = 0; row < rows; ++row) {
        bool const held = !response || std::count(listed.begin(), listed.end(), row) > 0;
        EXPECT_EQ(cache.holds(row), held);
        if (!held) continue;
        auto out = this->room(ElementType::bf16, {1, width});
        cache.fetch_rows(this->exec, {row}, out.rows(0, 1));
        this->fence();
        out.to_host();
        EXPECT_EQ(out.bits(0, width), source.bits(row, width)) << "row " << row;
      }
    }
}

TYPED_TEST(TeacherCacheTest, logits_as_a_slice_of_a_view) {
  using View = Kokkos::View<float***, Kokkos::LayoutRight, typename TypeParam::memory_space>;
  View const whole("whole", 2, 6, 11);
  auto const mirror = Kokkos::create_mirror_view(whole);
  for (int b = 0; b < 2; ++b)
    for (int t = 0; t < 6; ++t)
      for (int c = 0; c < 11; ++c)
        mirror(b, t, c) = static_cast<float>(b * 100 + t * 11 + c);
  Kokkos::deep_copy(whole, mirror);
  // [:, :-1, 2:9]
  auto const part = Kokkos::subview(whole, Kokkos::ALL, std::make_pair(0, 5), std::make_pair(2, 9));
  TeacherCache<TypeParam> cache(this->comm, {});
  cache.store(this->exec, const_rows(part), 2, 5);
  EXPECT_EQ(cache.width(), 7);
  auto out = this->room(ElementType::fp32, {4, 7});
  cache.fetch_chunk(this->exec, 3, 5, out.rows(0, 4));
  this->fence();
  out.to_host();
  for (int i = 0; i < 4; ++i)
    for (int c = 0; c < 7; ++c)
      EXPECT_EQ(out.get(i, c), static_cast<float>(i / 2 * 100 + (3 + i % 2) * 11 + 2 + c));
}

// Case 27.
TYPED_TEST(TeacherCacheTest, strided_positions_of_the_cache) {
  auto cache = this->full(4, 8, 3);
  auto out = this->room(ElementType::fp32, {12, 3});
  cache.fetch_chunk(this->exec, 2, 5, out.rows(0, 12));
  this->fence();
  out.to_host();
  for (std::int64_t b = 0; b < 4; ++b)
    for (std::int64_t t = 2; t < 5; ++t)
      for (std::int64_t c = 0; c < 3; ++c)
        expect_same(out.get(b * 3 + t - 2, c), element(b * 8 + t, c), fmt::format("{} {}", b, t));
}

TYPED_TEST(TeacherCacheTest, stored_logits_may_be_overwritten) {
  auto source = this->logits(ElementType::fp32, {6, 33});
  TeacherCache<TypeParam> cache(this->comm, {});
  cache.store(this->exec, source.rows(0, 6), 2, 3);
  auto const other = this->room(ElementType::fp32, {6, 33});
  Rows const target = source.rows(0, 6);
  Kokkos::View<float*, typename TypeParam::memory_space, Kokkos::MemoryUnmanaged> const to(
      static_cast<float*>(target.data), 6 * 33);
  Kokkos::deep_copy(this->exec, to, before);
  auto out = this->room(ElementType::fp32, {6, 33});
  cache.fetch_chunk(this->exec, 0, 3, out.rows(0, 6));
  this->fence();
  out.to_host();
  for (std::int64_t r = 0; r < 6; ++r)
    for (std::int64_t c = 0; c < 33; ++c)
      expect_same(out.get(r, c), element(r, c), fmt::format("{} {}", r, c));
}

TYPED_TEST(TeacherCacheTest, response_mode_leaves_other_rows_alone) {
  typename TestFixture::Cache::Options options;
  options.mode = CacheMode::response;
  Numbers const kept{1, 2, 6};
  auto cache = this->full(2, 4, 5, options, kept);
  EXPECT_EQ(cache.counters().stored_rows, 3);
  auto out = this->room(ElementType::fp32, {8, 5, 1});
  cache.fetch_chunk(this->exec, 0, 4, out.rows(0, 8));
  this->fence();
  out.to_host();
  for (std::int64_t r = 0; r < 8; ++r)
    for (std::int64_t c = 0; c < 5; ++c)
      expect_same(out.get(r, c), std::count(kept.begin(), kept.end(), r) ? element(r, c) : before,
                  fmt::format("{} {}", r, c));
  EXPECT_EQ(cache.counters().fetched_rows, 3);
  EXPECT_THROW(cache.fetch_rows(this->exec, {1, 3}, out.rows(0, 2)), InvalidArgument);
  EXPECT_EQ(cache.counters().fetched_rows, 3);
}

// Case 38: a replica without samples, a mask without tokens, a rank without columns.
TYPED_TEST(TeacherCacheTest, nothing_to_keep) {
  struct Empty {
    std::int64_t batch, length, width;
    bool response;
  };
  for (Empty const e : {Empty{0, 4, 5, false}, Empty{3, 0, 5, false}, Empty{2, 4, 0, false},
                        Empty{2, 4, 5, true}, Empty{0, 0, 0, true}}) {
    SCOPED_TRACE(fmt::format("[{}, {}, {}] {}", e.batch, e.length, e.width, e.response));
    typename TestFixture::Cache::Options options;
    if (e.response) options.mode = CacheMode::response;
    TeacherCache<TypeParam> cache(this->comm, options);
    std::int64_t const rows = e.batch * e.length;
    auto const source = this->logits(ElementType::fp32, {rows, e.width});
    ConstRows from = source.rows(0, rows);
    for (void const* data : {from.data, static_cast<void const*>(nullptr)}) {
      if (data == nullptr && rows > 0 && e.width > 0) continue;
      from.data = data;
      cache.store(this->exec, from, e.batch, e.length);
      EXPECT_TRUE(cache.holds_rows());
      EXPECT_EQ(cache.counters().bytes, 0u);
      auto out = this->room(ElementType::fp32, {rows, e.width});
      cache.fetch_chunk(this->exec, 0, e.length, out.rows(0, rows));
      cache.fetch_rows(this->exec, {}, out.rows(0, 0));
      this->fence();
      cache.free();
      EXPECT_FALSE(cache.holds_rows());
    }
  }
}

TYPED_TEST(TeacherCacheTest, a_rank_without_columns_beside_others) {
  std::int64_t const width = this->on_rank(1) ? 0 : 12;
  auto cache = this->full(2, 3, width);
  EXPECT_EQ(cache.counters().bytes, width ? 6u * 128 : 0u);
  auto out = this->room(ElementType::fp32, {6, width});
  cache.fetch_chunk(this->exec, 0, 3, out.rows(0, 6));
}

TYPED_TEST(TeacherCacheTest, pitch_is_a_multiple_of_128_bytes) {
  struct Pitch {
    ElementType type;
    std::int64_t width;
    std::size_t bytes;
  };
  for (Pitch const p : {Pitch{ElementType::fp32, 1, 128}, Pitch{ElementType::fp32, 32, 128},
                        Pitch{ElementType::fp32, 33, 256}, Pitch{ElementType::bf16, 64, 128},
                        Pitch{ElementType::fp16, 65, 256}}) {
    typename TestFixture::Cache::Options options;
    options.store_type = p.type;
    auto const cache = this->full(3, 2, p.width, options);
    EXPECT_EQ(cache.counters().bytes, 6 * p.bytes) << to_string(p.type) << " " << p.width;
  }
}

TYPED_TEST(TeacherCacheTest, counters_and_reuse) {
  auto cache = this->full(2, 4, 40);
  auto out = this->room(ElementType::fp32, {8, 40});
  cache.fetch_chunk(this->exec, 1, 3, out.rows(0, 4));
  cache.fetch_rows(this->exec, {5}, out.rows(0, 1));
  CacheCounters const first = cache.counters();
  EXPECT_EQ(first.stores, 1);
  EXPECT_EQ(first.stored_rows, 8);
  EXPECT_EQ(first.fetches, 2);
  EXPECT_EQ(first.fetched_rows, 5);
  EXPECT_EQ(first.fetched_bytes, 5 * 40 * 4);
  EXPECT_EQ(first.bytes, 8u * 256);
  EXPECT_EQ(first.high_water_bytes, 8u * 256);

  // A smaller micro-batch in place of the first.
  auto const source = this->logits(ElementType::bf16, {3, 7});
  cache.store(this->exec, source.rows(0, 3), 1, 3);
  EXPECT_EQ(cache.counters().bytes, 3u * 128);
  EXPECT_EQ(cache.counters().high_water_bytes, 8u * 256);
  EXPECT_EQ(cache.type(), ElementType::bf16);
  auto small = this->room(ElementType::bf16, {3, 7});
  cache.fetch_chunk(this->exec, 0, 3, small.rows(0, 3));
  this->fence();
  small.to_host();
  for (std::int64_t r = 0; r < 3; ++r)
    EXPECT_EQ(small.bits(r, 7), source.bits(r, 7));

  cache.free();
  cache.free();
  EXPECT_EQ(cache.counters().bytes, 0u);
  EXPECT_EQ(cache.counters().high_water_bytes, 8u * 256);
  EXPECT_FALSE(cache.holds(0));
  EXPECT_THROW(cache.fetch_rows(this->exec, {0}, small.rows(0, 1)), InvalidArgument);
  cache.store(this->exec, source.rows(0, 3), 1, 3);
  EXPECT_EQ(cache.counters().stores, 3);
  EXPECT_TRUE(cache.holds(2));
}

TYPED_TEST(TeacherCacheTest, one_exchange_a_store_and_none_a_fetch) {
  std::int64_t const one = this->comm.size() > 1 ? 1 : 0;
  CommunicationCounters const start = this->comm.counters();
  TeacherCache<TypeParam> cache(this->comm, {});
  EXPECT_EQ(this->comm.counters().records, start.records + one);
  auto const source = this->logits(ElementType::fp32, {6, 5});
  cache.store(this->exec, source.rows(0, 6), 2, 3);
  auto out = this->room(ElementType::fp32, {6, 5});
  cache.fetch_chunk(this->exec, 0, 3, out.rows(0, 6));
  EXPECT_EQ(this->comm.counters().records, start.records + 2 * one);
  EXPECT_EQ(this->comm.counters().all_gathers, start.all_gathers);
}

// Case 8 among them: a chunk of one batch row or one column is not spread over the others.
TYPED_TEST(TeacherCacheTest, refused_fetches) {
  auto cache = this->full(2, 4, 5);
  auto out = this->room(ElementType::fp32, {8, 5});
  auto const refused = [&](std::string const& text, auto&& fetch) {
    try {
      fetch();
      ADD_FAILURE() << "accepted, expected: " << text;
    } catch (InvalidArgument const& e) {
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  };
  auto const chunk = [&](std::int64_t begin, std::int64_t end, Rows const& to) {
    return [&cache, this, begin, end, to] { cache.fetch_chunk(this->exec, begin, end, to); };
  };
  auto const rows = [&](Numbers const& list, Rows const& to) {
    return [&cache, this, list, to] { cache.fetch_rows(this->exec, list, to); };
  };
  auto const changed = [&](std::int64_t count, auto&& change) {
    Rows r = out.rows(0, count);
    change(r);
    return r;
  };
  refused("[-1, 1)", chunk(-1, 1, out.rows(0, 4)));
  refused("[3, 2)", chunk(3, 2, out.rows(0, 0)));
  refused("[2, 5)", chunk(2, 5, out.rows(0, 6)));
  refused("[2, 5] fetched rows, expected [4, 5]", chunk(0, 2, out.rows(0, 2)));
  refused("[4, 1] fetched rows, expected [4, 5]",
          chunk(0, 2, changed(4, [](Rows& r) { r.width = 1; })));
  refused("[1, 5] fetched rows, expected [2, 5]", rows({0, 1}, out.rows(0, 1)));
  refused("row 8 is not held", rows({0, 8}, out.rows(0, 2)));
  refused("row -1 is not held", rows({-1}, out.rows(0, 1)));
  refused("data is null", chunk(0, 1, changed(2, [](Rows& r) { r.data = nullptr; })));
  refused("row stride is 4", chunk(0, 2, changed(4, [](Rows& r) { r.index.inner_stride = 4; })));
  refused("not aligned",
          chunk(0, 1, changed(2, [](Rows& r) { r.data = static_cast<char*>(r.data) + 1; })));
  out.to_host();
  for (std::int64_t r = 0; r < 8; ++r)
    EXPECT_EQ(out.get(r, 0), before);
  EXPECT_EQ(cache.counters().fetches, 0);

  TeacherCache<TypeParam> empty(this->comm, {});
  EXPECT_FALSE(empty.holds_rows());
  refused("empty cache", [&] { empty.fetch_chunk(this->exec, 0, 1, out.rows(0, 2)); });
  refused("empty cache", [&] { empty.fetch_chunk(this->exec, 0, 0, Rows{}); });
  refused("empty cache", [&] { empty.fetch_rows(this->exec, {}, Rows{}); });
}

TYPED_TEST(TeacherCacheTest, names_of_modes) {
  for (CacheMode mode : {CacheMode::all, CacheMode::response, CacheMode::hidden})
    EXPECT_EQ(cache_mode_from_string(to_string(mode)), mode);
  EXPECT_THROW(cache_mode_from_string("some"), InvalidArgument);
}

// Failing together.

TYPED_TEST(TeacherCacheTest, hidden_mode_is_refused) {
  typename TestFixture::Cache::Options options;
  options.mode = CacheMode::hidden;
  expect_all_throw<InvalidArgument>(
      this->comm, [&] { TeacherCache<TypeParam>(this->comm, options); }, {"mode hidden"});
  if (!this->on_rank(1)) options.mode = CacheMode::all;
  expect_all_throw<InvalidArgument>(this->comm,
                                    [&] { TeacherCache<TypeParam>(this->comm, options); },
                                    {from_rank(this->comm, 1), "mode hidden"});
}

TYPED_TEST(TeacherCacheTest, options_that_differ) {
  if (this->comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  typename TestFixture::Cache::Options mode, type, temperature, kept;
  temperature.statistics = TeacherStatistics{};
  if (this->on_rank(1)) {
    mode.mode = CacheMode::response;
    type.store_type = ElementType::fp16;
    temperature.statistics->temperature = 2;
    kept.statistics = TeacherStatistics{};
  }
  expect_all_throw<AgreementError>(this->comm, [&] { TeacherCache<TypeParam>(this->comm, mode); },
                                   {"modes differ: 0 on rank 0, 1 on rank 1"});
  expect_all_throw<AgreementError>(this->comm, [&] { TeacherCache<TypeParam>(this->comm, type); },
                                   {"store types differ"});
  for (auto const& statistics : {temperature, kept})
    expect_all_throw<AgreementError>(this->comm,
                                     [&] { TeacherCache<TypeParam>(this->comm, statistics); },
                                     {"statistics' temperatures differ"});
}

TYPED_TEST(TeacherCacheTest, refused_statistics) {
  for (int rank = 0; rank < this->comm.size(); ++rank) {
    typename TestFixture::Cache::Options options;
    options.statistics = TeacherStatistics{1, this->on_rank(rank) ? 6 : 5};
    TeacherCache<TypeParam> cache(this->comm, options);
    Tensor<TypeParam> const logits(ElementType::fp32, {6, 5});
    expect_all_throw<InvalidArgument>(
        this->comm, [&] { cache.store(this->exec, logits.rows(0, 6), 2, 3); },
        {from_rank(this->comm, rank), "statistics of 6 columns, expected at most the 5 stored"});
    EXPECT_FALSE(cache.holds_rows());
    options.statistics->temperature = this->on_rank(rank) ? 0 : 1;
    expect_all_throw<InvalidArgument>(this->comm,
                                      [&] { TeacherCache<TypeParam>(this->comm, options); },
                                      {from_rank(this->comm, rank), "temperature is 0"});
  }
}

/// What a rank may do wrong in a store.
struct BadStore {
  std::string text;
  std::int64_t batch = 2, length = 4;
  Numbers rows = {};
  CacheMode mode = CacheMode::all;
  bool null = false;
  std::int64_t stride = 0;
  bool agreement = false;
};

TYPED_TEST(TeacherCacheTest, one_rank_fails_in_a_store) {
  std::vector<BadStore> const all = {
      {"8 rows of logits, expected 3 · 4 = 12", 3},
      {"shape is [-2, -4]", -2, -4},
      {"3 rows listed in mode all", 2, 4, {1, 2, 3}},
      {"listed row 1 is 8", 2, 4, {1, 8}, CacheMode::response},
      {"listed row 0 is -1", 2, 4, {-1, 1}, CacheMode::response},
      {"listed row 2 is 2", 2, 4, {1, 2, 2}, CacheMode::response},
      {"data is null", 2, 4, {}, CacheMode::all, true},
      {"row stride is 3", 2, 4, {}, CacheMode::all, false, 3},
      {"batch sizes differ", 4, 2, {}, CacheMode::all, false, 0, true},
      {"listed rows differ", 2, 4, {1, 7}, CacheMode::response, false, 0, true},
  };
  auto const source = this->logits(ElementType::fp32, {8, 5});
  for (int bad_rank = 0; bad_rank < this->comm.size(); ++bad_rank)
    for (BadStore const& bad : all) {
      if (bad.agreement && this->comm.size() == 1) continue;
      SCOPED_TRACE(bad.text);
      typename TestFixture::Cache::Options options;
      options.mode = bad.mode;
      TeacherCache<TypeParam> cache(this->comm, options);
      bool const here = this->on_rank(bad_rank);
      Numbers const good_rows = bad.mode == CacheMode::response ? Numbers{1, 2, 3} : Numbers{};
      ConstRows rows = source.rows(0, 8);
      cache.store(this->exec, rows, 2, 4, good_rows);
      if (here && bad.null) rows.data = nullptr;
      if (here && bad.stride) rows.index.inner_stride = bad.stride;
      auto const store = [&] {
        cache.store(this->exec, rows, here ? bad.batch : 2, here ? bad.length : 4,
                    here ? bad.rows : good_rows);
      };
      if (bad.agreement)
        expect_all_throw<AgreementError>(this->comm, store, {bad.text});
      else
        expect_all_throw<InvalidArgument>(this->comm, store,
                                          {from_rank(this->comm, bad_rank), bad.text});
      EXPECT_FALSE(cache.holds_rows());
      EXPECT_EQ(cache.counters().bytes, 0u);
      EXPECT_EQ(cache.counters().stores, 1);
      cache.store(this->exec, source.rows(0, 8), 2, 4, good_rows);
      EXPECT_TRUE(cache.holds(1));
    }
}

TYPED_TEST(TeacherCacheTest, types_that_differ) {
  if (this->comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  auto const type = this->on_rank(1) ? ElementType::bf16 : ElementType::fp32;
  auto const source = this->logits(type, {8, 5});
  TeacherCache<TypeParam> cache(this->comm, {});
  expect_all_throw<AgreementError>(
      this->comm, [&] { cache.store(this->exec, source.rows(0, 8), 2, 4); }, {"types differ"});
  EXPECT_FALSE(cache.holds_rows());
}

TYPED_TEST(TeacherCacheTest, beyond_the_budget_of_one_rank) {
  std::size_t const needed = 8 * 128;
  typename TestFixture::Cache::Options options;
  options.memory_budget = needed;
  auto const enough = this->full(2, 4, 5, options);
  EXPECT_EQ(enough.counters().bytes, needed);

  if (this->on_rank(1)) options.memory_budget = needed - 1;
  TeacherCache<TypeParam> cache(this->comm, options);
  auto const source = this->logits(ElementType::fp32, {8, 5});
  expect_all_throw<OutOfMemory>(this->comm,
                                [&] { cache.store(this->exec, source.rows(0, 8), 2, 4); },
                                {from_rank(this->comm, 1), "1024 bytes", "1023 bytes"});
  EXPECT_FALSE(cache.holds_rows());
  EXPECT_EQ(cache.counters().bytes, 0u);
  cache.store(this->exec, source.rows(0, 4), 1, 4);
  EXPECT_TRUE(cache.holds(3));
}

// Case 38: ten times the memory, and more than can be counted. Offsets let few bytes stand for
// many rows.
TYPED_TEST(TeacherCacheTest, beyond_the_machine) {
  std::int64_t const rows = 1000;
  auto const offsets =
      Kokkos::View<std::int64_t*, typename TypeParam::memory_space>("offsets", rows);
  auto const source = this->logits(ElementType::fp32, {1, 5});
  ConstRows from = source.rows(0, 1);
  from.index.count = rows;
  from.index.offsets = offsets.data();
  TeacherCache<TypeParam> cache(this->comm, {});
  std::int64_t const ten_times =
      static_cast<std::int64_t>(same_on_all_ranks(this->comm, available_host_memory())) * 10 / 4 /
      rows;
  for (std::int64_t width : {ten_times, std::int64_t(1) << 60}) {
    from.width = width;
    expect_all_throw<OutOfMemory>(
        this->comm, [&] { cache.store(this->exec, from, 10, 100); },
        {fmt::format("1000 rows of {} fp32 columns", width), "bytes, the budget is"});
    EXPECT_FALSE(cache.holds_rows());
  }
  from.width = 5;
  cache.store(this->exec, from, 10, 100);
  auto out = this->room(ElementType::fp32, {1, 5});
  cache.fetch_rows(this->exec, {999}, out.rows(0, 1));
  this->fence();
  out.to_host();
  for (std::int64_t c = 0; c < 5; ++c)
    expect_same(out.get(0, c), element(0, c), "after the failure");
}

}  // namespace
