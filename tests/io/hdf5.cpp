// SPDX-License-Identifier: Apache-2.0
#include "io/temporary_directory.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/io/hdf5.hpp>

#include <fcntl.h>
#include <hdf5.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <numeric>

namespace {

using namespace vpkl;
using namespace vpkl::impl;
using namespace vpkl::test;

std::uint64_t chunk_bytes(Hdf5Dataset const& dataset) {
  std::uint64_t bytes = size_of(dataset.type());
  for (std::uint64_t const extent : dataset.chunk())
    bytes *= extent;
  return bytes;
}

class hdf5 : public testing::Test {
 protected:
  /// A file made past vpkl's own layer.
  hid_t create_raw(H5F_libver_t format) const {
    hid_t const access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_libver_bounds(access, format, H5F_LIBVER_V110);
    return H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access);
  }

  TemporaryDirectory directory;
  std::string path = directory / "x.h5";
};

TEST(hdf5_chunk_shape, whole_rows_below_the_bound) {
  constexpr std::uint64_t mib = 1 << 20;
  EXPECT_EQ(chunk_shape({8, 4096, 151936}, 2, mib), (Extents{1, 3, 151936}));
  EXPECT_EQ(chunk_shape({16, 64, 32}, 2, mib), (Extents{1, 64, 32}));
  EXPECT_EQ(chunk_shape({100}, 8, mib), (Extents{100}));
  EXPECT_EQ(chunk_shape({1 << 20}, 8, mib), (Extents{1 << 17}));
  EXPECT_EQ(chunk_shape({3, 1'000'000}, 4, mib), (Extents{1, 250'000}));
  EXPECT_EQ(chunk_shape({3, 5}, 4, 4), (Extents{1, 1}));
  EXPECT_THROW(chunk_shape({3}, 4, 3), InvalidArgument);
  EXPECT_THROW(chunk_shape({3}, 4, std::uint64_t{1} << 30), InvalidArgument);
  EXPECT_THROW(chunk_shape({3, 0}, 4, mib), InvalidArgument);
}

// Case 28.
TEST_F(hdf5, a_huge_dataset_takes_no_space_before_it_is_written) {
  std::vector<std::uint16_t> row(151936);
  std::iota(row.begin(), row.end(), std::uint16_t{0});
  {
    Hdf5File file = Hdf5File::create(path);
    Hdf5Dataset dataset = file.create_dataset("/teacher/logits", Hdf5Type::bf16, {8, 4096, 151936});
    EXPECT_LE(chunk_bytes(dataset), 1u << 20);
    EXPECT_EQ(dataset.chunk()[2], 151936u);
    dataset.write({7, 4095, 0}, {1, 1, 151936}, row.data());
    dataset.close();
    file.close();
  }
  EXPECT_LT(std::filesystem::file_size(path), 2u << 20);
  Hdf5File const file = Hdf5File::open(path);
  Hdf5Dataset const dataset = file.open_dataset("/teacher/logits");
  std::vector<std::uint16_t> back(row.size());
  dataset.read({7, 4095, 0}, {1, 1, 151936}, back.data());
  EXPECT_EQ(back, row);
  EXPECT_TRUE(mentions(message_of<FileError>([&] { dataset.require_intact(true); }), path,
                       "/teacher/logits", "1 of its"));
}

// Case 30.
TEST_F(hdf5, bf16_words_survive_bit_for_bit) {
  std::array<std::uint16_t, 8> const words{0x3f95, 0x8000, 0x0001, 0x7f80,
                                           0xff80, 0x7fc1, 0x7f81, 0xffff};
  for (auto const type : {Hdf5Type::bf16, Hdf5Type::fp16}) {
    {
      Hdf5File file = Hdf5File::create(path);
      file.create_dataset("/x", type, {2, 4}).write({0, 0}, {2, 4}, words.data());
      file.close();
    }
    Hdf5File const file = Hdf5File::open(path);
    Hdf5Dataset const dataset = file.open_dataset("/x");
    EXPECT_EQ(dataset.type(), type);
    std::array<std::uint16_t, 8> back{};
    dataset.read({0, 0}, {2, 4}, back.data());
    EXPECT_EQ(back, words);
    std::array<std::uint16_t, 2> part{};
    dataset.read({0, 1}, {2, 1}, part.data());
    EXPECT_EQ(part, (std::array<std::uint16_t, 2>{words[1], words[5]}));
  }
}

TEST_F(hdf5, other_types_are_refused) {
  hid_t const bf16 = H5Tcopy(H5T_IEEE_F32LE);
  H5Tset_fields(bf16, 15, 7, 8, 0, 7);
  H5Tset_ebias(bf16, 127);
  H5Tset_size(bf16, 2);
  hid_t const bad_bias = H5Tcopy(bf16);
  H5Tset_ebias(bad_bias, 126);
  hid_t const big_endian = H5Tcopy(bf16);
  H5Tset_order(big_endian, H5T_ORDER_BE);
  hid_t const bad_fields = H5Tcopy(H5T_IEEE_F32LE);
  H5Tset_fields(bad_fields, 15, 9, 6, 0, 9);
  H5Tset_ebias(bad_fields, 31);
  H5Tset_size(bad_fields, 2);
  std::vector<hid_t> const types{bad_bias,      big_endian,    bad_fields,
                                 H5T_STD_U16LE, H5T_STD_I32BE, H5T_STD_I8LE};
  hid_t const raw = create_raw(H5F_LIBVER_V110);
  hsize_t const extent = 4;
  hid_t const space = H5Screate_simple(1, &extent, nullptr);
  for (std::size_t i = 0; i < types.size(); ++i) {
    H5Dclose(H5Dcreate2(raw, std::to_string(i).c_str(), types[i], space, H5P_DEFAULT, H5P_DEFAULT,
                        H5P_DEFAULT));
  }
  H5Dclose(H5Dcreate2(raw, "good", bf16, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
  H5Fclose(raw);
  Hdf5File const file = Hdf5File::open(path);
  for (std::size_t i = 0; i < types.size(); ++i) {
    std::string const name = "/" + std::to_string(i);
    EXPECT_TRUE(mentions(message_of<FileError>([&] { file.open_dataset(name); }), path,
                         "dataset " + name, "none of"));
  }
  EXPECT_EQ(file.open_dataset("/good").type(), Hdf5Type::bf16);
  EXPECT_TRUE(
      mentions(message_of<FileError>([&] { file.open_dataset("/good").require_intact(true); }),
               path, "/good", "without checksums"));
  EXPECT_TRUE(mentions(message_of<FileError>([&] { file.open_dataset("/no/such"); }), path,
                       "/no/such", "missing"));
}

TEST_F(hdf5, attributes_strings_and_links) {
  {
    Hdf5File file = Hdf5File::create(path);
    file.write_string_attribute("/", "text", "µ and more");
    file.write_int64_attribute("/", "big", -(std::int64_t{1} << 62));
    file.write_uint8_attribute("/", "small", 200);
    EXPECT_THROW(file.write_string_attribute("/", "nul", std::string("a\0b", 3)), InvalidArgument);
    Hdf5Dataset strings = file.create_dataset("/group/strings", Hdf5Type::string, {3});
    strings.write_strings(0, {"first", "", "µ"});
    strings.close();
    file.hard_link("/group/strings", "/other/name");
    file.close();
  }
  Hdf5File const file = Hdf5File::open(path);
  EXPECT_EQ(file.attribute_names("/"), (std::vector<std::string>{"big", "small", "text"}));
  EXPECT_EQ(file.read_string_attribute("/", "text"), "µ and more");
  EXPECT_EQ(file.read_integer_attribute("/", "big"), -(std::int64_t{1} << 62));
  EXPECT_EQ(file.attribute_text("/", "small"), "200");
  EXPECT_FALSE(file.has_attribute("/group", "text"));
  EXPECT_EQ(file.dataset_paths(), (std::vector<std::string>{"/group/strings", "/other/name"}));
  EXPECT_EQ(file.open_dataset("/other/name").read_strings(1, 2),
            (std::vector<std::string>{"", "µ"}));
  EXPECT_TRUE(file.exists("/group/strings"));
  EXPECT_FALSE(file.exists("/group/none/at/all"));

  EXPECT_TRUE(mentions(message_of<FileError>([&] { file.read_integer_attribute("/", "none"); }),
                       path, "none", "missing"));
  EXPECT_TRUE(mentions(message_of<FileError>([&] { file.read_integer_attribute("/", "text"); }),
                       path, "text", "integer"));
  EXPECT_TRUE(mentions(message_of<FileError>([&] { file.read_string_attribute("/", "big"); }), path,
                       "big", "string"));
}

// HDF5 itself follows damaged collections of strings without end or out of bounds.
TEST_F(hdf5, damaged_collections_of_strings_are_no_trap) {
  std::vector<std::string> const texts{"first", std::string(300, 'x'), "last"};
  {
    Hdf5File file = Hdf5File::create(path);
    file.write_string_attribute("/", "text", "value");
    Hdf5Dataset strings = file.create_dataset("/strings", Hdf5Type::string, {3});
    strings.write_strings(0, texts);
    strings.close();
    file.close();
  }
  std::string const whole = read_file(path);
  std::size_t const heap = whole.find("GCOL");
  ASSERT_NE(heap, std::string::npos);
  std::size_t refused = 0;
  for (std::size_t at = heap; at < heap + 448; at += at < heap + 64 ? 1 : 3) {
    for (int const bits : {0x01, 0x10, 0xff}) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ bits);
      write_file(path, damaged);
      try {
        Hdf5File const file = Hdf5File::open(path);
        EXPECT_LE(file.read_string_attribute("/", "text").size(), 5u);
        EXPECT_EQ(file.open_dataset("/strings").read_strings(1, 1).at(0).size(), 300u);
      } catch (FileError const& error) {
        EXPECT_TRUE(mentions(error.what(), path));
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 100u);
}

TEST_F(hdf5, damaged_references_to_strings_are_refused) {
  {
    Hdf5File file = Hdf5File::create(path);
    Hdf5Dataset strings = file.create_dataset("/strings", Hdf5Type::string, {2});
    strings.write_strings(0, {"first", "last"});
    strings.close();
    file.close();
  }
  std::string const whole = read_file(path);
  // A reference is a length, the collection's address and an index of 4 bytes.
  std::uint64_t const heap = whole.find("GCOL");
  std::string reference("\5\0\0\0", 4);
  reference.append(reinterpret_cast<char const*>(&heap), 8);
  std::size_t const at = whole.find(reference);
  ASSERT_NE(at, std::string::npos);
  for (std::size_t i = 0; i < 16; ++i) {
    std::string damaged = whole;
    damaged[at + i] = static_cast<char>(damaged[at + i] ^ 0x40);
    write_file(path, damaged);
    Hdf5File const file = Hdf5File::open(path);
    EXPECT_TRUE(
        mentions(message_of<FileError>([&] { file.open_dataset("/strings").read_strings(0, 2); }),
                 path, "/strings"))
        << "byte " << i;
  }
}

TEST_F(hdf5, blocks_outside_the_extents_are_refused) {
  Hdf5File file = Hdf5File::create(path);
  Hdf5Dataset dataset = file.create_dataset("/x", Hdf5Type::int32, {2, 3});
  std::array<std::int32_t, 6> values{1, 2, 3, 4, 5, 6};
  dataset.write({0, 0}, {2, 3}, values.data());
  for (auto const& [start, count] : {std::pair<Extents, Extents>{{0, 0}, {3, 3}},
                                     {{2, 0}, {1, 3}},
                                     {{0, 1}, {1, ~std::uint64_t{0}}},
                                     {{0}, {1}}}) {
    EXPECT_TRUE(mentions(message_of<InvalidArgument>(
                             [&, s = start, c = count] { dataset.read(s, c, values.data()); }),
                         path, "/x"));
  }
  EXPECT_NO_THROW(dataset.read({2, 0}, {0, 3}, nullptr));
}

TEST_F(hdf5, a_second_dataset_of_a_name_carries_hdf5s_reason) {
  Hdf5File file = Hdf5File::create(path);
  file.create_dataset("/x", Hdf5Type::int32, {1});
  EXPECT_TRUE(
      mentions(message_of<FileError>([&] { file.create_dataset("/x", Hdf5Type::int32, {1}); }),
               path, "/x", "HDF5: H5", "already exists"));
}

TEST_F(hdf5, the_callers_error_printing_is_restored) {
  H5Eset_auto2(H5E_DEFAULT, nullptr, this);
  EXPECT_THROW(Hdf5File::open(directory / "none"), FileError);
  write_file(path, "text");
  EXPECT_THROW(Hdf5File::open(path), FileError);
  H5E_auto2_t print = nullptr;
  void* data = nullptr;
  H5Eget_auto2(H5E_DEFAULT, &print, &data);
  EXPECT_EQ(data, this);
}

TEST_F(hdf5, formats_without_checksums_of_metadata_are_refused) {
  for (H5F_libver_t const format : {H5F_LIBVER_EARLIEST, H5F_LIBVER_V18}) {
    H5Fclose(create_raw(format));
    EXPECT_TRUE(mentions(message_of<FileError>([&] { Hdf5File::open(path); }), path,
                         "older than 1.10", "h5repack"));
  }
}

TEST_F(hdf5, a_locked_file_opens) {
  Hdf5File::create(path).close();
  int const other = open(path.c_str(), O_RDWR);
  ASSERT_EQ(flock(other, LOCK_EX), 0);
  EXPECT_NO_THROW(Hdf5File::open(path));
  close(other);
}

TEST_F(hdf5, a_chunk_of_a_gibibyte_is_refused) {
  hid_t const raw = create_raw(H5F_LIBVER_V110);
  hsize_t const extent = std::uint64_t{1} << 28;
  hid_t const space = H5Screate_simple(1, &extent, nullptr);
  hid_t const creation = H5Pcreate(H5P_DATASET_CREATE);
  H5Pset_chunk(creation, 1, &extent);
  H5Dclose(H5Dcreate2(raw, "x", H5T_STD_I32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT));
  H5Fclose(raw);
  Hdf5File const file = Hdf5File::open(path);
  EXPECT_TRUE(mentions(message_of<FileError>([&] { file.open_dataset("/x"); }), path, "/x",
                       "chunks of 1073741824"));
}

TEST_F(hdf5, links_out_of_the_file_are_refused) {
  hid_t const raw = create_raw(H5F_LIBVER_V110);
  H5Lcreate_external("other.h5", "/x", raw, "outside", H5P_DEFAULT, H5P_DEFAULT);
  H5Fclose(raw);
  Hdf5File const file = Hdf5File::open(path);
  EXPECT_TRUE(mentions(message_of<FileError>([&] { file.dataset_paths(); }), path, "/outside",
                       "external link"));
}

TEST_F(hdf5, circular_groups_end) {
  hid_t const raw = create_raw(H5F_LIBVER_V110);
  hid_t const group = H5Gcreate2(raw, "a", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  H5Lcreate_hard(raw, "/", group, "up", H5P_DEFAULT, H5P_DEFAULT);
  H5Gclose(group);
  H5Fclose(raw);
  Hdf5File const file = Hdf5File::open(path);
  EXPECT_TRUE(
      mentions(message_of<FileError>([&] { file.dataset_paths(); }), path, "nested too deeply"));
}

TEST_F(hdf5, a_flipped_byte_of_data_is_found) {
  std::vector<std::int32_t> values(1000);
  std::iota(values.begin(), values.end(), 1'000'000);
  {
    Hdf5File file = Hdf5File::create(path);
    file.create_dataset("/x", Hdf5Type::int32, {10, 100}).write({0, 0}, {10, 100}, values.data());
    file.close();
  }
  std::string const bytes = read_file(path);
  auto const at = bytes.find(std::string(reinterpret_cast<char const*>(&values[500]), 4));
  ASSERT_NE(at, std::string::npos);
  for (std::size_t i = 0; i < 4; ++i) {
    std::string damaged = bytes;
    damaged[at + i] = static_cast<char>(damaged[at + i] ^ 0x10);
    write_file(path, damaged);
    Hdf5File const file = Hdf5File::open(path);
    Hdf5Dataset const dataset = file.open_dataset("/x");
    EXPECT_TRUE(mentions(message_of<FileError>([&] {
                           dataset.read({0, 0}, {10, 100}, values.data());
                         }),
                         path, "/x", "fletcher32"));
  }
}

}  // namespace
