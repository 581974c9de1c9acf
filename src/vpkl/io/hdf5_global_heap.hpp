// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Global heap collections, where HDF5 keeps variable-length strings.
///
/// They have no checksum, and HDF5 follows their sizes and indices blindly, without end or out of
/// bounds. So vpkl checks a collection before HDF5 sees it, and reads strings of datasets itself.
#pragma once

#include <vpkl/io/file_descriptor.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace vpkl::impl {

/// \brief Whether bytes read from a file are the start of a collection.
bool starts_heap(unsigned char const* image, std::size_t size);

/// \brief Reads a collection and checks that its objects tile it.
/// \throws FileError if there is none at this address or it is damaged
std::vector<unsigned char> load_heap(FileDescriptor const& file, std::uint64_t address);

/// \brief Reads strings through the references to them that a dataset holds.
class HeapStrings {
 public:
  static constexpr std::size_t reference_bytes = 16;
  using Reference = std::array<unsigned char, reference_bytes>;

  /// \param[in] file  file that holds the collections; must outlive this object
  explicit HeapStrings(FileDescriptor const& file) : file_(file) {}

  /// \brief The string behind a reference.
  /// \throws FileError if reference or collection are damaged
  std::string read(Reference const& reference);

 private:
  FileDescriptor const& file_;
  std::uint64_t address_ = 0;
  std::vector<unsigned char> collection_;  ///< the one at address_
};

}  // namespace vpkl::impl
