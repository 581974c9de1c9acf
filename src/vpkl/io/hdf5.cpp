// SPDX-License-Identifier: Apache-2.0
#include <vpkl/io/hdf5.hpp>

#include <vpkl/core/error.hpp>
#include <vpkl/io/file_descriptor.hpp>
#include <vpkl/io/hdf5_global_heap.hpp>
#include <vpkl/io/hdf5_read_driver.hpp>

#include <fcntl.h>
#include <fmt/format.h>
#include <hdf5.h>

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <string_view>
#include <utility>

namespace vpkl::impl {
namespace {

static_assert(sizeof(hid_t) == sizeof(std::int64_t), "HDF5 1.10 or later");

constexpr std::uint64_t max_chunk = std::uint64_t{1} << 30;
constexpr std::uint64_t default_cache = std::uint64_t{1} << 20;
constexpr int max_group_depth = 8;

/// Switches HDF5's error printing off and back on.
class Quiet {
 public:
  Quiet() {
    H5Eget_auto2(H5E_DEFAULT, &print_, &data_);
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  ~Quiet() { H5Eset_auto2(H5E_DEFAULT, print_, data_); }
  Quiet(Quiet const&) = delete;
  Quiet& operator=(Quiet const&) = delete;

 private:
  H5E_auto2_t print_ = nullptr;
  void* data_ = nullptr;
};

std::string error_stack() {
  std::string text;
  auto const append = [](unsigned, H5E_error2_t const* entry, void* out) -> herr_t {
    auto& all = *static_cast<std::string*>(out);
    all += fmt::format("{}{}: {}", all.empty() ? "" : "; ", entry->func_name, entry->desc);
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, append, &text);
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

[[noreturn]] void fail(std::string const& where, std::string_view what) {
  std::string const stack = error_stack();
  auto const mentions = [&](char const* word) { return stack.find(word) != std::string::npos; };
  char const* hint = "";
  if (mentions("already open for write") || mentions("consistency flags")) {
    hint = "; its writer was interrupted or is still running";
  } else if (mentions("unable to lock")) {
    hint = "; set HDF5_USE_FILE_LOCKING=FALSE in the environment";
  }
  throw FileError(fmt::format("{}: {} (HDF5: {}){}", where, what, stack, hint));
}

/// Passes a valid result on, turns a negative one into a FileError.
template <class Result>
Result check(Result result, std::string const& where, std::string_view what) {
  if (result < 0) fail(where, what);
  return result;
}

template <herr_t (*close)(hid_t)>
Hdf5Id own(hid_t id, std::string const& where, std::string_view what) {
  return Hdf5Id(check(id, where, what), close);
}

/// HDF5 aborts the process when headers and library differ, as happens when a process holds two
/// copies of it; name both instead.
void check_library(std::string const& where) {
  std::array<unsigned, 3> version{};
  H5get_libversion(&version[0], &version[1], &version[2]);
  if (version != std::array<unsigned, 3>{H5_VERS_MAJOR, H5_VERS_MINOR, H5_VERS_RELEASE}) {
    throw FileError(fmt::format(
        "{}: vpkl was built with HDF5 {}.{}.{}, but this process runs HDF5 {}; link one HDF5 only",
        where, H5_VERS_MAJOR, H5_VERS_MINOR, H5_VERS_RELEASE, fmt::join(version, ".")));
  }
}

struct FloatFields {
  std::size_t sign, exponent, exponent_bits, mantissa, mantissa_bits, bias;
  bool operator==(FloatFields const& o) const {
    return sign == o.sign && exponent == o.exponent && exponent_bits == o.exponent_bits &&
           mantissa == o.mantissa && mantissa_bits == o.mantissa_bits && bias == o.bias;
  }
};

constexpr FloatFields bf16_fields{15, 7, 8, 0, 7, 127};
constexpr FloatFields fp16_fields{15, 10, 5, 0, 10, 15};
constexpr FloatFields fp32_fields{31, 23, 8, 0, 23, 127};
constexpr FloatFields fp64_fields{63, 52, 11, 0, 52, 1023};

/// The type as vpkl writes it; in memory the same, so that HDF5 never converts an element.
Hdf5Id make_type(Hdf5Type type, std::string const& where) {
  char const* const what = "cannot make its type";
  auto const copy = [&](hid_t id) { return own<H5Tclose>(H5Tcopy(id), where, what); };
  auto const two_byte_float = [&](FloatFields const& f) {
    Hdf5Id id = copy(H5T_IEEE_F32LE);
    check(H5Tset_fields(id.get(), f.sign, f.exponent, f.exponent_bits, f.mantissa, f.mantissa_bits),
          where, what);
    check(H5Tset_ebias(id.get(), f.bias), where, what);
    check(H5Tset_size(id.get(), 2), where, what);
    return id;
  };
  switch (type) {
    case Hdf5Type::int32: return copy(H5T_STD_I32LE);
    case Hdf5Type::uint8: return copy(H5T_STD_U8LE);
    case Hdf5Type::int64: return copy(H5T_STD_I64LE);
    case Hdf5Type::fp64: return copy(H5T_IEEE_F64LE);
    case Hdf5Type::fp32: return copy(H5T_IEEE_F32LE);
    case Hdf5Type::bf16: return two_byte_float(bf16_fields);
    case Hdf5Type::fp16: return two_byte_float(fp16_fields);
    case Hdf5Type::string: break;
  }
  Hdf5Id id = copy(H5T_C_S1);
  check(H5Tset_size(id.get(), H5T_VARIABLE), where, what);
  check(H5Tset_cset(id.get(), H5T_CSET_UTF8), where, what);
  return id;
}

/// Recognises the type of a dataset in a file.
Hdf5Type parse_type(hid_t type, std::string const& where) {
  std::size_t const size = H5Tget_size(type);
  H5T_class_t const type_class = H5Tget_class(type);
  if (type_class == H5T_STRING && H5Tis_variable_str(type) > 0) return Hdf5Type::string;
  bool const little = size == 1 || H5Tget_order(type) == H5T_ORDER_LE;
  if (type_class == H5T_INTEGER && little && H5Tget_precision(type) == 8 * size) {
    bool const is_signed = H5Tget_sign(type) == H5T_SGN_2;
    if (is_signed && size == 4) return Hdf5Type::int32;
    if (is_signed && size == 8) return Hdf5Type::int64;
    if (!is_signed && size == 1) return Hdf5Type::uint8;
  }
  if (type_class == H5T_FLOAT && little && H5Tget_norm(type) == H5T_NORM_IMPLIED &&
      H5Tget_offset(type) == 0) {
    FloatFields f{};
    check(
        H5Tget_fields(type, &f.sign, &f.exponent, &f.exponent_bits, &f.mantissa, &f.mantissa_bits),
        where, "cannot read its type");
    f.bias = H5Tget_ebias(type);
    if (size == 2 && f == bf16_fields) return Hdf5Type::bf16;
    if (size == 2 && f == fp16_fields) return Hdf5Type::fp16;
    if (size == 4 && f == fp32_fields) return Hdf5Type::fp32;
    if (size == 8 && f == fp64_fields) return Hdf5Type::fp64;
  }
  throw FileError(fmt::format(
      "{}: has an element type of {} bytes that is none of int32, uint8, int64, fp64, fp32, bf16, "
      "fp16 (little-endian) and variable-length string",
      where, size));
}

std::uint64_t product(Extents const& extents) {
  return std::accumulate(extents.begin(), extents.end(), std::uint64_t{1}, std::multiplies<>());
}

std::uint64_t ceil_divide(std::uint64_t a, std::uint64_t b) { return a / b + (a % b != 0); }

std::uint64_t chunk_count(Extents const& dims, Extents const& chunk) {
  std::uint64_t count = 1;
  for (std::size_t i = 0; i < dims.size(); ++i)
    count *= ceil_divide(dims[i], chunk[i]);
  return count;
}

Hdf5Id access_with_cache(std::uint64_t chunk_bytes, std::string const& where) {
  auto access = own<H5Pclose>(H5Pcreate(H5P_DATASET_ACCESS), where, "cannot set its cache");
  check(H5Pset_chunk_cache(access.get(), H5D_CHUNK_CACHE_NSLOTS_DEFAULT,
                           std::max(chunk_bytes, default_cache), 1.0),
        where, "cannot set its cache");
  return access;
}

/// HDF5 waits with closing a file for its datasets, attributes, …: close them with it instead, so
/// that a file is finished when close() returns.
Hdf5Id file_access(std::string const& where) {
  auto access = own<H5Pclose>(H5Pcreate(H5P_FILE_ACCESS), where, "cannot open");
  check(H5Pset_fclose_degree(access.get(), H5F_CLOSE_STRONG), where, "cannot open");
  return access;
}

/// Links that create missing groups, with UTF-8 names.
Hdf5Id link_creation(std::string const& where) {
  auto link = own<H5Pclose>(H5Pcreate(H5P_LINK_CREATE), where, "cannot create");
  check(H5Pset_create_intermediate_group(link.get(), 1), where, "cannot create");
  check(H5Pset_char_encoding(link.get(), H5T_CSET_UTF8), where, "cannot create");
  return link;
}

void list_datasets(hid_t group, std::string const& group_path, std::string const& file, int depth,
                   std::vector<std::string>& out) {
  if (depth > max_group_depth) {
    throw FileError(fmt::format("{}: group {} is nested too deeply", file, group_path));
  }
  struct Link {
    std::string name;
    bool hard;
  };
  std::vector<Link> links;
  auto const collect = [](hid_t, char const* name, H5L_info_t const* info, void* data) -> herr_t {
    static_cast<std::vector<Link>*>(data)->push_back({name, info->type == H5L_TYPE_HARD});
    return 0;
  };
  check(H5Literate(group, H5_INDEX_NAME, H5_ITER_INC, nullptr, collect, &links),
        file + ": group " + group_path, "cannot list it");
  for (Link const& link : links) {
    std::string const path = (group_path == "/" ? "" : group_path) + "/" + link.name;
    std::string const where = file + ": " + path;
    if (!link.hard) throw FileError(where + ": is a soft or external link, expected a dataset");
    auto const object =
        own<H5Oclose>(H5Oopen(group, link.name.c_str(), H5P_DEFAULT), where, "cannot open");
    H5I_type_t const type = H5Iget_type(object.get());
    if (type == H5I_GROUP) {
      list_datasets(object.get(), path, file, depth + 1, out);
    } else if (type == H5I_DATASET) {
      out.push_back(path);
    } else {
      throw FileError(where + ": is neither dataset nor group");
    }
  }
}

void require_no_nul(std::string const& text, std::string const& where) {
  if (text.find('\0') != std::string::npos) {
    throw InvalidArgument(where + ": a string holds a NUL byte, which HDF5 strings cannot");
  }
}

std::string attribute_where(std::string const& path, std::string const& object,
                            std::string const& name) {
  return fmt::format("{}: attribute {} of {}", path, name, object);
}

}  // namespace

char const* to_string(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::int32: return "int32";
    case Hdf5Type::uint8: return "uint8";
    case Hdf5Type::int64: return "int64";
    case Hdf5Type::fp64: return "fp64";
    case Hdf5Type::fp32: return "fp32";
    case Hdf5Type::bf16: return "bf16";
    case Hdf5Type::fp16: return "fp16";
    case Hdf5Type::string: break;
  }
  return "string";
}

std::size_t size_of(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::uint8: return 1;
    case Hdf5Type::bf16:
    case Hdf5Type::fp16: return 2;
    case Hdf5Type::int32:
    case Hdf5Type::fp32: return 4;
    case Hdf5Type::int64:
    case Hdf5Type::fp64: return 8;
    case Hdf5Type::string: break;
  }
  return 16;
}

Hdf5Type hdf5_type(ElementType type) {
  switch (type) {
    case ElementType::bf16: return Hdf5Type::bf16;
    case ElementType::fp16: return Hdf5Type::fp16;
    case ElementType::fp32: break;
  }
  return Hdf5Type::fp32;
}

Extents chunk_shape(Extents const& dims, std::size_t element_bytes, std::uint64_t max_chunk_bytes) {
  if (max_chunk_bytes < element_bytes || max_chunk_bytes >= max_chunk) {
    throw InvalidArgument(fmt::format("chunk of at most {} bytes, expected a bound in [{}, {})",
                                      max_chunk_bytes, element_bytes, max_chunk));
  }
  Extents chunk(dims.size(), 1);
  std::uint64_t room = max_chunk_bytes / element_bytes;
  std::size_t const tiled = std::min<std::size_t>(dims.size(), 2);
  for (std::size_t i = dims.size(); i-- > dims.size() - tiled;) {
    if (dims[i] == 0) throw InvalidArgument("a dataset's extents must be positive");
    chunk[i] = ceil_divide(dims[i], ceil_divide(dims[i], std::max<std::uint64_t>(room, 1)));
    room /= chunk[i];
  }
  return chunk;
}

Hdf5Id::Hdf5Id(Hdf5Id&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}

Hdf5Id& Hdf5Id::operator=(Hdf5Id&& other) noexcept {
  std::swap(id_, other.id_);
  std::swap(close_, other.close_);
  return *this;
}

bool Hdf5Id::close() noexcept {
  if (id_ < 0) return true;
  Quiet const quiet;
  return close_(std::exchange(id_, -1)) >= 0;
}

std::uint64_t Hdf5Dataset::storage_bytes() const {
  return chunk_count(dims_, chunk_) * product(chunk_) * size_of(type_);
}

Hdf5Id Hdf5Dataset::select(Extents const& start, Extents const& count) const {
  for (std::size_t i = 0; i < dims_.size(); ++i) {
    if (start.size() != dims_.size() || count.size() != dims_.size() || start[i] > dims_[i] ||
        count[i] > dims_[i] - start[i]) {
      throw InvalidArgument(fmt::format("{}: block [{}] at [{}] is outside its extents [{}]",
                                        where_, fmt::join(count, ", "), fmt::join(start, ", "),
                                        fmt::join(dims_, ", ")));
    }
  }
  std::vector<hsize_t> const first(start.begin(), start.end());
  std::vector<hsize_t> const size(count.begin(), count.end());
  auto space = own<H5Sclose>(H5Dget_space(id_.get()), where_, "cannot read its extents");
  check(
      H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, first.data(), nullptr, size.data(), nullptr),
      where_, "cannot select a block");
  return space;
}

