// SPDX-License-Identifier: Apache-2.0
// The teacher cache between streams, and its engines.
#include "cuda/device.hpp"

#include <vpkl/core/allocate.hpp>
#include <vpkl/core/error.hpp>
#include <vpkl/teacher/cache.hpp>

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

using namespace vpkl;
using namespace vpkl::test;

namespace {

using Cache = TeacherCache<Kokkos::Cuda>;
using Numbers = std::vector<std::int64_t>;

constexpr TransferEngine engines[] = {TransferEngine::automatic, TransferEngine::pageable,
                                      TransferEngine::staged,    TransferEngine::pinned_rows,
                                      TransferEngine::pinned_2d, TransferEngine::mapped};

Cache cache_with(TransferEngine engine, CacheMode mode = CacheMode::all) {
  Cache::Options options;
  options.engine = engine;
  options.mode = mode;
  return Cache(Communicator::self(), options);
}

int repetitions() {
  char const* const text = std::getenv("VPKL_TEST_REPETITIONS");
  return text ? std::atoi(text) : 200;
}

std::uint16_t word(std::int64_t row, std::int64_t column) {
  return static_cast<std::uint16_t>(row * 7919 + column * 31 + 5);
}

/// `[rows, width]` of a word for each place, `pitch` words a row; the rest is `gap`.
std::vector<std::uint16_t> pattern(Numbers const& rows, std::int64_t width, std::int64_t pitch,
                                   std::uint16_t gap) {
  std::vector<std::uint16_t> out(rows.size() * static_cast<std::size_t>(pitch), gap);
  for (std::size_t r = 0; r < rows.size(); ++r)
    for (std::int64_t c = 0; c < width; ++c)
      out[r * static_cast<std::size_t>(pitch) + static_cast<std::size_t>(c)] = word(rows[r], c);
  return out;
}

Numbers range(std::int64_t count) {
  Numbers out;
  for (std::int64_t i = 0; i < count; ++i)
    out.push_back(i);
  return out;
}

// Case 23.
TEST(CudaTeacherCache, a_fetch_never_overtakes_the_store) {
  std::int64_t const rows = 128, width = 1 << 20;  // 256 MiB
  Stream compute, other;
  Kokkos::Cuda const exec = compute.exec(), elsewhere = other.exec();
  auto const allocate = [&] {
    return DeviceWords(Kokkos::view_alloc("words", Kokkos::WithoutInitializing), rows * width);
  };
  DeviceWords const source = allocate(), same = allocate(), second = allocate(), host = allocate();
  Cache cache = cache_with(TransferEngine::automatic), by_host = cache_with(TransferEngine::staged);
  for (int k = 0; k < repetitions(); ++k) {
    std::uint16_t const value = static_cast<std::uint16_t>(k + 1);
    spin(exec, 50);
    fill(exec, source, value);
    cache.store(exec, bf16_rows(source, rows, width, width), 4, rows / 4);
    by_host.store(exec, bf16_rows(source, rows, width, width), 4, rows / 4);
    fill(exec, source, 0);
    cache.fetch_chunk(elsewhere, 0, rows / 4, bf16_rows(second, rows, width, width));
    cache.fetch_chunk(exec, 0, rows / 4, bf16_rows(same, rows, width, width));
    by_host.fetch_chunk(elsewhere, 0, rows / 4, bf16_rows(host, rows, width, width));
    ASSERT_EQ(others(elsewhere, second, value), 0) << "another stream, repetition " << k;
    ASSERT_EQ(others(elsewhere, host, value), 0) << "read by the host, repetition " << k;
    ASSERT_EQ(others(exec, same, value), 0) << "the same stream, repetition " << k;
  }
}

// Case 24.
TEST(CudaTeacherCache, a_pinned_fetch_does_not_wait) {
  std::int64_t const batch = 4, length = 1024, width = 1024, begin = 256, end = 512;
  // The 1,024 copies of pinned_rows fill the driver's queue, and wait for room there.
  for (TransferEngine engine :
       {TransferEngine::automatic, TransferEngine::pinned_2d, TransferEngine::mapped}) {
    SCOPED_TRACE(to_string(engine));
    Stream stream;
    Kokkos::Cuda const exec = stream.exec();
    DeviceWords const source = on_device(pattern(range(batch * length), width, width, 0));
    DeviceWords const out("out", batch * (end - begin) * width);
    Cache cache = cache_with(engine);
    cache.store(exec, bf16_rows(source, batch * length, width, width), batch, length);
    Rows const to = bf16_rows(out, batch * (end - begin), width, width);
    cache.fetch_chunk(exec, begin, end, to);  // pins what small lists take
    vpkl::impl::fence(exec, "vpkl_test::warm");
    fill(exec, out, 0);
    std::int64_t const waits = vpkl::impl::host_waits;
    spin(exec, 50);
    vpkl::impl::cuda::Event ended;
    ended.record(exec.cuda_stream());
    cache.fetch_chunk(exec, begin, end, to);
    EXPECT_FALSE(ended.done());
    EXPECT_EQ(vpkl::impl::host_waits, waits);
    vpkl::impl::fence(exec, "vpkl_test::fetch");
    Numbers rows;
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t t = begin; t < end; ++t)
        rows.push_back(b * length + t);
    EXPECT_TRUE(on_host(out) == pattern(rows, width, width, 0));
  }
}

