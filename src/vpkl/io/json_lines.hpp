// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Result files in JSON Lines: one object a line, strict JSON, whatever the locale.
#pragma once

#include <vpkl/io/file_descriptor.hpp>

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace vpkl {

/// \brief Stores a number under `key`.
///
/// JSON has no NaN and no infinity: such a value becomes null, and `<key>_reason` says "NaN",
/// "+inf" or "-inf".
/// \param[in,out] object  JSON object
/// \param[in]     key     name of the member
/// \param[in]     value   any double
void json_number(nlohmann::json& object, std::string const& key, double value);

/// \brief Appends records to a JSON Lines file.
///
/// Makes missing directories and keeps existing records. A last line without newline, left by an
/// interrupted writer, is never merged with the next one: it is moved to `<path>.torn`, so that
/// every line of the file stays a record. Each record is one write at the file's end; a record that
/// did not fit is taken back.
class JsonLinesWriter {
 public:
  /// \brief Opens the file for appending, which also checks that it can be written.
  /// \throws FileError naming the file, also when its contents are not JSON Lines
  explicit JsonLinesWriter(std::string const& path);

  /// \brief The torn last line that was found and moved away; empty if there was none.
  std::string const& torn_line() const { return torn_line_; }

  /// \brief Appends one record.
  /// \param[in] record  JSON object
  /// \throws InvalidArgument if it is no object or holds NaN or an infinity (see json_number)
  /// \throws FileError naming the file, e.g. when the disk is full
  void write(nlohmann::json const& record);

  /// \brief Brings all records to the storage device and closes the file.
  /// \throws FileError naming the file
  void close();

 private:
  impl::FileDescriptor file_;
  std::string torn_line_;
};

/// What a JSON Lines file holds.
struct JsonLines {
  std::vector<nlohmann::json> records;  ///< one object for each complete line
  std::string torn_line;                ///< a last line without newline; empty if there is none
};

/// \brief Reads a JSON Lines file.
/// \throws FileError naming file and line number if a complete line is not a JSON object
JsonLines read_json_lines(std::string const& path);

}  // namespace vpkl