/// Memory in the shape of the block: for any other shape HDF5 maps chunks element by element.
Hdf5Id Hdf5Dataset::block_of(Extents const& count) const {
  std::vector<hsize_t> const size(count.begin(), count.end());
  return own<H5Sclose>(H5Screate_simple(static_cast<int>(size.size()), size.data(), nullptr),
                       where_, "cannot describe a block of memory");
}

void Hdf5Dataset::read(Extents const& start, Extents const& count, void* out) const {
  Quiet const quiet;
  Hdf5Id const file_space = select(start, count);
  if (product(count) == 0) return;
  Hdf5Id const memory = block_of(count);
  Hdf5Id const type = make_type(type_, where_);
  check(H5Dread(id_.get(), type.get(), memory.get(), file_space.get(), H5P_DEFAULT, out), where_,
        "cannot read");
}

void Hdf5Dataset::write(Extents const& start, Extents const& count, void const* in) {
  Quiet const quiet;
  Hdf5Id const file_space = select(start, count);
  if (product(count) == 0) return;
  Hdf5Id const memory = block_of(count);
  Hdf5Id const type = make_type(type_, where_);
  check(H5Dwrite(id_.get(), type.get(), memory.get(), file_space.get(), H5P_DEFAULT, in), where_,
        "cannot write");
}

