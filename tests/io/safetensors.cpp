// SPDX-License-Identifier: Apache-2.0
#include "io/temporary_directory.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/io/safetensors.hpp>
#include <vpkl/io/sha256.hpp>

#include <sys/resource.h>

#include <array>
#include <cstring>

namespace {

using namespace vpkl;
using namespace vpkl::test;

std::string length_prefix(std::uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i)
    bytes += static_cast<char>(length >> 8 * i & 0xff);
  return bytes;
}

std::string file_of(std::string const& header, std::string const& data) {
  return length_prefix(header.size()) + header + data;
}

class safetensors : public testing::Test {
 protected:
  std::string refusal(std::string const& bytes) {
    write_file(path, bytes);
    std::string const message = message_of<FileError>([&] { SafetensorsFile{path}; });
    EXPECT_TRUE(mentions(message, path));
    return message;
  }

  TemporaryDirectory directory;
  std::string path = directory / "model.safetensors";
};

TEST_F(safetensors, reads_rows_bit_for_bit) {
  std::array<std::uint16_t, 6> const words{0x3f95, 0x8000, 0x0001, 0x7f80, 0x7fc1, 0xff81};
  std::string data(reinterpret_cast<char const*>(words.data()), sizeof(words));
  data += std::string("\0\0\x80?", 4);
  write_file(path, file_of(R"({"__metadata__":{"format":"pt"},)"
                           R"("one":{"dtype":"F32","shape":[1,1],"data_offsets":[12,16]},)"
                           R"("empty":{"dtype":"I64","shape":[0],"data_offsets":[12,12]},)"
                           R"("head":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,12]}}  )",
                           data));
  SafetensorsFile const file(path, sha256_file(path));
  EXPECT_EQ(file.tensors().size(), 3u);
  EXPECT_EQ(file.element_type("head"), ElementType::bf16);
  std::array<std::uint16_t, 4> out{};
  file.read_rows("head", 1, 2, out.data());
  EXPECT_EQ(std::memcmp(out.data(), words.data() + 2, sizeof(out)), 0);
  float one = 0;
  file.read_rows("one", 0, 1, &one);
  EXPECT_EQ(one, 1.0f);
  file.read_rows("head", 3, 0, nullptr);

  for (auto const& [first, rows] : {std::pair{0, 4}, {3, 1}, {-1, 1}, {0, -1}}) {
    EXPECT_TRUE(mentions(message_of<InvalidArgument>([&, f = first, r = rows] {
                           file.read_rows("head", f, r, out.data());
                         }),
                         path, "head"));
  }
  EXPECT_TRUE(mentions(message_of<FileError>([&] { file.tensor("lm_head"); }), path, "lm_head"));
  EXPECT_TRUE(mentions(message_of<FileError>([&] { file.element_type("empty"); }), path, "I64"));
}

TEST_F(safetensors, another_file_than_expected) {
  write_file(path, file_of("{}", ""));
  EXPECT_TRUE(mentions(message_of<FileError>([&] { SafetensorsFile(path, std::string(64, '0')); }),
                       path, std::string(64, '0'), sha256_file(path)));
}

// Case 31.
TEST_F(safetensors, files_that_are_none) {
  EXPECT_TRUE(mentions(refusal("version https://git-lfs.github.com/spec/v1\n"), "Git LFS"));
  EXPECT_TRUE(mentions(refusal("1234567"), "7 bytes"));
  EXPECT_TRUE(mentions(refusal(""), "0 bytes"));
  EXPECT_TRUE(mentions(refusal(length_prefix(100) + "{}"), "header length 100", "at most 2"));
  EXPECT_TRUE(mentions(refusal(length_prefix(~std::uint64_t{0}) + "{}"), "18446744073709551615"));
  EXPECT_TRUE(mentions(refusal(file_of("{\"a\":", "")), "not JSON"));
  EXPECT_TRUE(mentions(refusal(file_of("[]", "")), "JSON object"));
  EXPECT_TRUE(mentions(refusal(file_of(std::string(100'000, '['), "")), "not JSON"));
}

TEST_F(safetensors, offsets_that_do_not_tile_the_data) {
  auto const two = [](std::string const& a, std::string const& b) {
    return file_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
                       R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}",
                   std::string(8, 'x'));
  };
  write_file(path, two("[4,8]", "[0,4]"));
  EXPECT_NO_THROW(SafetensorsFile{path});
  EXPECT_TRUE(mentions(refusal(two("[0,4]", "[2,6]")), "overlaps"));
  EXPECT_TRUE(mentions(refusal(two("[0,4]", "[0,4]")), "overlaps"));
  EXPECT_TRUE(mentions(refusal(two("[1,5]", "[5,9]")), "within"));
  EXPECT_TRUE(mentions(refusal(two("[0,4]", "[4,8]") + "x"), "end at byte"));
  EXPECT_TRUE(mentions(refusal(two("[0,4]", "[4,8]").substr(0, 120)), "bytes of data"));
  EXPECT_TRUE(mentions(refusal(two("[4,0]", "[4,8]")), "[4, 0)"));
  EXPECT_TRUE(mentions(refusal(two("[-4,0]", "[4,8]")), "-4"));
  EXPECT_TRUE(mentions(refusal(two("[0.5,4.5]", "[4,8]")), "0.5"));
  EXPECT_TRUE(mentions(refusal(two("[0,4,8]", "[4,8]")), "array of two"));
  EXPECT_TRUE(mentions(refusal(two("[0,4]", "[4,7]")), "disagree"));
  EXPECT_TRUE(
      mentions(refusal(file_of(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}})", "xxxx")),
               "uncovered"));
}

TEST_F(safetensors, entries_that_are_wrong) {
  auto const one = [](std::string const& entry) {
    return file_of(R"({"a":)" + entry + "}", "xxxx");
  };
  EXPECT_TRUE(mentions(refusal(one("3")), "tensor a"));
  EXPECT_TRUE(mentions(refusal(one(R"({"dtype":"U8","shape":[4]})")), "data_offsets"));
  EXPECT_TRUE(
      mentions(refusal(one(R"({"dtype":7,"shape":[4],"data_offsets":[0,4]})")), "tensor a"));
  EXPECT_TRUE(mentions(refusal(one(R"({"dtype":"U8","shape":[-4],"data_offsets":[0,4]})")), "-4"));
  EXPECT_TRUE(
      mentions(refusal(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})")), "disagree"));
  // 2^62 elements of four bytes: the product wraps to 0.
  EXPECT_TRUE(mentions(
      refusal(one(R"({"dtype":"F32","shape":[2147483648,2147483648],"data_offsets":[0,0]})")),
      "disagree"));
}

// A claimed size must never be allocated: these would need more than the address space allowed.
TEST_F(safetensors, a_claimed_size_is_not_allocated) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the address sanitizer needs an unlimited address space";
#endif
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  rlimit const small{std::uint64_t{1} << 34, limit.rlim_max};
  setrlimit(RLIMIT_AS, &small);
  refusal(length_prefix(std::uint64_t{1} << 40) + std::string(100, '{'));
  refusal(file_of(
      R"({"a":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}})", "x"));
  setrlimit(RLIMIT_AS, &limit);
}

TEST_F(safetensors, every_cut_is_refused) {
  std::string const whole =
      file_of(R"({"a":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]}})", "12345678");
  for (std::size_t size = 0; size < whole.size(); ++size)
    refusal(whole.substr(0, size));
}

}  // namespace
