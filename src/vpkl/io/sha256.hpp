// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief SHA-256 of streams and files.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

struct evp_md_ctx_st;

namespace vpkl {

namespace impl {
class FileDescriptor;
}

/// \brief SHA-256 of bytes that arrive in pieces.
class Sha256 {
 public:
  Sha256();

  /// \brief Appends bytes to the message.
  void update(void const* data, std::size_t bytes);
  /// \brief Appends the text's bytes.
  void update(std::string_view text) { update(text.data(), text.size()); }

  /// \brief The digest as 64 lower-case hexadecimal digits. Ends the message: the object cannot be
  /// used again.
  std::string hex_digest();

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

/// \brief SHA-256 of a file's contents, in bounded memory.
/// \throws FileError naming the file
std::string sha256_file(std::string const& path);

namespace impl {
std::string sha256_file(FileDescriptor const& file);
}

}  // namespace vpkl