/// Where an element of a one-dimensional dataset without filters lies in the file; `run` is the
/// number of elements that follow each other from there.
std::uint64_t Hdf5Dataset::address_of(std::uint64_t element, std::uint64_t& run) const {
  haddr_t address = HADDR_UNDEF;
  std::uint64_t first = 0;
  run = dims_[0];
  if (chunk_.empty()) {
    address = H5Dget_offset(id_.get());
  } else {
    first = element - element % chunk_[0];
    run = std::min(first + chunk_[0], dims_[0]);
    hsize_t const coordinate = first;
    unsigned filters = 0;
    hsize_t bytes = 0;
    check(H5Dget_chunk_info_by_coord(id_.get(), &coordinate, &filters, &address, &bytes), where_,
          "cannot find a chunk");
  }
  if (address == HADDR_UNDEF) throw FileError(where_ + ": has elements that were never written");
  run -= element;
  return address + (element - first) * HeapStrings::reference_bytes;
}

std::vector<std::string> Hdf5Dataset::read_strings(std::uint64_t first, std::uint64_t count) const {
  Quiet const quiet;
  select({first}, {count});
  FileDescriptor const file(path_, O_RDONLY);
  HeapStrings heap(file);
  std::vector<HeapStrings::Reference> references(count);
  for (std::uint64_t done = 0; done < count;) {
    std::uint64_t run = 0;
    std::uint64_t const address = address_of(first + done, run);
    run = std::min(run, count - done);
    file.read_at(address, references[done].data(), run * HeapStrings::reference_bytes);
    done += run;
  }
  std::vector<std::string> strings;
  try {
    for (auto const& reference : references)
      strings.push_back(heap.read(reference));
  } catch (FileError const& error) {
    throw FileError(fmt::format("{}: {}", where_, error.what()));
  }
  return strings;
}

