// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include "backend.hpp"
#include "numa.hpp"

#include <command_line.hpp>

#include <vpkl/config.hpp>
#include <vpkl/core/error.hpp>
#include <vpkl/teacher/row_store.hpp>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>

namespace vpkl::transfer {

namespace {

constexpr std::int64_t most = std::int64_t(1) << 40;

std::vector<std::string> const all_engines = {"pack_fresh",  "pack_reused", "pageable", "staged",
                                              "pinned_rows", "pinned_2d",   "mapped"};

/// Lists as written; converted by functions whose messages name the text.
struct Texts {
  std::vector<std::string> types = {"bf16"}, engines = all_engines, directions = {"h2d", "d2h"},
                           patterns = {"chunk", "rows"};
};

void define(CLI::App& app, Options& o, Texts& t) {
  auto const count = [](std::int64_t low) { return CLI::Range(low, most); };
  app.set_version_flag("--version", VPKL_VERSION_STRING);
  app.add_option("--batch", o.batch, "B of the cached tensor [B, T, V]")
      ->check(count(1))
      ->capture_default_str();
  app.add_option("--length", o.length, "T")->check(count(1))->capture_default_str();
  app.add_option("--vocabulary", o.vocabularies, "V, one or more; try one off a multiple of 64")
      ->delimiter(',')
      ->check(count(1))
      ->capture_default_str();
  app.add_option("--chunk-width", o.chunk_widths, "C of a chunk [B, C, V], one or more")
      ->delimiter(',')
      ->check(count(1))
      ->capture_default_str();
  app.add_option("--type", t.types, "fp32, bf16, fp16, one or more")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--engine", t.engines,
                 "pack_fresh, pack_reused (host only), pageable, staged, pinned_rows, pinned_2d, "
                 "mapped, one or more; none: only what other flags ask for")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--direction", t.directions, "h2d, d2h, one or both")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--pattern", t.patterns, "chunk: positions of every batch row; rows: scattered")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--rows", o.scattered_rows, "Rows of pattern rows, all over [B, T]")
      ->check(count(1))
      ->capture_default_str();
  app.add_option("--repetitions", o.repetitions, "Measured transfers of a case")
      ->check(count(1))
      ->capture_default_str();
  app.add_option("--warmup", o.warmup, "Transfers of a case before them")
      ->check(count(0))
      ->capture_default_str();
  app.add_flag("--sizes", o.sizes, "Contiguous copies over a range of sizes, fresh buffers each");
  app.add_option("--smallest-size", o.smallest_size, "Bytes")
      ->check(count(1))
      ->capture_default_str();
  app.add_option("--largest-size", o.largest_size, "Bytes; sizes grow by four")
      ->check(count(1))
      ->capture_default_str();
  app.add_option("--size-repetitions", o.size_repetitions, "Copies of a size")
      ->check(count(1))
      ->capture_default_str();
  app.add_flag("--all-gpus", o.all_gpus, "Chunk copies on every GPU alone, then on all at once");
  app.add_flag("--interference", o.interference, "Each case again while a kernel uses the device");
  app.add_flag("--attribution", o.attribution,
               "What each case does on the device, by kind of copy (CUPTI)");
  app.add_option("--numa-node", o.numa_node,
                 "Run on this node's CPUs and take memory from it; -1: leave both alone")
      ->check(CLI::Range(-1, 1023))
      ->capture_default_str();
  app.add_option("--time-limit", o.time_limit, "Seconds after which no further case starts")
      ->capture_default_str();
  app.add_option("--output-jsonl", o.output_jsonl, "Results, appended: one object a measurement");
  app.footer(
      "Example: the shape of a 4 x 2112 cache at tensor parallelism 2, and a misaligned one\n"
      "  vpkl-transfer --vocabulary 75968,75967 --attribution --sizes --output-jsonl t.jsonl");
}

/// Converts a list; messages begin with the flag.
template <class Convert>
auto converted(char const* flag, std::vector<std::string> const& texts, Convert&& convert) {
  std::vector<decltype(convert(std::string()))> values;
  for (std::string const& text : texts)
    try {
      values.push_back(convert(text));
    } catch (InvalidArgument const& error) {
      throw InvalidArgument(fmt::format("{}: {}", flag, error.what()));
    }
  return values;
}

