// SPDX-License-Identifier: Apache-2.0
#include <vpkl/io/safetensors.hpp>

#include <vpkl/core/error.hpp>
#include <vpkl/io/sha256.hpp>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string_view>

namespace vpkl {
namespace {

constexpr std::uint64_t max_header_bytes = 100'000'000;  // the format's own limit

std::optional<std::uint64_t> dtype_bytes(std::string_view dtype) {
  for (auto name : {"BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"}) {
    if (dtype == name) return 1;
  }
  for (auto name : {"U16", "I16", "F16", "BF16"}) {
    if (dtype == name) return 2;
  }
  for (auto name : {"U32", "I32", "F32"}) {
    if (dtype == name) return 4;
  }
  for (auto name : {"U64", "I64", "F64"}) {
    if (dtype == name) return 8;
  }
  return std::nullopt;
}

/// Product of the shape and the element size; nothing on overflow.
std::optional<std::uint64_t> byte_count(std::vector<std::uint64_t> const& shape,
                                        std::uint64_t element_bytes) {
  std::uint64_t count = element_bytes;
  for (std::uint64_t const extent : shape) {
    if (extent != 0 && count > std::numeric_limits<std::uint64_t>::max() / extent) return {};
    count *= extent;
  }
  return count;
}

nlohmann::json read_header(impl::FileDescriptor const& file, std::uint64_t& data_offset) {
  std::string const& path = file.path();
  std::uint64_t const size = file.size();
  if (size < 8) {
    throw FileError(
        fmt::format("{}: not a safetensors file: it has {} bytes, the header's length "
                    "alone takes 8",
                    path, size));
  }
  std::array<unsigned char, 8> prefix{};
  file.read_at(0, prefix.data(), prefix.size());
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i)
    length = length << 8 | prefix[static_cast<std::size_t>(i)];
  if (length > size - 8 || length > max_header_bytes) {
    bool const lfs = std::equal(prefix.begin(), prefix.end(), "version ");
    throw FileError(
        fmt::format("{}: not a safetensors file: header length {}, expected at most {}{}", path,
                    length, std::min(size - 8, max_header_bytes),
                    lfs ? " (it looks like a Git LFS pointer: fetch the real file)" : ""));
  }
  std::string text(length, '\0');
  file.read_at(8, text.data(), text.size());
  data_offset = 8 + length;
  try {
    auto header = nlohmann::json::parse(text);
    if (!header.is_object()) throw FileError(path + ": safetensors header: expected a JSON object");
    return header;
  } catch (nlohmann::json::exception const& error) {
    throw FileError(fmt::format("{}: safetensors header is not JSON: {}", path, error.what()));
  }
}

SafetensorsFile::Tensor parse_tensor(nlohmann::json const& entry, std::string const& where,
                                     std::uint64_t data_offset, std::uint64_t file_size) {
  SafetensorsFile::Tensor tensor;
  std::array<std::uint64_t, 2> range{};
  // json converts -1 and 1.5 to unsigned silently.
  auto const unsigned_at = [](nlohmann::json const& value) {
    if (!value.is_number_unsigned()) throw FileError(value.dump() + " is not a count");
    return value.get<std::uint64_t>();
  };
  try {
    tensor.dtype = entry.at("dtype").get<std::string>();
    for (auto const& extent : entry.at("shape"))
      tensor.shape.push_back(unsigned_at(extent));
    auto const& offsets = entry.at("data_offsets");
    if (!offsets.is_array() || offsets.size() != 2) {
      throw FileError("data_offsets must be an array of two");
    }
    range = {unsigned_at(offsets[0]), unsigned_at(offsets[1])};
  } catch (std::exception const& error) {
    throw FileError(fmt::format("{}: bad header entry: {}", where, error.what()));
  }
  if (range[0] > range[1] || range[1] > file_size - data_offset) {
    throw FileError(
        fmt::format("{}: data offsets [{}, {}), expected a range within the file's {} "
                    "bytes of data",
                    where, range[0], range[1], file_size - data_offset));
  }
  tensor.offset = data_offset + range[0];
  tensor.bytes = range[1] - range[0];
  auto const element_bytes = dtype_bytes(tensor.dtype);
  if (element_bytes && byte_count(tensor.shape, *element_bytes) != tensor.bytes) {
    throw FileError(fmt::format("{}: {} [{}] in {} bytes: shape and offsets disagree", where,
                                tensor.dtype, fmt::join(tensor.shape, ", "), tensor.bytes));
  }
  return tensor;
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::string const& path, std::string const& expected_sha256)
    : file_(path, O_RDONLY) {
  std::uint64_t data_offset = 0;
  auto const header = read_header(file_, data_offset);
  std::uint64_t const size = file_.size();
  for (auto const& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    auto const where = fmt::format("{}: tensor {}", path, name);
    tensors_.emplace(name, parse_tensor(entry, where, data_offset, size));
  }

  std::vector<Tensor const*> order;
  for (auto const& item : tensors_)
    order.push_back(&item.second);
  std::sort(order.begin(), order.end(), [](Tensor const* a, Tensor const* b) {
    return a->offset != b->offset ? a->offset < b->offset : a->bytes < b->bytes;
  });
  std::uint64_t end = data_offset;
  for (Tensor const* tensor : order) {
    if (tensor->offset != end) {
      throw FileError(fmt::format("{}: safetensors data {} at byte {}", path,
                                  tensor->offset < end ? "of two tensors overlaps" : "is uncovered",
                                  std::min(tensor->offset, end)));
    }
    end += tensor->bytes;
  }
  if (end != size) {
    throw FileError(fmt::format("{}: the tensors end at byte {}, the file at {}", path, end, size));
  }

  if (!expected_sha256.empty()) {
    std::string const actual = impl::sha256_file(file_);
    if (actual != expected_sha256) {
      throw FileError(fmt::format("{}: SHA-256 is {}, expected {}", path, actual, expected_sha256));
    }
  }
}

SafetensorsFile::Tensor const& SafetensorsFile::tensor(std::string const& name) const {
  auto const found = tensors_.find(name);
  if (found == tensors_.end()) {
    throw FileError(
        fmt::format("{}: has no tensor {} among its {}", path(), name, tensors_.size()));
  }
  return found->second;
}

ElementType SafetensorsFile::element_type(std::string const& name) const {
  std::string const& dtype = tensor(name).dtype;
  if (dtype == "F32") return ElementType::fp32;
  if (dtype == "BF16") return ElementType::bf16;
  if (dtype == "F16") return ElementType::fp16;
  throw FileError(
      fmt::format("{}: tensor {} has type {}, expected F32, BF16 or F16", path(), name, dtype));
}

void SafetensorsFile::read_rows(std::string const& name, std::int64_t first_row, std::int64_t rows,
                                void* out) const {
  Tensor const& entry = tensor(name);
  element_type(name);
  if (entry.shape.size() != 2) {
    throw FileError(fmt::format("{}: tensor {} has {} dimensions, expected 2", path(), name,
                                entry.shape.size()));
  }
  auto const first = static_cast<std::uint64_t>(first_row);
  auto const count = static_cast<std::uint64_t>(rows);
  if (first_row < 0 || rows < 0 || first > entry.shape[0] || count > entry.shape[0] - first) {
    throw InvalidArgument(fmt::format("{}: tensor {}: rows [{}, {} + {}) asked, it has {}", path(),
                                      name, first_row, first_row, rows, entry.shape[0]));
  }
  if (count == 0) return;
  std::uint64_t const row_bytes = entry.bytes / entry.shape[0];
  file_.read_at(entry.offset + first * row_bytes, out, count * row_bytes);
}

}  // namespace vpkl