void Hdf5Dataset::write_strings(std::uint64_t first, std::vector<std::string> const& strings) {
  std::vector<char const*> pointers;
  for (std::string const& text : strings) {
    require_no_nul(text, where_);
    pointers.push_back(text.c_str());
  }
  write({first}, {strings.size()}, pointers.data());
}

void Hdf5Dataset::require_intact(bool checksummed) const {
  if (checksummed && !checksummed_) {
    throw FileError(where_ + ": is stored without checksums, expected chunks with fletcher32");
  }
  if (chunk_.empty()) return;
  Quiet const quiet;
  hsize_t written = 0;
  auto const space = own<H5Sclose>(H5Dget_space(id_.get()), where_, "cannot read its extents");
  check(H5Dget_num_chunks(id_.get(), space.get(), &written), where_, "cannot count its chunks");
  std::uint64_t const expected = chunk_count(dims_, chunk_);
  if (written != expected) {
    throw FileError(fmt::format("{}: {} of its {} chunks were written", where_, written, expected));
  }
}

void Hdf5Dataset::close() {
  Quiet const quiet;
  if (!id_.close()) fail(where_, "cannot write");
}

Hdf5File Hdf5File::create(std::string const& path) {
  check_library(path);
  Quiet const quiet;
  Hdf5Id const access = file_access(path);
  check(H5Pset_libver_bounds(access.get(), H5F_LIBVER_V110, H5F_LIBVER_V110), path,
        "cannot create");
  return {path, own<H5Fclose>(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.get()),
                              path, "cannot create")};
}

