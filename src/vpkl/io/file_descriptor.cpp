// SPDX-License-Identifier: Apache-2.0
#include <vpkl/io/file_descriptor.hpp>

#include <vpkl/core/error.hpp>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace vpkl::impl {
namespace {

struct stat status_of(FileDescriptor const& file) {
  struct stat status {};
  if (fstat(file.get(), &status) != 0) {
    throw FileError(fmt::format("{}: cannot read its status: {}", file.path(),
                                std::generic_category().message(errno)));
  }
  return status;
}

}  // namespace

FileDescriptor::FileDescriptor(std::string path, int flags) : path_(std::move(path)) {
  do {
    fd_ = open(path_.c_str(), flags | O_CLOEXEC, 0666);
  } while (fd_ < 0 && errno == EINTR);
  if (fd_ < 0) fail("cannot open");
}

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

std::uint64_t FileDescriptor::size() const {
  return static_cast<std::uint64_t>(status_of(*this).st_size);
}

bool FileDescriptor::is_regular() const { return S_ISREG(status_of(*this).st_mode); }

void FileDescriptor::read_at(std::uint64_t offset, void* out, std::size_t bytes) const {
  auto* to = static_cast<char*>(out);
  while (bytes > 0) {
    ssize_t const got = pread(fd_, to, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("cannot read");
    if (got == 0) {
      throw FileError(
          fmt::format("{}: ends at byte {}, {} more bytes were expected", path_, offset, bytes));
    }
    to += got;
    offset += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
}

void FileDescriptor::write(void const* data, std::size_t bytes) {
  auto const* from = static_cast<char const*>(data);
  while (bytes > 0) {
    ssize_t const put = ::write(fd_, from, bytes);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("cannot write");
    from += put;
    bytes -= static_cast<std::size_t>(put);
  }
}

void FileDescriptor::truncate(std::uint64_t size) {
  if (ftruncate(fd_, static_cast<off_t>(size)) != 0) fail("cannot set its size");
}

void FileDescriptor::reserve(std::uint64_t bytes) {
  struct statvfs space {};
  if (fstatvfs(fd_, &space) != 0) fail("cannot read the free space of its file system");
  std::uint64_t const available = std::uint64_t{space.f_bavail} * space.f_frsize;
  int error = available < bytes ? ENOSPC : 0;
#if defined(__linux__)
  // Asked only when it can succeed: a file system may fill itself before it gives up.
  while (error == 0 && fallocate(fd_, FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(bytes)) != 0) {
    if (errno == EOPNOTSUPP || errno == ENOSYS) break;
    if (errno != EINTR) error = errno;
  }
#endif
  if (error != 0) {
    throw FileError(fmt::format("{}: needs {} bytes, its file system has {} available: {}", path_,
                                bytes, available, std::generic_category().message(error)));
  }
}

void FileDescriptor::sync() {
  int result = 0;
  do {
    result = fsync(fd_);
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno != EINVAL && errno != ENOTSUP) fail("cannot flush");
}

void FileDescriptor::close() {
  if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) fail("cannot close");
}

void FileDescriptor::fail(char const* what) const {
  throw FileError(fmt::format("{}: {}: {}", path_, what, std::generic_category().message(errno)));
}

}  // namespace vpkl::impl
