// SPDX-License-Identifier: Apache-2.0
// The streamed loss on a device: memory, host waits, and the same bits whatever the way.
#include "cuda/device.hpp"

#include <vpkl/core/allocate.hpp>
#include <vpkl/teacher/cache.hpp>
#include <vpkl/training/streamed_loss.hpp>
#include <vpkl/vocab/shard.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

using namespace vpkl;
using namespace vpkl::test;

namespace {

using Loss = StreamedLoss<Kokkos::Cuda>;
using Cache = TeacherCache<Kokkos::Cuda>;

/// bf16 noise in [-4, 4), a function of the place.
struct Noise {
  std::uint16_t* words;
  std::uint32_t seed;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    std::uint32_t h = static_cast<std::uint32_t>(i) * 2654435761u + seed;
    h = (h ^ (h >> 15)) * 2246822519u;
    h = (h ^ (h >> 13)) * 3266489917u;
    h ^= h >> 16;
    words[i] = bfloat16::from_float(static_cast<float>(h) * (8.0f / 4294967296.0f) - 4.0f).bits;
  }
};

struct MicroBatch {
  std::int64_t batch, length, width;
  DeviceWords student, teacher, gradient;
  std::vector<std::uint8_t> mask;

  MicroBatch(std::int64_t b, std::int64_t t, std::int64_t v, std::int64_t first_response,
             std::int64_t last_response)
      : batch(b),
        length(t),
        width(v),
        student("student", b * t * v),
        teacher("teacher", b * t * v),
        gradient("gradient", b * t * v),
        mask(static_cast<std::size_t>(b * t), 0) {
    std::uint32_t seed = 1;
    for (DeviceWords const& words : {student, teacher})
      Kokkos::parallel_for(
          "vpkl_test::noise",
          vpkl::impl::RangePolicy64<Kokkos::Cuda>(0, static_cast<std::int64_t>(words.size())),
          Noise{words.data(), seed++});
    Kokkos::fence();
    for (std::int64_t row = 0; row < b; ++row)
      for (std::int64_t p = first_response; p < last_response; ++p)
        mask[static_cast<std::size_t>(row * t + p)] = 1;
  }
  Rows rows(DeviceWords const& words) const {
    return bf16_rows(words, batch * length, width, width);
  }
  ResponseMask response() const { return {mask.data(), batch, length}; }
};

struct Answer {
  double loss = 0;
  std::vector<float> values;
  std::vector<std::uint16_t> gradient;
  std::int64_t waits = 0, chunks = 0;
  std::size_t workspace = 0;
};

Answer answer(Kokkos::Cuda const& exec, MicroBatch const& m, Loss::Options const& options,
              TransferEngine engine, bool copy_gradient = true) {
  Cache::Options cached;
  cached.engine = engine;
  Cache cache(Communicator::self(), cached);
  Loss loss(Communicator::self(), VocabShard::whole(m.width), options);
  cache.store(exec, m.rows(m.teacher), m.batch, m.length);
  fill(exec, m.gradient, 0x7fff);
  loss.compute(exec, m.rows(m.student), cache, m.response(), {}, m.rows(m.gradient));
  vpkl::impl::fence(exec, "vpkl_test::first");
  std::int64_t const before = vpkl::impl::host_waits;
  LossResult const result =
      loss.compute(exec, m.rows(m.student), cache, m.response(), {}, m.rows(m.gradient));
  Answer out;
  out.waits = vpkl::impl::host_waits - before;
  out.loss = result.loss;
  out.chunks = result.chunks;
  out.values = loss.row_values();
  out.workspace = loss.workspace_bytes();
  vpkl::impl::fence(exec, "vpkl_test::second");
  if (copy_gradient) out.gradient = on_host(m.gradient);
  return out;
}

Loss::Options options_of(PlanKind plan, std::int64_t width, bool skip = true) {
  Loss::Options options;
  options.plan = plan;
  options.chunk_width = width;
  options.skip_empty_chunks = skip;
  return options;
}