Hdf5File Hdf5File::open(std::string const& path) {
  check_library(path);
  // A plain message for the plain mistakes.
  if (!FileDescriptor(path, O_RDONLY).is_regular()) {
    throw FileError(path + ": is not a regular file, expected an HDF5 file");
  }
  Quiet const quiet;
  Hdf5Id const access = file_access(path);
  Hdf5Id const driver = register_read_driver();
  check(H5Pset_driver(access.get(), driver.get(), nullptr), path, "cannot set the file driver");
  Hdf5File file(path, own<H5Fclose>(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()), path,
                                    "cannot open as HDF5 file"));
  H5F_info2_t info{};
  check(H5Fget_info2(file.id_.get(), &info), path, "cannot read its version");
  if (info.super.version < 3) {
    throw FileError(path +
                    ": is in an HDF5 format older than 1.10, whose metadata has no checksums; "
                    "convert it with h5repack --low=2 --high=2, or write it from h5py with "
                    "libver=(\"v110\", \"v110\")");
  }
  return file;
}

bool Hdf5File::exists(std::string const& object) const {
  Quiet const quiet;
  // H5Lexists fails on a path whose groups are missing: go down one level at a time.
  for (std::size_t end = object.find('/', 1);; end = object.find('/', end + 1)) {
    std::string const part = object.substr(0, end);
    htri_t const found = H5Lexists(id_.get(), part.c_str(), H5P_DEFAULT);
    if (check(found, path_ + ": " + part, "cannot look it up") == 0) return false;
    if (end == std::string::npos) return true;
  }
}