// Case 25.
TEST(CudaTeacherCache, pageable_contents) {
  std::int64_t const rows = 14, width = 40960;  // 1,146,880 bytes
  Stream stream;
  Kokkos::Cuda const exec = stream.exec();
  Cache cache = cache_with(TransferEngine::pageable);
  DeviceWords const source("source", rows * width), out("out", rows * width);
  for (int k = 0; k < 200; ++k) {
    fill(exec, source, static_cast<std::uint16_t>(k + 1));
    cache.store(exec, bf16_rows(source, rows, width, width), 2, 7);
    cache.fetch_chunk(exec, 0, 7, bf16_rows(out, rows, width, width));
    ASSERT_EQ(others(exec, out, static_cast<std::uint16_t>(k + 1)), 0) << k;
  }
}

// Case 27, and widths around everything that a copy is cut by.
TEST(CudaTeacherCache, every_engine_gives_the_host_slice) {
  struct Shape {
    std::int64_t batch, length, width, begin, end, gap;
  };
  for (Shape const s : {Shape{4, 8, 3, 2, 5, 0}, Shape{4, 8, 64, 2, 5, 0}, Shape{1, 9, 65, 0, 9, 7},
                        Shape{3, 5, 1, 4, 5, 1}, Shape{2, 40, 5003, 7, 33, 0},
                        Shape{3, 17, 8192, 1, 17, 8}, Shape{5, 1, 129, 0, 1, 3}})
    for (TransferEngine engine : engines) {
      SCOPED_TRACE(fmt::format("[{}, {}, {}] [{}, {}) {}", s.batch, s.length, s.width, s.begin,
                               s.end, to_string(engine)));
      Stream stream;
      Kokkos::Cuda const exec = stream.exec();
      std::int64_t const pitch = s.width + s.gap;
      DeviceWords const source =
          on_device(pattern(range(s.batch * s.length), s.width, pitch, 0xdead));
      Cache cache = cache_with(engine);
      cache.store(exec, bf16_rows(source, s.batch * s.length, s.width, pitch), s.batch, s.length);

      Numbers chunk;
      for (std::int64_t b = 0; b < s.batch; ++b)
        for (std::int64_t t = s.begin; t < s.end; ++t)
          chunk.push_back(b * s.length + t);
      std::int64_t const count = static_cast<std::int64_t>(chunk.size());
      DeviceWords const room =
          on_device(std::vector<std::uint16_t>(static_cast<std::size_t>(count * pitch), 0xbeef));
      cache.fetch_chunk(exec, s.begin, s.end, bf16_rows(room, count, s.width, pitch));
      vpkl::impl::fence(exec, "vpkl_test::fetch");
      EXPECT_TRUE(on_host(room) == pattern(chunk, s.width, pitch, 0xbeef));

      Numbers scattered;
      for (std::int64_t i = 0; i < count; ++i)
        scattered.push_back((i * 5 + i * i) % (s.batch * s.length));
      DeviceWords const rows =
          on_device(std::vector<std::uint16_t>(static_cast<std::size_t>(count * pitch), 0xbeef));
      cache.fetch_rows(exec, scattered, bf16_rows(rows, count, s.width, pitch));
      vpkl::impl::fence(exec, "vpkl_test::fetch");
      EXPECT_TRUE(on_host(rows) == pattern(scattered, s.width, pitch, 0xbeef));
    }
}

