// SPDX-License-Identifier: Apache-2.0
#include <vpkl/io/json_lines.hpp>

#include <vpkl/core/error.hpp>

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <system_error>

namespace vpkl {
namespace {

constexpr std::uint64_t block_bytes = 1 << 16;

impl::FileDescriptor open_for_append(std::string const& path) {
  auto const directory = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!directory.empty()) std::filesystem::create_directories(directory, error);
  if (error) {
    throw FileError(
        fmt::format("{}: cannot make directory {}: {}", path, directory.string(), error.message()));
  }
  return impl::FileDescriptor(path, O_RDWR | O_APPEND | O_CREAT);
}

/// Where the line that `size` ends starts: one past the last newline before it, or 0.
std::uint64_t last_line_start(impl::FileDescriptor const& file, std::uint64_t size) {
  std::string block;
  while (size > 0) {
    std::uint64_t const begin = size > block_bytes ? size - block_bytes : 0;
    block.resize(size - begin);
    file.read_at(begin, block.data(), block.size());
    auto const newline = block.rfind('\n');
    if (newline != std::string::npos) return begin + newline + 1;
    size = begin;
  }
  return 0;
}

/// Moves a last line without newline to `<path>.torn` and returns it.
std::string take_torn_line(impl::FileDescriptor& file) {
  if (!file.is_regular()) return {};
  std::uint64_t const size = file.size();
  if (size == 0) return {};
  char first = 0;
  file.read_at(0, &first, 1);
  if (first != '{') {
    throw FileError(
        fmt::format("{}: exists and is not JSON Lines: expected it to start with {{", file.path()));
  }
  std::uint64_t const start = last_line_start(file, size);
  if (start == size) return {};
  std::string line(size - start, '\0');
  file.read_at(start, line.data(), line.size());
  impl::FileDescriptor aside(file.path() + ".torn", O_WRONLY | O_APPEND | O_CREAT);
  std::string const text = line + "\n";
  aside.write(text.data(), text.size());
  aside.sync();
  file.truncate(start);
  return line;
}

void require_finite(nlohmann::json const& value, std::string const& where) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    throw InvalidArgument(
        fmt::format("JSON member {} is {}: use json_number", where, value.get<double>()));
  }
  if (!value.is_structured()) return;
  for (auto const& [key, member] : value.items())
    require_finite(member, where + "/" + key);
}

}  // namespace

void json_number(nlohmann::json& object, std::string const& key, double value) {
  if (std::isfinite(value)) {
    object[key] = value;
    return;
  }
  object[key] = nullptr;
  object[key + "_reason"] = std::isnan(value) ? "NaN" : value > 0 ? "+inf" : "-inf";
}

JsonLinesWriter::JsonLinesWriter(std::string const& path)
    : file_(open_for_append(path)), torn_line_(take_torn_line(file_)) {}

void JsonLinesWriter::write(nlohmann::json const& record) {
  if (!record.is_object()) {
    throw InvalidArgument(fmt::format("{}: a {} is no record, expected a JSON object", file_.path(),
                                      record.type_name()));
  }
  require_finite(record, "");
  // Text that is not UTF-8 (a path, say) must not lose a result.
  std::string const line =
      record.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  std::uint64_t const before = file_.size();
  try {
    file_.write(line.data(), line.size());
  } catch (FileError const&) {
    if (file_.is_regular()) file_.truncate(before);
    throw;
  }
}

void JsonLinesWriter::close() {
  file_.sync();
  file_.close();
}

JsonLines read_json_lines(std::string const& path) {
  impl::FileDescriptor const file(path, O_RDONLY);
  JsonLines result;
  std::string block;
  std::string& line = result.torn_line;
  std::size_t number = 0;
  std::uint64_t const size = file.size();
  for (std::uint64_t at = 0; at < size; at += block_bytes) {
    block.resize(std::min(block_bytes, size - at));
    file.read_at(at, block.data(), block.size());
    for (char const c : block) {
      if (c != '\n') {
        line += c;
        continue;
      }
      ++number;
      try {
        result.records.push_back(nlohmann::json::parse(line));
      } catch (nlohmann::json::exception const& error) {
        throw FileError(fmt::format("{}: line {}: {}", path, number, error.what()));
      }
      if (!result.records.back().is_object()) {
        throw FileError(fmt::format("{}: line {}: a {}, expected a JSON object", path, number,
                                    result.records.back().type_name()));
      }
      line.clear();
    }
  }
  return result;
}

}  // namespace vpkl