std::vector<std::string> Hdf5File::dataset_paths() const {
  Quiet const quiet;
  std::vector<std::string> paths;
  Hdf5Id const root = open_object("/");
  list_datasets(root.get(), "/", path_, 0, paths);
  std::sort(paths.begin(), paths.end());
  return paths;
}

Hdf5Dataset Hdf5File::create_dataset(std::string const& name, Hdf5Type type, Extents const& dims,
                                     std::uint64_t max_chunk_bytes) {
  Quiet const quiet;
  Hdf5Dataset dataset;
  dataset.path_ = path_;
  dataset.where_ = fmt::format("{}: dataset {}", path_, name);
  dataset.type_ = type;
  dataset.dims_ = dims;
  dataset.chunk_ = chunk_shape(dims, size_of(type), max_chunk_bytes);
  // Strings are stored as references, to which HDF5 applies no filter and which need a start value.
  dataset.checksummed_ = type != Hdf5Type::string;

  std::string const& where = dataset.where_;
  char const* const what = "cannot create";
  std::vector<hsize_t> const extents(dims.begin(), dims.end());
  std::vector<hsize_t> const chunk(dataset.chunk_.begin(), dataset.chunk_.end());
  int const rank = static_cast<int>(dims.size());
  auto const space = own<H5Sclose>(H5Screate_simple(rank, extents.data(), nullptr), where, what);
  auto const creation = own<H5Pclose>(H5Pcreate(H5P_DATASET_CREATE), where, what);
  check(H5Pset_chunk(creation.get(), rank, chunk.data()), where, what);
  check(H5Pset_alloc_time(creation.get(), H5D_ALLOC_TIME_INCR), where, what);
  if (dataset.checksummed_) {
    check(H5Pset_fletcher32(creation.get()), where, what);
    check(H5Pset_fill_time(creation.get(), H5D_FILL_TIME_NEVER), where, what);
  }
  Hdf5Id const access = access_with_cache(product(dataset.chunk_) * size_of(type), where);
  Hdf5Id const link = link_creation(where);
  Hdf5Id const element = make_type(type, where);
  dataset.id_ = own<H5Dclose>(H5Dcreate2(id_.get(), name.c_str(), element.get(), space.get(),
                                         link.get(), creation.get(), access.get()),
                              where, what);
  return dataset;
}

