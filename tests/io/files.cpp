// SPDX-License-Identifier: Apache-2.0
#include "io/temporary_directory.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/io/atomic_file.hpp>
#include <vpkl/io/file_descriptor.hpp>
#include <vpkl/io/sha256.hpp>

#include <fcntl.h>
#include <sys/stat.h>

#include <array>

namespace {

using namespace vpkl;
using namespace vpkl::test;

TEST(sha256, known_digests) {
  EXPECT_EQ(Sha256().hex_digest(),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  Sha256 sha;
  sha.update("a");
  sha.update("bc");
  EXPECT_EQ(sha.hex_digest(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(sha256, file_in_blocks) {
  TemporaryDirectory const directory;
  write_file(directory / "x", std::string(3'000'000, 'q'));
  Sha256 sha;
  for (int i = 0; i < 3; ++i)
    sha.update(std::string(1'000'000, 'q'));
  EXPECT_EQ(sha256_file(directory / "x"), sha.hex_digest());
}

TEST(sha256, missing_file_is_named) {
  EXPECT_TRUE(mentions(message_of<FileError>([] { sha256_file("/nonexistent/x"); }),
                       "/nonexistent/x", "No such file"));
}

TEST(file_descriptor, end_of_file_is_an_error) {
  TemporaryDirectory const directory;
  write_file(directory / "x", "12345");
  impl::FileDescriptor const file(directory / "x", O_RDONLY);
  std::array<char, 8> out{};
  file.read_at(2, out.data(), 3);
  EXPECT_EQ(std::string(out.data(), 3), "345");
  EXPECT_TRUE(mentions(message_of<FileError>([&] { file.read_at(2, out.data(), 4); }),
                       directory / "x", "ends at byte 5"));
}

TEST(file_descriptor, a_reservation_beyond_the_disk_names_the_bytes) {
  TemporaryDirectory const directory;
  impl::FileDescriptor file(directory / "x", O_RDWR | O_CREAT);
  std::uint64_t const bytes = std::uint64_t{1} << 60;
  EXPECT_TRUE(mentions(message_of<FileError>([&] { file.reserve(bytes); }), directory / "x",
                       std::to_string(bytes), "available"));
  EXPECT_EQ(file.size(), 0u);
}

TEST(atomic_file, appears_on_commit_only) {
  TemporaryDirectory const directory;
  std::string const target = directory / "made/on/demand/x";
  {
    AtomicFile file(target);
    write_file(file.temporary_path(), "new");
    file.reserve(1 << 20);
    EXPECT_FALSE(std::filesystem::exists(target));
    file.commit();
  }
  EXPECT_EQ(read_file(target), "new");
  struct stat status {};
  ASSERT_EQ(stat(target.c_str(), &status), 0);
  EXPECT_LT(status.st_blocks, 1 << 10) << "the reservation was not given back";
  mode_t const mask = umask(0);
  umask(mask);
  EXPECT_EQ(status.st_mode & 0777, 0666u & ~mask);
}

TEST(atomic_file, is_removed_without_commit_and_keeps_the_old_file) {
  TemporaryDirectory const directory;
  write_file(directory / "x", "old");
  {
    AtomicFile const file(directory / "x");
    write_file(file.temporary_path(), "new");
  }
  EXPECT_EQ(read_file(directory / "x"), "old");
  auto const entries = std::filesystem::directory_iterator(directory.path());
  EXPECT_EQ(std::distance(begin(entries), end(entries)), 1);
}

TEST(atomic_file, impossible_targets_are_named) {
  TemporaryDirectory const directory;
  write_file(directory / "file", "");
  EXPECT_TRUE(mentions(message_of<FileError>([&] { AtomicFile{directory / "file/x"}; }),
                       directory / "file/x"));
  EXPECT_TRUE(mentions(message_of<FileError>([&] { AtomicFile{directory.path()}; }),
                       directory.path(), "is a directory"));
}

}  // namespace
