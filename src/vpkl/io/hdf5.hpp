// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Small RAII layer over the HDF5 C API, for vpkl's own files.
///
/// Every failure is a FileError that names file and dataset and carries HDF5's error stack; HDF5's
/// own printing is off during vpkl's calls and as the caller had it afterwards.
///
/// Thread safety: none of its own. HDF5 is often built without its global lock, so all HDF5 calls
/// of a process, vpkl's and the caller's, belong on one thread at a time.
///
/// Known limits: little-endian hosts and files; scalar attributes only; links are hard links (soft
/// and external ones are refused, they could lead out of the file).
#pragma once

#include <vpkl/core/element_type.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace vpkl::impl {

/// Element types of datasets.
enum class Hdf5Type { int32, uint8, int64, fp64, fp32, bf16, fp16, string };

/// \brief "int32", …, as used in messages.
char const* to_string(Hdf5Type type);

/// \brief Bytes of one element (of a string: of its reference in the dataset).
std::size_t size_of(Hdf5Type type);

/// \brief The dataset type of an ElementType.
Hdf5Type hdf5_type(ElementType type);

/// Extents of a dataset, or the start or size of a block in it.
using Extents = std::vector<std::uint64_t>;

/// \brief Chunk of a dataset: whole rows of the last dimension, as many as fit; one in every
/// dimension before the last two, so that a chunk holds data of one sample. A row that alone
/// exceeds the bound is split evenly.
/// \param[in] dims             extents of the dataset, all positive
/// \param[in] element_bytes    size of an element
/// \param[in] max_chunk_bytes  bound, in [element_bytes, 1 GiB)
Extents chunk_shape(Extents const& dims, std::size_t element_bytes, std::uint64_t max_chunk_bytes);

/// Owns an HDF5 identifier.
class Hdf5Id {
 public:
  using Close = int (*)(std::int64_t);

  Hdf5Id() = default;
  Hdf5Id(std::int64_t id, Close close) : id_(id), close_(close) {}
  Hdf5Id(Hdf5Id&& other) noexcept;
  Hdf5Id& operator=(Hdf5Id&& other) noexcept;
  Hdf5Id(Hdf5Id const&) = delete;
  Hdf5Id& operator=(Hdf5Id const&) = delete;
  ~Hdf5Id() { close(); }

  std::int64_t get() const { return id_; }

  /// \brief Closes early; false if HDF5 reports an error.
  bool close() noexcept;

 private:
  std::int64_t id_ = -1;
  Close close_ = nullptr;
};

/// An open dataset. Must not outlive its file.
class Hdf5Dataset {
 public:
  Extents const& dims() const { return dims_; }
  Extents const& chunk() const { return chunk_; }
  Hdf5Type type() const { return type_; }

  /// \brief "file: dataset name", for messages.
  std::string const& where() const { return where_; }

  /// \brief Bytes of all chunks once written.
  std::uint64_t storage_bytes() const;

  /// \brief Reads a block in C order.
  /// \param[in]  start  first element in each dimension
  /// \param[in]  count  extent of the block in each dimension
  /// \param[out] out    elements of type(), bit for bit as in the file
  /// \throws FileError if the range leaves the dataset, a checksum differs, …
  void read(Extents const& start, Extents const& count, void* out) const;

  /// \brief Writes a block in C order.
  void write(Extents const& start, Extents const& count, void const* in);

  /// \brief Reads `count` strings of a one-dimensional dataset.
  std::vector<std::string> read_strings(std::uint64_t first, std::uint64_t count) const;

  /// \brief Writes the strings of a one-dimensional dataset from `first` on.
  void write_strings(std::uint64_t first, std::vector<std::string> const& strings);

  /// \brief Refuses a dataset of which chunks were never written (reading them would give whatever
  /// the buffer held), or, where `checksummed` is asked, one without fletcher32.
  /// \throws FileError
  void require_intact(bool checksummed) const;

  /// \brief Closes after writing, with HDF5's errors reported.
  void close();

 private:
  friend class Hdf5File;
  Hdf5Id select(Extents const& start, Extents const& count) const;
  Hdf5Id block_of(Extents const& count) const;
  std::uint64_t address_of(std::uint64_t element, std::uint64_t& run) const;

  std::string path_;
  std::string where_;
  Hdf5Id id_;
  Hdf5Type type_ = Hdf5Type::uint8;
  Extents dims_;
  Extents chunk_;
  bool checksummed_ = false;
};

/// An open HDF5 file.
class Hdf5File {
 public:
  /// \brief Creates a file, or empties an existing one, in the 1.10 format, whose metadata is
  /// checksummed.
  static Hdf5File create(std::string const& path);

  /// \brief Opens a file for reading, with file locking off.
  /// \throws FileError if the file is missing, truncated, not HDF5, still being written, or in a
  /// format older than 1.10: without checksums of its metadata, HDF5 crashes on damaged files
  static Hdf5File open(std::string const& path);

  std::string const& path() const { return path_; }

  /// \brief Whether an object of this absolute path exists.
  bool exists(std::string const& object) const;

  /// \brief Absolute paths of all datasets in byte order.
  /// \throws FileError on soft, external or circular links and named types
  std::vector<std::string> dataset_paths() const;

  /// \brief Creates a chunked dataset and its groups, checksummed unless it holds strings (HDF5
  /// cannot). Nothing is filled or allocated before it is written.
  /// \param[in] name             absolute path
  /// \param[in] type             element type
  /// \param[in] dims             extents, all positive
  /// \param[in] max_chunk_bytes  see chunk_shape
  Hdf5Dataset create_dataset(std::string const& name, Hdf5Type type, Extents const& dims,
                             std::uint64_t max_chunk_bytes = std::uint64_t{1} << 20);

  /// \brief Opens a dataset, with a cache for one chunk at least.
  /// \throws FileError naming the dataset if it is missing, of a type vpkl does not know, or has
  /// chunks of 1 GiB or more
  Hdf5Dataset open_dataset(std::string const& name) const;

  /// \brief Gives an object a second name.
  void hard_link(std::string const& existing, std::string const& name);

  /// \name Scalar attributes of an object ("/" is the file itself).
  /// \{
  void write_int64_attribute(std::string const& object, std::string const& name,
                             std::int64_t value);
  void write_uint8_attribute(std::string const& object, std::string const& name,
                             std::uint8_t value);
  void write_string_attribute(std::string const& object, std::string const& name,
                              std::string const& value);
  bool has_attribute(std::string const& object, std::string const& name) const;
  std::vector<std::string> attribute_names(std::string const& object) const;
  /// \throws FileError if missing or no integer
  std::int64_t read_integer_attribute(std::string const& object, std::string const& name) const;
  /// \throws FileError if missing or no real number
  double read_double_attribute(std::string const& object, std::string const& name) const;
  /// \throws FileError if missing or no string
  std::string read_string_attribute(std::string const& object, std::string const& name) const;
  /// \brief A string as it is, an integer in decimal.
  std::string attribute_text(std::string const& object, std::string const& name) const;
  /// \}

  /// \brief Writes everything buffered.
  void flush();

  /// \brief Closes file and datasets, with HDF5's errors reported.
  void close();

 private:
  Hdf5File(std::string path, Hdf5Id id) : path_(std::move(path)), id_(std::move(id)) {}
  Hdf5Id open_object(std::string const& object) const;
  Hdf5Id open_attribute(std::string const& object, std::string const& name) const;
  void write_attribute(std::string const& object, std::string const& name, std::int64_t type,
                       void const* value);

  std::string path_;
  Hdf5Id id_;
};

}  // namespace vpkl::impl