Hdf5Dataset Hdf5File::open_dataset(std::string const& name) const {
  Quiet const quiet;
  Hdf5Dataset dataset;
  dataset.path_ = path_;
  dataset.where_ = fmt::format("{}: dataset {}", path_, name);
  std::string const& where = dataset.where_;
  if (!exists(name)) throw FileError(where + ": is missing");
  dataset.id_ = own<H5Dclose>(H5Dopen2(id_.get(), name.c_str(), H5P_DEFAULT), where, "cannot open");
  auto const type = own<H5Tclose>(H5Dget_type(dataset.id_.get()), where, "cannot read its type");
  dataset.type_ = parse_type(type.get(), where);
  auto const space =
      own<H5Sclose>(H5Dget_space(dataset.id_.get()), where, "cannot read its extents");
  int const rank = check(H5Sget_simple_extent_ndims(space.get()), where, "cannot read its extents");
  std::vector<hsize_t> extents(static_cast<std::size_t>(rank));
  check(H5Sget_simple_extent_dims(space.get(), extents.data(), nullptr), where,
        "cannot read its extents");
  dataset.dims_.assign(extents.begin(), extents.end());

  auto const creation = own<H5Pclose>(H5Dget_create_plist(dataset.id_.get()), where, "cannot open");
  if (H5Pget_layout(creation.get()) != H5D_CHUNKED) return dataset;
  std::vector<hsize_t> chunk(extents.size());
  check(H5Pget_chunk(creation.get(), rank, chunk.data()), where, "cannot read its chunking");
  dataset.chunk_.assign(chunk.begin(), chunk.end());
  int const filters = check(H5Pget_nfilters(creation.get()), where, "cannot read its filters");
  for (int i = 0; i < filters; ++i) {
    unsigned flags = 0, config = 0;
    std::size_t values = 0;
    dataset.checksummed_ |=
        H5Pget_filter2(creation.get(), static_cast<unsigned>(i), &flags, &values, nullptr, 0,
                       nullptr, &config) == H5Z_FILTER_FLETCHER32;
  }
  std::uint64_t const chunk_bytes = product(dataset.chunk_) * size_of(dataset.type_);
  if (chunk_bytes >= max_chunk) {
    throw FileError(fmt::format("{}: has chunks of {} bytes, expected less than {}", where,
                                chunk_bytes, max_chunk));
  }
  // A chunk larger than the cache would be read again for every row.
  if (chunk_bytes > default_cache) {
    Hdf5Id const access = access_with_cache(chunk_bytes, where);
    dataset.id_.close();
    dataset.id_ =
        own<H5Dclose>(H5Dopen2(id_.get(), name.c_str(), access.get()), where, "cannot open");
  }
  return dataset;
}

void Hdf5File::hard_link(std::string const& existing, std::string const& name) {
  Quiet const quiet;
  std::string const where = path_ + ": " + name;
  Hdf5Id const link = link_creation(where);
  check(
      H5Lcreate_hard(id_.get(), existing.c_str(), id_.get(), name.c_str(), link.get(), H5P_DEFAULT),
      where, "cannot link to " + existing);
}

Hdf5Id Hdf5File::open_object(std::string const& object) const {
  return own<H5Oclose>(H5Oopen(id_.get(), object.c_str(), H5P_DEFAULT), path_ + ": " + object,
                       "cannot open");
}

