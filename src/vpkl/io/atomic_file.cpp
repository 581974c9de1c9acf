// SPDX-License-Identifier: Apache-2.0
#include <vpkl/io/atomic_file.hpp>

#include <vpkl/core/error.hpp>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

namespace vpkl {
namespace {

std::filesystem::path directory_of(std::string const& target) {
  auto const parent = std::filesystem::path(target).parent_path();
  return parent.empty() ? std::filesystem::path(".") : parent;
}

impl::FileDescriptor create_temporary(std::string const& target) {
  auto const directory = directory_of(target);
  std::error_code error;
  if (std::filesystem::is_directory(target, error)) {
    throw FileError(fmt::format("{}: is a directory, expected a file name", target));
  }
  std::filesystem::create_directories(directory, error);
  if (error) {
    throw FileError(fmt::format("{}: cannot make directory {}: {}", target, directory.string(),
                                error.message()));
  }
  std::random_device random;
  auto const name = std::filesystem::path(target).filename().string();
  auto const path = directory / fmt::format(".{}.{:08x}{:08x}.tmp", name, random(), random());
  return impl::FileDescriptor(path.string(), O_RDWR | O_CREAT | O_EXCL);
}

}  // namespace

AtomicFile::AtomicFile(std::string target)
    : target_(std::move(target)), file_(create_temporary(target_)) {}

AtomicFile::~AtomicFile() {
  if (!committed_) unlink(temporary_path().c_str());
}

void AtomicFile::commit() {
  file_.truncate(file_.size());  // gives back what reserve() took and nobody wrote
  file_.sync();
  std::error_code error;
  std::filesystem::rename(temporary_path(), target_, error);
  if (error) {
    throw FileError(
        fmt::format("{}: cannot rename {} to it: {}", target_, temporary_path(), error.message()));
  }
  committed_ = true;
  impl::FileDescriptor(directory_of(target_).string(), O_RDONLY | O_DIRECTORY).sync();
}

}  // namespace vpkl
