// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Files that appear under their name complete or not at all.
#pragma once

#include <vpkl/io/file_descriptor.hpp>

#include <cstdint>
#include <string>

namespace vpkl {

/// \brief A file written under a temporary name beside its target and renamed at the end.
///
/// Missing directories of the target are made. Without commit() the destructor removes the
/// temporary file; a killed process leaves it behind as ".<name>.<random>.tmp".
class AtomicFile {
 public:
  /// \brief Creates the empty temporary file.
  /// \param[in] target  path under which the file is to appear
  /// \throws FileError naming the directory when it cannot be written
  explicit AtomicFile(std::string target);
  AtomicFile(AtomicFile const&) = delete;
  AtomicFile& operator=(AtomicFile const&) = delete;
  ~AtomicFile();

  /// \brief Path to write to until commit().
  std::string const& temporary_path() const { return file_.path(); }

  /// \brief Reserves disk space for `bytes` bytes; call it after the file was opened by its writer.
  /// \throws FileError naming the bytes needed and available
  void reserve(std::uint64_t bytes) { file_.reserve(bytes); }

  /// \brief Flushes the file to the device, renames it over the target and flushes the directory.
  /// \throws FileError; the target is then as it was before
  void commit();

 private:
  std::string target_;
  impl::FileDescriptor file_;
  bool committed_ = false;
};

}  // namespace vpkl
