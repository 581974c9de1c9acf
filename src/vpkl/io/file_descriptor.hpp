// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief An open file whose every failure is a FileError that names it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace vpkl::impl {

/// Owns a POSIX file descriptor. Opened close-on-exec.
class FileDescriptor {
 public:
  /// \brief Opens a file.
  /// \param[in] path   file
  /// \param[in] flags  flags of open(2)
  /// \throws FileError with the system's reason
  FileDescriptor(std::string path, int flags);
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  FileDescriptor(FileDescriptor const&) = delete;
  FileDescriptor& operator=(FileDescriptor const&) = delete;
  ~FileDescriptor();

  int get() const { return fd_; }
  std::string const& path() const { return path_; }

  /// \brief Size in bytes.
  std::uint64_t size() const;

  /// \brief Whether this is a regular file, not a device, pipe or directory.
  bool is_regular() const;

  /// \brief Reads exactly `bytes` bytes at `offset`; the file's end before that is an error.
  void read_at(std::uint64_t offset, void* out, std::size_t bytes) const;

  /// \brief Writes all bytes at the file's position (its end when opened with O_APPEND).
  void write(void const* data, std::size_t bytes);

  /// \brief Cuts the file, or drops blocks reserved beyond its end.
  void truncate(std::uint64_t size);

  /// \brief Reserves blocks for the file's first `bytes` bytes and leaves its size as it is, so
  /// that later writes cannot meet a full disk. Where the file system cannot reserve, compares
  /// with its free space instead.
  /// \throws FileError naming the bytes needed and available
  void reserve(std::uint64_t bytes);

  /// \brief Brings contents to the storage device. Devices and pipes that cannot are left alone.
  void sync();

  /// \brief Closes and reports what the destructor would have to ignore.
  void close();

 private:
  [[noreturn]] void fail(char const* what) const;

  std::string path_;
  int fd_ = -1;
};

}  // namespace vpkl::impl