TEST(CudaTeacherCache, rows_that_were_not_kept_are_passed_over_by_every_engine) {
  std::int64_t const width = 300, pitch = 304;
  Numbers const kept{1, 2, 6};
  for (TransferEngine engine : engines) {
    SCOPED_TRACE(to_string(engine));
    Stream stream;
    Kokkos::Cuda const exec = stream.exec();
    DeviceWords const source = on_device(pattern(range(8), width, pitch, 0));
    Cache cache = cache_with(engine, CacheMode::response);
    cache.store(exec, bf16_rows(source, 8, width, pitch), 2, 4, kept);
    DeviceWords const room = on_device(std::vector<std::uint16_t>(8 * pitch, 0xbeef));
    cache.fetch_chunk(exec, 0, 4, bf16_rows(room, 8, width, pitch));
    vpkl::impl::fence(exec, "vpkl_test::fetch");
    auto expected = std::vector<std::uint16_t>(8 * pitch, 0xbeef);
    for (std::int64_t row : kept)
      for (std::int64_t c = 0; c < width; ++c)
        expected[static_cast<std::size_t>(row * pitch + c)] = word(row, c);
    EXPECT_TRUE(on_host(room) == expected);
  }
}

TEST(CudaTeacherCache, freeing_while_copies_are_queued_keeps_the_block_for_the_next_store) {
  std::int64_t const rows = 64, width = 1 << 16;
  Stream compute, other;
  Kokkos::Cuda const exec = compute.exec(), elsewhere = other.exec();
  DeviceWords const source("source", rows * width), out("out", rows * width),
      next("next", rows * width);
  Rows const from = bf16_rows(source, rows, width, width);
  Cache cache = cache_with(TransferEngine::automatic);
  fill(exec, source, 1);
  cache.store(exec, from, 1, rows);
  vpkl::impl::fence(exec, "vpkl_test::store");
  PinnedMemoryUsage const before = pinned_memory_usage();

  spin(elsewhere, 50);
  cache.fetch_chunk(elsewhere, 0, rows, bf16_rows(out, rows, width, width));
  std::int64_t const waits = vpkl::impl::host_waits;
  cache.free();
  EXPECT_LT(pinned_memory_usage().in_use, before.in_use);
  fill(exec, source, 2);
  cache.store(exec, from, 1, rows);
  EXPECT_EQ(vpkl::impl::host_waits, waits) << "freeing or storing waited";
  EXPECT_EQ(pinned_memory_usage().allocations, before.allocations);
  EXPECT_EQ(pinned_memory_usage().in_use, before.in_use);
  cache.fetch_chunk(exec, 0, rows, bf16_rows(next, rows, width, width));
  EXPECT_EQ(others(elsewhere, out, 1), 0);
  EXPECT_EQ(others(exec, next, 2), 0);
}

// Case 38.
TEST(CudaTeacherCache, usable_after_asking_for_too_much) {
  Stream stream;
  Kokkos::Cuda const exec = stream.exec();
  DeviceWords const source("source", 4 * 256);
  Rows from = bf16_rows(source, 4, 256, 256);
  Cache::Options options;
  options.memory_budget = ~std::size_t(0);
  Cache cache(Communicator::self(), options);
  Rows huge = from;
  huge.width = static_cast<std::int64_t>(available_host_memory()) / 2 / 4 * 10;
  huge.index.inner_stride = huge.width;
  EXPECT_THROW(cache.store(exec, huge, 1, 4), OutOfMemory);
  EXPECT_FALSE(cache.holds_rows());
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  fill(exec, source, 9);
  cache.store(exec, from, 1, 4);
  DeviceWords const out("out", 4 * 256);
  cache.fetch_chunk(exec, 0, 4, bf16_rows(out, 4, 256, 256));
  EXPECT_EQ(others(exec, out, 9), 0);
}

TEST(CudaTeacherCache, names_of_engines) {
  for (TransferEngine engine : engines)
    EXPECT_EQ(transfer_engine_from_string(to_string(engine)), engine);
  EXPECT_THROW(transfer_engine_from_string("fast"), InvalidArgument);
}

}  // namespace
