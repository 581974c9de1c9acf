// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Reader of safetensors files.
#pragma once

#include <vpkl/core/element_type.hpp>
#include <vpkl/io/file_descriptor.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace vpkl {

/// \brief An open safetensors file.
///
/// The header is checked whole when the file is opened: lengths against the file's own size before
/// anything is allocated, and the tensors' offsets for gaps and overlaps. Reading is thread-safe.
class SafetensorsFile {
 public:
  /// One tensor of the file.
  struct Tensor {
    std::string dtype;                 ///< as written in the file: "F32", "BF16", "F16", "I64", …
    std::vector<std::uint64_t> shape;  ///< outermost dimension first
    std::uint64_t offset = 0;          ///< of its first byte in the file
    std::uint64_t bytes = 0;           ///< of all elements
  };

  /// \brief Opens and checks a file.
  /// \param[in] path             file
  /// \param[in] expected_sha256  SHA-256 of its contents in hexadecimal; empty: not checked
  /// \throws FileError naming the file and what is wrong with it
  explicit SafetensorsFile(std::string const& path, std::string const& expected_sha256 = {});

  std::string const& path() const { return file_.path(); }  ///< as given

  /// \brief All tensors by name.
  std::map<std::string, Tensor> const& tensors() const { return tensors_; }

  /// \brief Looks a tensor up.
  /// \throws FileError naming file and tensor if there is none of this name
  Tensor const& tensor(std::string const& name) const;

  /// \brief Element type of a tensor.
  /// \throws FileError if it is none of F32, BF16, F16
  ElementType element_type(std::string const& name) const;

  /// \brief Reads rows of a two-dimensional tensor.
  /// \param[in]  name       tensor of shape [R, C] and type F32, BF16 or F16
  /// \param[in]  first_row  first row to read
  /// \param[in]  rows       number of rows
  /// \param[out] out        [rows, C] elements of the tensor's type
  /// \throws FileError, InvalidArgument if the range leaves [0, R)
  void read_rows(std::string const& name, std::int64_t first_row, std::int64_t rows,
                 void* out) const;

 private:
  impl::FileDescriptor file_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace vpkl
