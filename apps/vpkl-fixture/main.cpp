// SPDX-License-Identifier: Apache-2.0
// vpkl-fixture: makes, shows and verifies rollout fixtures.
#include "synthetic.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/rollout/fixture.hpp>
#include <vpkl/rollout/response_mask.hpp>

#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <limits>
#include <new>
#include <string>

namespace {

constexpr int exit_failure = 1;
constexpr int exit_usage = 2;

/// Accepts integers in [low, high], and says so.
CLI::Validator integer_in(std::int64_t low, std::int64_t high) {
  auto const check = [=](std::string& text) -> std::string {
    std::int64_t value = 0;
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    bool const whole = error == std::errc() && end == text.data() + text.size();
    if (whole && value >= low && value <= high) return {};
    return fmt::format("{}, expected an integer in [{}, {}]", text, low, high);
  };
  return CLI::Validator(check, fmt::format("[{}, {}]", low, high));
}

void show_progress(std::uint64_t done, std::uint64_t total) {
  fmt::print(stderr, "\rwriting {:3d} %{}",
             static_cast<int>(100.0 * static_cast<double>(done) / static_cast<double>(total)),
             done == total ? "\n" : "");
  std::fflush(stderr);
}

std::int64_t count_response_tokens(vpkl::RolloutFixture const& fixture) {
  std::int64_t tokens = 0;
  for (std::int64_t n = 0; n < fixture.info().samples; ++n) {
    auto const mask = vpkl::response_mask(
        fixture.info().sequence_length, fixture.response_start(n, 1), fixture.attention_mask(n, 1));
    tokens += std::count(mask.begin(), mask.end(), 1);
  }
  return tokens;
}

nlohmann::ordered_json describe(vpkl::RolloutFixture const& fixture) {
  vpkl::FixtureInfo const& info = fixture.info();
  nlohmann::ordered_json out;
  out["file"] = fixture.path();
  out["generator"] = info.generator;
  out["samples"] = info.samples;
  out["sequence_length"] = info.sequence_length;
  out["response_tokens"] = count_response_tokens(fixture);
  out["vocabulary_size"] = info.vocabulary_size;
  out["vocabulary_slice"] = !fixture.vocabulary_ids().empty();
  out["tokenizer_fingerprint"] = info.tokenizer_fingerprint;
  out["bos_token_id"] = info.bos_token_id;
  out["eos_token_id"] = info.eos_token_id;
  out["pad_token_id"] = info.pad_token_id;
  out["seed"] = info.seed;
  out["prompt_text"] = !fixture.prompt_text(0, 1).empty();
  for (vpkl::Side const side : {vpkl::Side::student, vpkl::Side::teacher}) {
    std::string const name = to_string(side);
    out[name + "_name"] = side == vpkl::Side::student ? info.student_name : info.teacher_name;
    if (!fixture.has_model(side)) continue;
    vpkl::FixtureModel const& model = fixture.model(side);
    out[name + "_hidden_size"] = model.hidden_size;
    out[name + "_hidden_type"] = vpkl::to_string(model.hidden_type);
    if (model.head_reference) {
      out[name + "_head_path"] = model.head_reference->path;
      out[name + "_head_tensor"] = model.head_reference->tensor;
      out[name + "_head_sha256"] = model.head_reference->sha256;
    } else {
      out[name + "_head_type"] = vpkl::to_string(fixture.head_type(side));
    }
  }
  out["content_sha256"] = fixture.content_sha256();
  return out;
}

void inspect(std::string const& path, bool json) {
  auto const description = describe(vpkl::RolloutFixture(path));
  // A name in the file need not be UTF-8.
  auto const replace = nlohmann::ordered_json::error_handler_t::replace;
  if (json) {
    fmt::print("{}\n", description.dump(2, ' ', false, replace));
    return;
  }
  for (auto const& [key, value] : description.items()) {
    fmt::print("{:<24}{}\n", key,
               value.is_string() ? value.get<std::string>() : value.dump(-1, ' ', false, replace));
  }
}

void verify(std::string const& path) {
  vpkl::RolloutFixture const fixture(path, vpkl::FixtureCheck::content);
  fmt::print("{}: ok, content SHA-256 {}\n", path, fixture.content_sha256());
}

int run(int argc, char** argv) {
  CLI::App app("Makes, shows and verifies rollout fixtures", "vpkl-fixture");
  app.require_subcommand(1);

  SyntheticOptions options;
  std::string path, type = vpkl::to_string(options.type);
  bool json = false;
  constexpr std::int64_t max_extent = 1 << 20;

  CLI::App* const make = app.add_subcommand("make", "Write a synthetic fixture");
  auto const add_integer = [&](char const* flag, std::int64_t& value, char const* help,
                               std::int64_t low, std::int64_t high) {
    return make->add_option(flag, value, help)->check(integer_in(low, high))->capture_default_str();
  };
  add_integer("--samples", options.samples, "Number of samples", 1, max_extent);
  add_integer("--sequence-length", options.sequence_length, "Tokens a sample, padding included", 2,
              max_extent);
  add_integer("--prompt-length", options.prompt_length, "Tokens of every prompt", 1, max_extent);
  CLI::Option const* const max_response =
      add_integer("--max-response", options.max_response,
                  "Longest response (without it: what the prompt leaves)", 1, max_extent);
  add_integer("--vocabulary-size", options.vocabulary_size, "Number of token ids", 4,
              std::numeric_limits<std::int32_t>::max());
  add_integer("--hidden-student", options.hidden_student, "Hidden size of the student", 1,
              max_extent);
  add_integer("--hidden-teacher", options.hidden_teacher, "Hidden size of the teacher", 1,
              max_extent);
  make->add_option("--type", type, "Element type of hidden states and heads")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  add_integer("--seed", options.seed, "Seed; the same seed gives the same fixture", 0,
              std::numeric_limits<std::int64_t>::max());
  make->add_flag("--shared-head", options.shared_head, "One head for student and teacher");
  make->add_option("--output", path, "File to write, ending in .h5")->required();

  CLI::App* const show = app.add_subcommand("inspect", "Show what a fixture holds");
  show->add_option("file", path, "Fixture")->required();
  show->add_flag("--json", json, "Print JSON");

  CLI::App* const check = app.add_subcommand("verify", "Check every byte of a fixture");
  check->add_option("file", path, "Fixture")->required();

  try {
    app.parse(argc, argv);
  } catch (CLI::ParseError const& error) {
    return app.exit(error) == 0 ? 0 : exit_usage;
  }
  if (*show) {
    inspect(path, json);
    return 0;
  }
  if (*check) {
    verify(path);
    return 0;
  }

  options.type = vpkl::element_type_from_string(type);
  if (max_response->count() == 0) {
    options.max_response =
        std::max<std::int64_t>(1, options.sequence_length - options.prompt_length);
  }
  vpkl::RolloutContent content = synthesise(options);
  if (isatty(STDERR_FILENO) != 0) content.progress = show_progress;
  vpkl::write_fixture(path, content);
  fmt::print("wrote {}\n", path);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (vpkl::InvalidArgument const& error) {
    fmt::print(stderr, "vpkl-fixture: {}\n", error.what());
    return exit_usage;
  } catch (std::bad_alloc const&) {
    fmt::print(stderr, "vpkl-fixture: out of memory\n");
  } catch (std::exception const& error) {
    fmt::print(stderr, "vpkl-fixture: {}\n", error.what());
  }
  return exit_failure;
}
