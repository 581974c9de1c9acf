// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>

namespace vpkl::transfer {

namespace {

using Json = nlohmann::json;
using Text = std::back_insert_iterator<std::string>;

std::string text_of(Json const& value) {
  if (value.is_null()) return "unknown";
  return value.is_string() ? value.get<std::string>() : value.dump();
}

/// What a waived or failed record says instead of numbers; empty for a good one.
std::string why_not(Json const& record) {
  if (record["status"] == "ok") return {};
  return fmt::format("{}: {}", text_of(record["status"]), text_of(record["reason"]));
}

double median(Json const& record) { return record["microseconds"]["median"].get<double>(); }

void host(Text out, Json const& record) {
  Json const& host = record["host"];
  fmt::format_to(out, "Host: {}, {}, {} CPUs, NUMA nodes {}\n", text_of(host["host"]),
                 text_of(host["cpu"]), text_of(host["usable_cpus"]), record["numa_nodes"].dump());
  if (record["device"].is_null()) {
    fmt::format_to(out, "Device: none; {}\n", text_of(record["device_reason"]));
    return;
  }
  Json const& device = record["device"];
  fmt::format_to(out, "Device: {} at {}, driver {}, CUDA {} (driver's {}), PCIe {} x{}",
                 text_of(device["name"]), text_of(device["pci_address"]), text_of(device["driver"]),
                 text_of(device["runtime_version"]), text_of(device["driver_api_version"]),
                 text_of(device["largest_link_generation"]), text_of(device["largest_link_width"]));
  if (!device["link_gigabytes_per_second"].is_null())
    fmt::format_to(out, " ({:.1f} GB/s)", device["link_gigabytes_per_second"].get<double>());
  fmt::format_to(out, "\nNUMA: GPU on node {}, pinned memory on node {}{}\n",
                 text_of(device["numa_node"]), text_of(record["numa_node_of_pinned_memory"]),
                 record["pinned_memory_is_remote"] == true
                     ? "  REMOTE: expect less bandwidth; see --numa-node"
                     : "");
}

std::string group_of(Json const& r) {
  std::string const what = r["pattern"] == "chunk"
                               ? fmt::format("chunk [{}, {}, {}] of", text_of(r["batch"]),
                                             text_of(r["chunk_width"]), text_of(r["vocabulary"]))
                               : fmt::format("{} scattered rows of", text_of(r["rows"]));
  return fmt::format("{} {} [{}, {}, {}] {}, {:.1f} MB{}", text_of(r["direction"]), what,
                     text_of(r["batch"]), text_of(r["length"]), text_of(r["vocabulary"]),
                     text_of(r["element_type"]), r["bytes"].get<double>() * 1e-6,
                     r["rows_aligned_to_128_bytes"] == true ? "" : ", rows not aligned");
}

void transfer(Text out, Json const& r, std::string& group) {
  if (group_of(r) != group) {
    group = group_of(r);
    fmt::format_to(out, "\n{}\n{:<12} {:>11} {:>11} {:>11} {:>8} {:>11}\n", group, "engine",
                   "median us", "p10 us", "p90 us", "GB/s", "contiguous");
  }
  std::string const engine = text_of(r["engine"]), why = why_not(r);
  if (!r.contains("microseconds")) {
    fmt::format_to(out, "{:<12} {}\n", engine, why);
    return;
  }
  Json const& us = r["microseconds"];
  fmt::format_to(
      out, "{:<12} {:>11.1f} {:>11.1f} {:>11.1f} {:>8.2f} {:>10.1f}%{}{}\n", engine, median(r),
      us["p10"].get<double>(), us["p90"].get<double>(), r["gigabytes_per_second"].get<double>(),
      100 * r["ratio_to_reference"].get<double>(),
      r["reference"]["name"] == "memcpy" ? " of memcpy" : "", why.empty() ? "" : "  " + why);
}

/// Extremes over all series on the device.
void under_load(Text out, std::vector<Json> const& records) {
  Json best;  // of the host record: the largest link
  unsigned generation = 0, width = 0;
  double low = 0, high = 0;
  std::set<std::string> reasons;
  for (Json const& r : records) {
    if (r["type"] == "host") best = r["device"];
    if (!r.contains("device_state")) continue;
    Json const& state = r["device_state"];
    auto const number = [&](char const* key) {
      return state[key].is_null() ? 0.0 : state[key].get<double>();
    };
    generation = std::max(generation, static_cast<unsigned>(number("link_generation")));
    width = std::max(width, static_cast<unsigned>(number("link_width")));
    double const slowest = number("sm_clock_lowest_mhz");
    if (slowest > 0 && (low == 0 || slowest < low)) low = slowest;
    high = std::max(high, number("sm_clock_highest_mhz"));
    for (Json const& reason : state["throttle_reasons"])
      reasons.insert(text_of(reason));
  }
  if (best.is_null()) return;
  auto const below = [&](char const* key, unsigned value) {
    return !best[key].is_null() && value > 0 && value < best[key].get<unsigned>();
  };
  fmt::format_to(
      out, "\nUnder load: PCIe {} x{}{}, SM clock {:.0f} to {:.0f} MHz, throttled by {}\n",
      generation ? std::to_string(generation) : "unknown",
      width ? std::to_string(width) : "unknown",
      below("largest_link_generation", generation) || below("largest_link_width", width)
          ? " (LESS than this GPU can)"
          : "",
      low, high, reasons.empty() ? "nothing" : fmt::format("{}", fmt::join(reasons, ", ")));
}

void attribution(Text out, Json const& r) {
  std::string const why = why_not(r);
  if (!why.empty()) {
    fmt::format_to(out, "{}: {}\n", text_of(r["key"]), why);
    return;
  }
  fmt::format_to(out, "{}\n", text_of(r["range"]));
  for (Json const& a : r["activities"])
    fmt::format_to(out, "  {:>6} x {:<28} {:>12} bytes {:>11.1f} us on the device{}{}\n",
                   a["count"].get<std::int64_t>(), text_of(a["what"]),
                   a["bytes"].get<std::int64_t>(), a["device_microseconds"].get<double>(),
                   a["synchronous"] == true ? "  synchronous" : "",
                   a["in_range"] == true ? "" : "  outside the range");
  for (Json const& remedy : r["remedies"])
    fmt::format_to(out, "  -> {}\n", text_of(remedy));
}

void interference(Text out, Json const& r) {
  std::string const why = why_not(r);
  if (!r.contains("microseconds")) {
    fmt::format_to(out, "{}: {}\n", text_of(r["key"]), why);
    return;
  }
  fmt::format_to(out, "{:<60} {:>10.1f} us, {:.2f} x alone; kernel {:.2f} x alone{}{}\n",
                 text_of(r["key"]), median(r), r["slowdown"].get<double>(),
                 r["kernel_slowdown"].get<double>(),
                 r["covered_repetitions"] == r["repetitions"] ? "" : "  (kernel ended first)",
                 why.empty() ? "" : "  " + why);
}

void pinning(Text out, Json const& r) {
  fmt::format_to(out, "{:.1f} MB of [{}, {}, {}] {}: ", r["bytes"].get<double>() * 1e-6,
                 text_of(r["batch"]), text_of(r["length"]), text_of(r["vocabulary"]),
                 text_of(r["element_type"]));
  std::string const why = why_not(r);
  if (!why.empty()) {
    fmt::format_to(out, "{}\n", why);
    return;
  }
  fmt::format_to(out, "pin {:.3f} s, unpin {:.3f} s; ", r["pin_seconds"].get<double>(),
                 r["unpin_seconds"].get<double>());
  if (r["pays_after_chunk_fetches"].is_null())
    fmt::format_to(out, "use count unknown ({})\n", text_of(r["pays_reason"]));
  else
    fmt::format_to(out, "pays after {} chunk fetches\n", text_of(r["pays_after_chunk_fetches"]));
}

void size(Text out, Json const& r) {
  fmt::format_to(out, "{:>13} {:<4} {:<13} ", r["bytes"].get<std::int64_t>(),
                 text_of(r["direction"]), text_of(r["memory"]));
  std::string const why = why_not(r);
  if (!r.contains("microseconds")) {
    fmt::format_to(out, "{}\n", why);
    return;
  }
  std::string pays;
  if (r.contains("pays_after_uses") && !r["pays_after_uses"].is_null())
    pays = fmt::format("  pays after {} uses", text_of(r["pays_after_uses"]));
  fmt::format_to(out, "{:>11.1f} us {:>8.2f} GB/s, allocation {:>11.1f} us{}{}\n", median(r),
                 r["gigabytes_per_second"].get<double>(), r["allocate_microseconds"].get<double>(),
                 pays, why.empty() ? "" : "  " + why);
}

void all_gpus(Text out, Json const& r) {
  std::string const why = why_not(r);
  if (!r.contains("devices")) {
    fmt::format_to(out, "{}\n", why);
    return;
  }
  for (Json const& d : r["devices"])
    fmt::format_to(out, "GPU {}: {:.2f} GB/s alone, {:.2f} GB/s together\n", text_of(d["device"]),
                   d["alone_gigabytes_per_second"].get<double>(),
                   d["together_gigabytes_per_second"].get<double>());
  fmt::format_to(out, "total {:.2f} GB/s, {:.1f}% of the sum alone{}\n",
                 r["total_gigabytes_per_second"].get<double>(), 100 * r["scaling"].get<double>(),
                 why.empty() ? "" : "  " + why);
}

}  // namespace

std::string tables(std::vector<Json> const& records) {
  std::string text, group;
  Text const out(text);
  auto const each = [&](char const* type, char const* heading, auto&& line) {
    bool first = true;
    for (Json const& record : records) {
      if (record["type"] != type) continue;
      if (first && *heading) fmt::format_to(out, "\n{}\n", heading);
      first = false;
      line(out, record);
    }
  };
  each("host", "", host);
  each("transfer", "", [&](Text o, Json const& r) { transfer(o, r, group); });
  under_load(out, records);
  each("pinning", "Pinning the whole tensor", pinning);
  each("attribution", "On the device, by kind of copy", attribution);
  each("interference", "Beside a kernel that reads and writes device memory", interference);
  each("size", "Contiguous copies, a fresh buffer each", size);
  each("all_gpus", "All GPUs at once, one strided pinned chunk each", all_gpus);
  return text;
}

}  // namespace vpkl::transfer