std::string engine_from_string(std::string const& text) {
  if (std::find(all_engines.begin(), all_engines.end(), text) == all_engines.end())
    throw InvalidArgument(fmt::format("engine is '{}', expected none or some of {}", text,
                                      fmt::join(all_engines, ", ")));
  return text;
}

/// Each value once, so that each case has a key of its own.
template <class T>
void remove_repeated(std::vector<T>& values) {
  std::vector<T> kept;
  for (T const& value : values)
    if (std::find(kept.begin(), kept.end(), value) == kept.end()) kept.push_back(value);
  values = std::move(kept);
}

/// \throws InvalidArgument naming flag and value
void finish(Options& o, Texts const& t) {
  o.types = converted("--type", t.types, element_type_from_string);
  o.directions = converted("--direction", t.directions, direction_from_string);
  o.patterns = converted("--pattern", t.patterns, pattern_from_string);
  if (t.engines != std::vector<std::string>{"none"})
    o.engines = converted("--engine", t.engines, engine_from_string);
  remove_repeated(o.types);
  remove_repeated(o.directions);
  remove_repeated(o.patterns);
  remove_repeated(o.engines);
  remove_repeated(o.vocabularies);
  remove_repeated(o.chunk_widths);
  for (std::int64_t const width : o.chunk_widths)
    if (width > o.length)
      throw InvalidArgument(
          fmt::format("--chunk-width is {}, expected at most --length {}", width, o.length));
  // Bytes are counted in 64 bits.
  for (std::int64_t const vocabulary : o.vocabularies)
    if (static_cast<double>(o.batch) * static_cast<double>(o.length) *
            static_cast<double>(vocabulary) >
        static_cast<double>(most) * 16)
      throw InvalidArgument(
          fmt::format("--batch {} x --length {} x --vocabulary {}: expected at most 2^44 elements",
                      o.batch, o.length, vocabulary));
  if (o.scattered_rows > o.batch * o.length)
    throw InvalidArgument(fmt::format("--rows is {}, expected at most --batch {} x --length {}",
                                      o.scattered_rows, o.batch, o.length));
  if (o.smallest_size > o.largest_size)
    throw InvalidArgument(fmt::format("--smallest-size is {}, expected at most --largest-size {}",
                                      o.smallest_size, o.largest_size));
  if (!(o.time_limit > 0) || !std::isfinite(o.time_limit))
    throw InvalidArgument(
        fmt::format("--time-limit is {}, expected a number of seconds above 0", o.time_limit));
  if (o.numa_node >= 0 && cpus_of_node(o.numa_node).empty())
    throw InvalidArgument(fmt::format(
        "--numa-node is {}, expected -1 or a node of this machine with CPUs (it has {})",
        o.numa_node, fmt::join(numa_nodes(), ", ")));
  if (o.engines.empty() && !o.sizes && !o.all_gpus)
    throw InvalidArgument("--engine is none, expected --sizes or --all-gpus beside it");
}

template <class T>
nlohmann::json names(std::vector<T> const& values) {
  nlohmann::json list = nlohmann::json::array();
  for (T const& value : values)
    list.push_back(to_string(value));
  return list;
}

}  // namespace

nlohmann::json Options::describe() const {
  return {{"batch", batch},
          {"length", length},
          {"vocabularies", vocabularies},
          {"chunk_widths", chunk_widths},
          {"types", names(types)},
          {"engines", engines},
          {"directions", names(directions)},
          {"patterns", names(patterns)},
          {"rows", scattered_rows},
          {"repetitions", repetitions},
          {"warmup", warmup},
          {"sizes", sizes},
          {"smallest_size", smallest_size},
          {"largest_size", largest_size},
          {"size_repetitions", size_repetitions},
          {"all_gpus", all_gpus},
          {"interference", interference},
          {"attribution", attribution},
          {"numa_node", numa_node},
          {"time_limit", time_limit}};
}

ParseResult parse(int argc, char** argv) {
  Options options;
  Texts texts;
  CLI::App app(
      "Measures how a chunk [B, C, V] of a teacher cache [B, T, V] travels between host and "
      "device:\n"
      "pageable or pinned, packed or as it lies. Each transfer is verified, and compared with a\n"
      "contiguous pinned copy of the same bytes measured beside it.",
      "vpkl-transfer");
  define(app, options, texts);
  auto const status =
      apps::parse_command_line(app, argc, argv, false, [&] { finish(options, texts); });
  if (status) return {std::nullopt, *status};
  return {options, 0};
}

}  // namespace vpkl::transfer
