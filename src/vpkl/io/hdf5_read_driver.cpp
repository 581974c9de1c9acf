// SPDX-License-Identifier: Apache-2.0
#include <vpkl/io/hdf5_read_driver.hpp>

#include <vpkl/io/file_descriptor.hpp>
#include <vpkl/io/hdf5_global_heap.hpp>

#include <fcntl.h>
#include <hdf5.h>
#if H5_VERSION_GE(1, 13, 0)
#include <H5FDdevelop.h>
#endif

#include <exception>
#include <limits>

namespace vpkl::impl {
namespace {

struct ReadFile : H5FD_t {
  explicit ReadFile(char const* path) : H5FD_t{}, file(path, O_RDONLY), size(file.size()) {}

  FileDescriptor file;
  std::uint64_t size;
  haddr_t allocated = 0;
};

template <class Action>
bool guarded(Action const& action) {
  try {
    action();
    return true;
  } catch (std::exception const& error) {
    H5Epush2(H5E_DEFAULT, __FILE__, "vpkl", __LINE__, H5E_ERR_CLS, H5E_IO, H5E_READERROR, "%s",
             error.what());
    return false;
  }
}

H5FD_t* open_file(char const* path, unsigned, hid_t, haddr_t) {
  ReadFile* file = nullptr;
  guarded([&] { file = new ReadFile(path); });
  return file;
}

herr_t close_file(H5FD_t* file) {
  delete static_cast<ReadFile*>(file);
  return 0;
}

haddr_t get_allocated(H5FD_t const* file, H5FD_mem_t) {
  return static_cast<ReadFile const*>(file)->allocated;
}

herr_t set_allocated(H5FD_t* file, H5FD_mem_t, haddr_t address) {
  static_cast<ReadFile*>(file)->allocated = address;
  return 0;
}

haddr_t get_size(H5FD_t const* file, H5FD_mem_t) {
  return static_cast<ReadFile const*>(file)->size;
}

herr_t read_file(H5FD_t* base, H5FD_mem_t, hid_t, haddr_t address, std::size_t size, void* out) {
  FileDescriptor const& file = static_cast<ReadFile const*>(base)->file;
  bool const read = guarded([&] {
    file.read_at(address, out, size);
    if (starts_heap(static_cast<unsigned char const*>(out), size)) load_heap(file, address);
  });
  return read ? 0 : -1;
}

// HDF5 wants one, but never calls it for a file that is open for reading.
herr_t refuse_write(H5FD_t*, H5FD_mem_t, hid_t, haddr_t, std::size_t, void const*) { return -1; }

}  // namespace

Hdf5Id register_read_driver() {
  H5FD_class_t driver{};
#ifdef H5FD_CLASS_VERSION
  driver.version = H5FD_CLASS_VERSION;
  driver.value = 511;  // of the range for internal use
#endif
  driver.name = "vpkl_read";
  driver.maxaddr = static_cast<haddr_t>(std::numeric_limits<std::int64_t>::max());
  driver.fc_degree = H5F_CLOSE_STRONG;
  driver.open = open_file;
  driver.close = close_file;
  driver.get_eoa = get_allocated;
  driver.set_eoa = set_allocated;
  driver.get_eof = get_size;
  driver.read = read_file;
  driver.write = refuse_write;
  return Hdf5Id(H5FDregister(&driver), H5FDunregister);
}

}  // namespace vpkl::impl
