// SPDX-License-Identifier: Apache-2.0
// vpkl-transfer: how a chunk of a teacher cache travels between host and device.
#include "numa.hpp"
#include "options.hpp"
#include "report.hpp"
#include "runner.hpp"

#include <runtime.hpp>

#include <vpkl/io/json_lines.hpp>

#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <vector>

namespace {

using namespace vpkl;
using namespace vpkl::transfer;

int measure(Options const& options) {
  // The results can be written before anything is measured.
  std::unique_ptr<JsonLinesWriter> results;
  if (!options.output_jsonl.empty())
    results = std::make_unique<JsonLinesWriter>(options.output_jsonl);
  if (results && !results->torn_line().empty())
    fmt::print(stderr, "vpkl-transfer: moved a torn last line of {} aside\n", options.output_jsonl);
  if (options.numa_node >= 0) bind_to_node(options.numa_node);

  std::string why_no_device;
  std::unique_ptr<Device> const device = make_device(why_no_device);
  std::vector<nlohmann::json> records;
  int failures = 0;
  {
    apps::Progress progress(true);
    Runner runner(
        options, device.get(), why_no_device,
        [&](nlohmann::json const& record) {
          if (results) results->write(record);
          records.push_back(record);
        },
        [&](std::string const& text) { progress.show(text); });
    runner.run();
    failures = runner.failures();
  }
  if (results) results->close();
  fmt::print("{}", tables(records));
  if (results) fmt::print("\nResults: {}\n", options.output_jsonl);
  if (failures == 0) return 0;
  std::fflush(stdout);
  fmt::print(stderr, "vpkl-transfer: {} measurements failed\n", failures);
  return apps::exit_failure;
}

}  // namespace

int main(int argc, char** argv) {
  ParseResult const parsed = parse(argc, argv);
  if (!parsed.options) return parsed.status;
  try {
    return measure(*parsed.options);
  } catch (std::exception const& error) {
    fmt::print(stderr, "vpkl-transfer: {}\n", error.what());
    return apps::exit_failure;
  }
}
