// SPDX-License-Identifier: Apache-2.0
// The parts of vpkl-transfer that need no device: figures, cases, remedies.
#include "device_watch.hpp"
#include "numa.hpp"
#include "remedies.hpp"
#include "statistics.hpp"
#include "work.hpp"

#include <vpkl/core/error.hpp>

#include <gtest/gtest.h>

#include <string>
#include <vector>

using namespace vpkl;
using namespace vpkl::transfer;

namespace {

Shape const cache{2, 10, 64, ElementType::bf16};

bool says(std::vector<std::string> const& texts, std::string const& what) {
  for (std::string const& text : texts)
    if (text.find(what) != std::string::npos) return true;
  return false;
}

Traffic copies(std::string what, std::int64_t count, std::int64_t bytes, double seconds) {
  Traffic traffic;
  traffic.what = std::move(what);
  traffic.count = count;
  traffic.bytes = bytes;
  traffic.seconds = seconds;
  return traffic;
}

TEST(TransferStatistics, percentiles) {
  Timing const timing = timing_of({5, 1, 4, 2, 3});
  EXPECT_DOUBLE_EQ(timing.median, 3);
  EXPECT_DOUBLE_EQ(timing.p10, 1.4);
  EXPECT_DOUBLE_EQ(timing.p90, 4.6);
  EXPECT_DOUBLE_EQ(timing_of({1, 2}).median, 1.5);
  EXPECT_DOUBLE_EQ(timing_of({7}).p90, 7);
  EXPECT_DOUBLE_EQ(timing.microseconds()["median"].get<double>(), 3e6);
}

TEST(TransferStatistics, bandwidth) {
  EXPECT_DOUBLE_EQ(gigabytes_per_second(3'000'000'000, 1.5), 2);
  EXPECT_EQ(gigabytes_per_second(8, 0), 0);
  // 16 lanes of generation 5: 32 GT/s, 128 of 130 bits.
  EXPECT_NEAR(link_gigabytes_per_second(5, 16), 63.0, 0.1);
  EXPECT_NEAR(link_gigabytes_per_second(3, 8), 7.88, 0.01);
  EXPECT_EQ(link_gigabytes_per_second(0, 16), 0);
}

TEST(TransferWork, rows_of_a_chunk) {
  Work const work = chunk_work("pinned_2d", Direction::h2d, cache, 4);
  EXPECT_EQ(work.rows, (std::vector<std::int64_t>{3, 4, 5, 6, 13, 14, 15, 16}));
  EXPECT_EQ(work.bytes(), 8u * 64 * 2);
  EXPECT_EQ(work.key(), "h2d/chunk/pinned_2d/bf16/2x10x64/c4");
  EXPECT_TRUE(work.describe()["rows_aligned_to_128_bytes"].get<bool>());
}

TEST(TransferWork, scattered_rows_are_ascending_and_the_same_each_time) {
  Work const work = rows_work("mapped", Direction::d2h, cache, 7);
  ASSERT_EQ(work.rows.size(), 7u);
  for (std::size_t i = 1; i < work.rows.size(); ++i)
    EXPECT_LT(work.rows[i - 1], work.rows[i]);
  EXPECT_GE(work.rows.front(), 0);
  EXPECT_LT(work.rows.back(), 20);
  EXPECT_EQ(work.rows, rows_work("mapped", Direction::d2h, cache, 7).rows);
  EXPECT_EQ(rows_work("mapped", Direction::d2h, cache, 20).rows.size(), 20u);
}

TEST(TransferWork, unaligned_rows_are_named) {
  Shape odd = cache;
  odd.vocabulary = 63;
  EXPECT_FALSE(chunk_work("staged", Direction::h2d, odd, 4)
                   .describe()["rows_aligned_to_128_bytes"]
                   .get<bool>());
}

TEST(TransferRemedies, none_for_a_copy_that_fills_the_time) {
  Work const work = chunk_work("pinned_2d", Direction::h2d, cache, 4);
  EXPECT_TRUE(remedies(work, {copies("pinned to device", 2, 1024, 9e-4)}, 1e-3).empty());
}

TEST(TransferRemedies, pageable_copies_are_told_to_pin) {
  Work const work = chunk_work("pageable", Direction::h2d, cache, 4);
  auto const found = remedies(work, {copies("pageable to device", 1, 1024, 1e-4)}, 1e-3);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_TRUE(says(found, "pinned memory")) << found[0];
  EXPECT_TRUE(says(found, "pageable to device")) << found[0];
  EXPECT_TRUE(says(remedies(work, {copies("device to pageable", 1, 1024, 1e-4)}, 1e-3), "pinned"));
}

TEST(TransferRemedies, synchronous_copies_are_told_of_streams) {
  Work const work = chunk_work("pinned_2d", Direction::h2d, cache, 4);
  Traffic traffic = copies("pinned to device", 1, 1024, 9e-4);
  traffic.synchronous = true;
  auto const found = remedies(work, {traffic}, 1e-3);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_TRUE(says(found, "cudaMemcpyAsync")) << found[0];
}

TEST(TransferRemedies, an_idle_device_and_many_copies) {
  Work work = rows_work("pinned_rows", Direction::h2d, Shape{8, 100, 64, ElementType::bf16}, 100);
  auto const found = remedies(work, {copies("pinned to device", 100, 12800, 1e-4)}, 1e-3);
  EXPECT_EQ(found.size(), 2u);
  EXPECT_TRUE(says(found, "100 copies, one a row"));
  EXPECT_TRUE(says(found, "10 %"));
  // A kernel counts as busy.
  Traffic kernel = copies("kernel", 1, 0, 9e-4);
  kernel.copy = false;
  EXPECT_TRUE(remedies(work, {kernel}, 1e-3).empty());
}

TEST(TransferNuma, this_machine) {
  ASSERT_FALSE(numa_nodes().empty());
  EXPECT_TRUE(cpus_of_node(1023).empty());
  int here = 0;
  int const node = node_of_page(&here);
  // A sandbox may forbid the question.
  if (node >= 0) {
    auto const nodes = numa_nodes();
    EXPECT_NE(std::find(nodes.begin(), nodes.end(), node), nodes.end());
  }
  EXPECT_EQ(node_of_pci("ffff:ff:1f.7"), -1);
}

TEST(TransferWatch, a_gpu_that_does_not_exist_is_unknown_with_a_reason) {
  DeviceWatch watch("ffff:ff:1f.7");
  nlohmann::json const facts = watch.describe();
  EXPECT_TRUE(facts["driver"].is_null() || facts["driver"].is_string());
  EXPECT_TRUE(facts["numa_node"].is_null());
  EXPECT_FALSE(facts["numa_node_reason"].get<std::string>().empty());
  EXPECT_FALSE(facts["nvml_reason"].get<std::string>().empty());
  watch.start();
  nlohmann::json const state = watch.stop();
  EXPECT_TRUE(state["link_generation"].is_null());
  EXPECT_TRUE(state["throttle_reasons"].empty());
  EXPECT_EQ(throttle_names(0x84),
            (std::vector<std::string>{"sw_power_cap", "hw_power_brake_slowdown"}));
}

}  // namespace