Hdf5Id Hdf5File::open_attribute(std::string const& object, std::string const& name) const {
  std::string const where = attribute_where(path_, object, name);
  if (!has_attribute(object, name)) throw FileError(where + ": is missing");
  auto attribute = own<H5Aclose>(
      H5Aopen_by_name(id_.get(), object.c_str(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT), where,
      "cannot open");
  auto const space = own<H5Sclose>(H5Aget_space(attribute.get()), where, "cannot read");
  if (H5Sget_simple_extent_npoints(space.get()) != 1) {
    throw FileError(where + ": expected a single value");
  }
  return attribute;
}

void Hdf5File::write_attribute(std::string const& object, std::string const& name,
                               std::int64_t type, void const* value) {
  std::string const where = attribute_where(path_, object, name);
  Hdf5Id const owner = open_object(object);
  auto const space = own<H5Sclose>(H5Screate(H5S_SCALAR), where, "cannot write");
  auto const attribute = own<H5Aclose>(
      H5Acreate2(owner.get(), name.c_str(), type, space.get(), H5P_DEFAULT, H5P_DEFAULT), where,
      "cannot write");
  check(H5Awrite(attribute.get(), type, value), where, "cannot write");
}

void Hdf5File::write_int64_attribute(std::string const& object, std::string const& name,
                                     std::int64_t value) {
  Quiet const quiet;
  write_attribute(object, name, make_type(Hdf5Type::int64, path_).get(), &value);
}

void Hdf5File::write_uint8_attribute(std::string const& object, std::string const& name,
                                     std::uint8_t value) {
  Quiet const quiet;
  write_attribute(object, name, make_type(Hdf5Type::uint8, path_).get(), &value);
}

void Hdf5File::write_string_attribute(std::string const& object, std::string const& name,
                                      std::string const& value) {
  Quiet const quiet;
  require_no_nul(value, attribute_where(path_, object, name));
  char const* const pointer = value.c_str();
  write_attribute(object, name, make_type(Hdf5Type::string, path_).get(), &pointer);
}

bool Hdf5File::has_attribute(std::string const& object, std::string const& name) const {
  Quiet const quiet;
  return check(H5Aexists_by_name(id_.get(), object.c_str(), name.c_str(), H5P_DEFAULT),
               attribute_where(path_, object, name), "cannot look it up") > 0;
}

std::vector<std::string> Hdf5File::attribute_names(std::string const& object) const {
  Quiet const quiet;
  std::vector<std::string> names;
  auto const collect = [](hid_t, char const* name, H5A_info_t const*, void* data) -> herr_t {
    static_cast<std::vector<std::string>*>(data)->emplace_back(name);
    return 0;
  };
  check(H5Aiterate_by_name(id_.get(), object.c_str(), H5_INDEX_NAME, H5_ITER_INC, nullptr, collect,
                           &names, H5P_DEFAULT),
        path_ + ": " + object, "cannot list its attributes");
  std::sort(names.begin(), names.end());
  return names;
}

std::int64_t Hdf5File::read_integer_attribute(std::string const& object,
                                              std::string const& name) const {
  Quiet const quiet;
  std::string const where = attribute_where(path_, object, name);
  Hdf5Id const attribute = open_attribute(object, name);
  auto const type = own<H5Tclose>(H5Aget_type(attribute.get()), where, "cannot read its type");
  if (H5Tget_class(type.get()) != H5T_INTEGER) throw FileError(where + ": expected an integer");
  std::int64_t value = 0;
  check(H5Aread(attribute.get(), H5T_NATIVE_INT64, &value), where, "cannot read");
  return value;
}

double Hdf5File::read_double_attribute(std::string const& object, std::string const& name) const {
  Quiet const quiet;
  std::string const where = attribute_where(path_, object, name);
  Hdf5Id const attribute = open_attribute(object, name);
  auto const type = own<H5Tclose>(H5Aget_type(attribute.get()), where, "cannot read its type");
  if (H5Tget_class(type.get()) != H5T_FLOAT) throw FileError(where + ": expected a real number");
  double value = 0;
  check(H5Aread(attribute.get(), H5T_NATIVE_DOUBLE, &value), where, "cannot read");
  return value;
}

std::string Hdf5File::read_string_attribute(std::string const& object,
                                            std::string const& name) const {
  Quiet const quiet;
  std::string const where = attribute_where(path_, object, name);
  Hdf5Id const attribute = open_attribute(object, name);
  auto const type = own<H5Tclose>(H5Aget_type(attribute.get()), where, "cannot read its type");
  if (H5Tget_class(type.get()) != H5T_STRING) throw FileError(where + ": expected a string");
  if (H5Tis_variable_str(type.get()) > 0) {
    char* text = nullptr;
    check(H5Aread(attribute.get(), type.get(), &text), where, "cannot read");
    std::string value(text != nullptr ? text : "");
    H5free_memory(text);
    return value;
  }
  std::string value(H5Tget_size(type.get()), '\0');
  check(H5Aread(attribute.get(), type.get(), value.data()), where, "cannot read");
  return value.substr(0, value.find('\0'));
}

std::string Hdf5File::attribute_text(std::string const& object, std::string const& name) const {
  Quiet const quiet;
  std::string const where = attribute_where(path_, object, name);
  Hdf5Id const attribute = open_attribute(object, name);
  auto const type = own<H5Tclose>(H5Aget_type(attribute.get()), where, "cannot read its type");
  if (H5Tget_class(type.get()) == H5T_STRING) return read_string_attribute(object, name);
  return std::to_string(read_integer_attribute(object, name));
}

void Hdf5File::flush() {
  Quiet const quiet;
  check(H5Fflush(id_.get(), H5F_SCOPE_GLOBAL), path_, "cannot flush");
}

void Hdf5File::close() {
  Quiet const quiet;
  if (!id_.close()) fail(path_, "cannot close");
}

}  // namespace vpkl::impl
