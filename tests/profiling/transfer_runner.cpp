// SPDX-License-Identifier: Apache-2.0
// What vpkl-transfer makes of a device's answers, on a device that answers as it is told.
#include "backend.hpp"
#include "report.hpp"
#include "runner.hpp"

#include <vpkl/core/error.hpp>

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

using namespace vpkl;
using namespace vpkl::transfer;

namespace {

using Json = nlohmann::json;

/// Contiguous copies take 1 ms, transfers what the engine is given.
class FakeSeries final : public Series {
 public:
  FakeSeries(double seconds, std::int64_t wrong) : seconds_(seconds), wrong_(wrong) {}
  Sample contiguous() override { return {1e-3, 0}; }
  Sample transfer() override { return {seconds_, wrong_}; }

 private:
  double seconds_;
  std::int64_t wrong_;
};

class FakeDevice final : public Device {
 public:
  std::map<std::string, double> seconds = {{"pageable", 40e-3}, {"pinned_2d", 1e-3}};
  std::int64_t wrong = 0;
  bool out_of_memory = false;
  std::string no_attribution;

  std::unique_ptr<Series> open(Work const& work) override {
    engine_ = work.engine;
    if (out_of_memory) throw OutOfMemory("device: 9 bytes requested, 8 bytes available");
    return std::make_unique<FakeSeries>(seconds.at(work.engine), wrong);
  }
  Json describe() const override {
    return {{"name", "Fake"}, {"runtime_version", "13.0"}, {"driver_api_version", "13.0"}};
  }
  std::string pci_address() const override { return "ffff:ff:1f.7"; }
  int numa_node_of_pinned() override { return 0; }
  std::pair<double, double> pinning(std::size_t) override { return {0.3, 0.1}; }
  SizeSample size_sample(std::size_t, bool pinned, Direction) override {
    return pinned ? SizeSample{1e-6, 100e-6, 0} : SizeSample{3e-6, 1e-6, 0};
  }
  Disturbed disturbed(Series& series) override {
    Disturbed d;
    d.sample = series.transfer();
    d.sample.seconds *= 2;
    d.covered = true;
    d.kernel_seconds = 3;
    d.kernel_alone_seconds = 2;
    return d;
  }
  std::vector<Traffic> attribute(Series&) override {
    Traffic copy;
    copy.what = engine_ == "pageable" ? "pageable to device" : "pinned to device";
    copy.count = 2;
    copy.bytes = 640;
    copy.seconds = 0.9e-3;
    return {copy};
  }
  std::string attribution_waived() const override { return no_attribution; }
  int devices() const override { return 2; }
  std::vector<Round> together(Work const&, std::vector<int> const& devices, int rounds) override {
    // Alone 1 ms; two together overlap for most of 1.5 ms each and need 1.6 in all.
    Round round;
    bool const alone = devices.size() == 1;
    round.device_seconds.assign(devices.size(), alone ? 1e-3 : 1.5e-3);
    round.seconds = alone ? 1e-3 : 1.6e-3;
    return std::vector<Round>(static_cast<std::size_t>(rounds), round);
  }

 private:
  std::string engine_;
};

class TransferRunner : public testing::Test {
 protected:
  TransferRunner() {
    options.batch = 2;
    options.length = 10;
    options.vocabularies = {16};
    options.chunk_widths = {4};
    options.types = {ElementType::bf16};
    options.engines = {"pageable", "pinned_2d"};
    options.directions = {Direction::h2d};
    options.patterns = {Pattern::chunk};
    options.repetitions = 3;
    options.warmup = 1;
  }

  void run() {
    Runner runner(
        options, &device, "", [&](Json const& record) { records.push_back(record); },
        [](std::string const&) {});
    runner.run();
    failures = runner.failures();
  }

  std::vector<Json> of(std::string const& type) const {
    std::vector<Json> found;
    for (Json const& record : records)
      if (record["type"] == type) found.push_back(record);
    return found;
  }