TEST(CudaStreamedLoss, the_same_bits_by_every_engine_plan_and_width) {
  MicroBatch const m(3, 70, 5001, 31, 60);
  Stream stream;
  Answer const first =
      answer(stream.exec(), m, options_of(PlanKind::rows, 70), TransferEngine::automatic);
  ASSERT_TRUE(std::isfinite(first.loss) && first.loss > 0) << first.loss;
  for (std::size_t row = 0; row < first.values.size(); ++row) {
    bool const counts = row % 70 != 69 && m.mask[row + 1] != 0;
    EXPECT_EQ(first.values[row] != 0, counts) << row;
    std::int64_t other = 0;
    for (std::int64_t c = 0; c < m.width; ++c)
      other += first.gradient[row * static_cast<std::size_t>(m.width) + c] != 0;
    EXPECT_EQ(other != 0, counts) << row;
  }
  auto const same = [&](Answer const& a, std::string const& what) {
    EXPECT_EQ(a.loss, first.loss) << what;
    EXPECT_TRUE(a.values == first.values) << what;
    EXPECT_TRUE(a.gradient == first.gradient) << what;
  };
  for (TransferEngine engine :
       {TransferEngine::automatic, TransferEngine::pageable, TransferEngine::staged,
        TransferEngine::pinned_rows, TransferEngine::pinned_2d, TransferEngine::mapped})
    for (PlanKind plan : {PlanKind::rows, PlanKind::chunks})
      for (std::int64_t width : {1, 16, 70})
        for (bool skip : {true, false}) {
          if (!skip && plan == PlanKind::rows) continue;
          same(answer(stream.exec(), m, options_of(plan, width, skip), engine),
               fmt::format("{} {} {} {}", to_string(engine), to_string(plan), width, skip));
        }
  for (int i = 0; i < 50; ++i)
    same(answer(stream.exec(), m, options_of(PlanKind::chunks, 16), TransferEngine::automatic),
         "again");
}

TEST(CudaStreamedLoss, in_place) {
  MicroBatch const m(2, 33, 1111, 8, 30);
  Stream stream;
  Answer const apart =
      answer(stream.exec(), m, options_of(PlanKind::chunks, 8), TransferEngine::automatic);
  Cache cache(Communicator::self(), {});
  Loss loss(Communicator::self(), VocabShard::whole(m.width), options_of(PlanKind::rows, 4));
  cache.store(stream.exec(), m.rows(m.teacher), m.batch, m.length);
  LossResult const result =
      loss.compute(stream.exec(), m.rows(m.student), cache, m.response(), {}, m.rows(m.student));
  vpkl::impl::fence(stream.exec(), "vpkl_test::in_place");
  EXPECT_EQ(result.loss, apart.loss);
  EXPECT_TRUE(on_host(m.student) == apart.gradient);
}

// Case 19.
TEST(CudaStreamedLoss, two_host_waits_whatever_the_number_of_chunks) {
  MicroBatch const m(2, 129, 4096, 1, 129);
  Stream stream;
  for (auto const& [width, chunks] : {std::pair<std::int64_t, std::int64_t>{129, 1}, {2, 64}}) {
    Answer const a = answer(stream.exec(), m, options_of(PlanKind::chunks, width),
                            TransferEngine::automatic, false);
    EXPECT_NEAR(static_cast<double>(a.chunks), static_cast<double>(chunks), 1);
    EXPECT_LE(a.waits, 2) << chunks << " chunks";
  }
}

// Case 18.
TEST(CudaStreamedLoss, memory_does_not_grow_with_length) {
  Stream stream;
  auto const once = [&](std::int64_t length) {
    MicroBatch const m(1, length, 8192, 1, length);
    Cache cache(Communicator::self(), {});
    cache.store(stream.exec(), m.rows(m.teacher), m.batch, m.length);
    vpkl::impl::fence(stream.exec(), "vpkl_test::store");
    std::size_t const before = vpkl::impl::available_device_memory();
    Loss loss(Communicator::self(), VocabShard::whole(m.width), options_of(PlanKind::chunks, 256));
    loss.compute(stream.exec(), m.rows(m.student), cache, m.response(), {}, m.rows(m.gradient));
    vpkl::impl::fence(stream.exec(), "vpkl_test::compute");
    std::size_t const after = vpkl::impl::available_device_memory();
    return std::pair(loss.workspace_bytes(),
                     static_cast<double>(before) - static_cast<double>(after));
  };
  // Free memory is the device's: others may take and give some meanwhile.
  auto const used = [&](std::int64_t length) {
    std::vector<double> taken;
    std::size_t workspace = 0;
    for (int i = 0; i < 5; ++i) {
      auto const [bytes, driver] = once(length);
      workspace = bytes;
      taken.push_back(driver);
    }
    std::nth_element(taken.begin(), taken.begin() + 2, taken.end());
    return std::pair(workspace, taken[2]);
  };
  once(300);  // loads kernels
  auto const [small, small_driver] = used(1024);
  auto const [large, large_driver] = used(8192);
  EXPECT_NEAR(static_cast<double>(large), static_cast<double>(small), 0.05 * small);
  EXPECT_LE(large_driver, 1.05 * small_driver + (4 << 20));
}

}  // namespace
