// SPDX-License-Identifier: Apache-2.0
#include <vpkl/io/hdf5_global_heap.hpp>

#include <vpkl/core/error.hpp>

#include <fmt/format.h>

#include <cstring>

namespace vpkl::impl {
namespace {

// A collection is a header {"GCOL", version 1, 3 reserved, size of 8 bytes}, then objects {index of
// 2, references of 2, 4 reserved, size of 8, data padded to 8}. Index 0 is the free space at the
// end, its size counts its own header. Indices count up from 1 in a file written in one go; a gap
// is taken for damage, because HDF5 follows references to missing objects out of bounds.
constexpr std::uint64_t header_bytes = 16;
constexpr std::uint64_t least_bytes = 4096;

std::uint64_t little_endian(unsigned char const* bytes, int count) {
  std::uint64_t value = 0;
  while (count-- > 0)
    value = value << 8 | bytes[count];
  return value;
}

/// Calls `visit(index, offset of the data, size)` for each object; false if they do not tile.
template <class Visit>
bool walk(unsigned char const* image, std::uint64_t end, Visit const& visit) {
  std::uint64_t expected = 1;
  for (std::uint64_t at = header_bytes; end - at >= header_bytes; ++expected) {
    std::uint64_t const index = little_endian(image + at, 2);
    std::uint64_t const size = little_endian(image + at + 8, 8);
    if (little_endian(image + at + 4, 4) != 0) return false;
    if (index == 0) return size == end - at;
    at += header_bytes;
    if (index != expected || size > end - at || (size + 7) / 8 * 8 > end - at) return false;
    visit(index, at, size);
    at += (size + 7) / 8 * 8;
  }
  return true;
}

}  // namespace

bool starts_heap(unsigned char const* image, std::size_t size) {
  return size >= header_bytes && std::memcmp(image, "GCOL\1", 5) == 0;
}

std::vector<unsigned char> load_heap(FileDescriptor const& file, std::uint64_t address) {
  std::uint64_t const size = file.size();
  std::vector<unsigned char> heap(header_bytes);
  if (address < size && size - address >= least_bytes)
    file.read_at(address, heap.data(), header_bytes);
  std::uint64_t const end = little_endian(heap.data() + 8, 8);
  if (!starts_heap(heap.data(), heap.size()) || end < least_bytes || end > size - address) {
    throw FileError(fmt::format("{}: no collection of strings at byte {}", file.path(), address));
  }
  heap.resize(end);
  file.read_at(address, heap.data(), end);
  if (!walk(heap.data(), end, [](std::uint64_t, std::uint64_t, std::uint64_t) {})) {
    throw FileError(
        fmt::format("{}: damaged collection of strings at byte {}", file.path(), address));
  }
  return heap;
}

std::string HeapStrings::read(Reference const& reference) {
  std::uint64_t const length = little_endian(reference.data(), 4);
  std::uint64_t const address = little_endian(reference.data() + 4, 8);
  std::uint64_t const wanted = little_endian(reference.data() + 12, 4);
  if (length == 0) return {};
  if (address != address_ || collection_.empty()) {
    collection_ = load_heap(file_, address);
    address_ = address;
  }
  unsigned char const* found = nullptr;
  walk(collection_.data(), collection_.size(),
       [&](std::uint64_t index, std::uint64_t at, std::uint64_t size) {
         if (index == wanted && size >= length) found = collection_.data() + at;
       });
  if (found == nullptr) {
    throw FileError(fmt::format("{}: no string {} of {} bytes in the collection at byte {}",
                                file_.path(), wanted, length, address));
  }
  return {found, found + length};
}

}  // namespace vpkl::impl