  Options options;
  FakeDevice device;
  std::vector<Json> records;
  int failures = 0;
};

TEST_F(TransferRunner, figures_of_a_transfer) {
  run();
  auto const transfers = of("transfer");
  ASSERT_EQ(transfers.size(), 2u);
  Json const& pageable = transfers[0];
  EXPECT_EQ(pageable["status"], "ok");
  EXPECT_DOUBLE_EQ(pageable["microseconds"]["median"].get<double>(), 40e3);
  EXPECT_DOUBLE_EQ(pageable["ratio_to_reference"].get<double>(), 1.0 / 40);
  // 8 rows of 32 bytes.
  EXPECT_DOUBLE_EQ(pageable["gigabytes_per_second"].get<double>(), 256 / 40e-3 * 1e-9);
  EXPECT_EQ(pageable["reference"]["name"], "pinned_contiguous");
  EXPECT_EQ(pageable["verified_transfers"], 8);
  EXPECT_TRUE(pageable.contains("device_state"));
  EXPECT_EQ(failures, 0);
}

TEST_F(TransferRunner, pinning_pays_after_the_fetches_that_save_as_much) {
  run();
  // 0.4 s over 39 ms a fetch.
  EXPECT_EQ(of("pinning").at(0)["pays_after_chunk_fetches"], 11);
  EXPECT_NE(tables(records).find("pays after 11 chunk fetches"), std::string::npos);
  records.clear();
  options.engines = {"pinned_2d"};
  run();
  EXPECT_TRUE(of("pinning").at(0)["pays_after_chunk_fetches"].is_null());
  EXPECT_NE(tables(records).find("needs pageable"), std::string::npos);
}

TEST_F(TransferRunner, data_that_arrives_wrong_is_a_failure) {
  device.wrong = 5;
  options.interference = true;
  run();
  // 1 + 3 transfers; beside the kernel 3.
  EXPECT_EQ(of("transfer").at(0)["status"], "failed");
  EXPECT_EQ(of("transfer").at(0)["wrong_elements"], 20);
  EXPECT_EQ(of("interference").at(0)["wrong_elements"], 15);
  EXPECT_EQ(failures, 4);
  EXPECT_NE(tables(records).find("failed: 20 elements did not arrive"), std::string::npos);
}

TEST_F(TransferRunner, memory_that_cannot_be_had_fails_its_case_alone) {
  device.out_of_memory = true;
  options.attribution = options.interference = true;
  run();
  EXPECT_EQ(failures, 2);
  for (Json const& record : of("transfer")) {
    EXPECT_EQ(record["status"], "failed");
    EXPECT_NE(record["reason"].get<std::string>().find("9 bytes requested"), std::string::npos);
  }
  for (char const* type : {"attribution", "interference"}) {
    ASSERT_EQ(of(type).size(), 2u) << type;
    EXPECT_EQ(of(type)[0]["status"], "waived");
  }
}

TEST_F(TransferRunner, attribution_names_kind_range_and_remedy) {
  options.attribution = true;
  run();
  auto const found = of("attribution");
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0]["range"], "h2d/chunk/pageable/bf16/2x10x16/c4");
  Json const& copy = found[0]["activities"].at(0);
  EXPECT_EQ(copy["what"], "pageable to device");
  EXPECT_EQ(copy["count"], 2);
  EXPECT_EQ(copy["bytes"], 640);
  EXPECT_DOUBLE_EQ(copy["device_microseconds"].get<double>(), 900);
  EXPECT_EQ(found[0]["remedies"].size(), 1u);
  EXPECT_TRUE(found[1]["remedies"].empty());
  std::string const text = tables(records);
  EXPECT_NE(text.find("2 x pageable to device"), std::string::npos) << text;
  EXPECT_NE(text.find("  -> pageable to device (2 copies, 640 bytes)"), std::string::npos) << text;
}

TEST_F(TransferRunner, attribution_that_this_build_lacks_is_waived) {
  options.attribution = true;
  device.no_attribution = "this build has no CUPTI";
  run();
  EXPECT_EQ(of("attribution").at(0)["status"], "waived");
  EXPECT_EQ(of("attribution").at(0)["reason"], "this build has no CUPTI");
  EXPECT_EQ(failures, 0);
}

TEST_F(TransferRunner, interference_is_relative_to_the_undisturbed) {
  options.interference = true;
  run();
  Json const record = of("interference").at(0);
  EXPECT_DOUBLE_EQ(record["slowdown"].get<double>(), 2);
  EXPECT_DOUBLE_EQ(record["kernel_slowdown"].get<double>(), 1.5);
  EXPECT_EQ(record["covered_repetitions"], 3);
}

TEST_F(TransferRunner, the_total_of_all_gpus_is_over_the_whole_time) {
  options.all_gpus = true;
  run();
  Json const record = of("all_gpus").at(0);
  double const bytes = record["bytes"].get<double>();
  EXPECT_DOUBLE_EQ(record["total_gigabytes_per_second"].get<double>(), 2 * bytes / 1.6e-3 * 1e-9);
  EXPECT_DOUBLE_EQ(record["sum_of_alone_gigabytes_per_second"].get<double>(),
                   2 * bytes / 1e-3 * 1e-9);
  EXPECT_DOUBLE_EQ(record["scaling"].get<double>(), 1 / 1.6);
  EXPECT_EQ(record["devices"].size(), 2u);
}

TEST_F(TransferRunner, sizes_say_when_pinning_pays) {
  options.engines.clear();
  options.sizes = true;
  options.smallest_size = options.largest_size = 4096;
  run();
  auto const found = of("size");
  ASSERT_EQ(found.size(), 4u);
  EXPECT_EQ(found[3]["memory"], "pinned");
  // 100 us over 2 us a copy.
  EXPECT_EQ(found[3]["pays_after_uses"], 50);
}

TEST_F(TransferRunner, memory_on_another_node_is_flagged) {
  run();
  // The device's own node is not known, so nothing is claimed.
  EXPECT_TRUE(records.at(0)["pinned_memory_is_remote"].is_null());
  records[0]["pinned_memory_is_remote"] = true;
  EXPECT_NE(tables(records).find("REMOTE"), std::string::npos);
}

}  // namespace
