// SPDX-License-Identifier: Apache-2.0
#include <vpkl/io/sha256.hpp>

#include <vpkl/core/error.hpp>
#include <vpkl/io/file_descriptor.hpp>

#include <fcntl.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <vector>

namespace vpkl {
namespace {

void check(int result) {
  if (result != 1) throw Error("OpenSSL cannot compute SHA-256");
}

}  // namespace

void Sha256::Free::operator()(evp_md_ctx_st* context) const { EVP_MD_CTX_free(context); }

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  check(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr));
}

void Sha256::update(void const* data, std::size_t bytes) {
  check(EVP_DigestUpdate(context_.get(), data, bytes));
}

std::string Sha256::hex_digest() {
  std::array<unsigned char, 32> digest{};
  check(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr));
  std::string hex;
  for (unsigned const byte : digest) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

std::string sha256_file(std::string const& path) {
  return impl::sha256_file(impl::FileDescriptor(path, O_RDONLY));
}

std::string impl::sha256_file(FileDescriptor const& file) {
  Sha256 sha;
  std::vector<char> block(std::size_t{1} << 20);
  std::uint64_t const size = file.size();
  for (std::uint64_t at = 0; at < size; at += block.size()) {
    auto const bytes = static_cast<std::size_t>(std::min<std::uint64_t>(block.size(), size - at));
    file.read_at(at, block.data(), bytes);
    sha.update(block.data(), bytes);
  }
  return sha.hex_digest();
}

}  // namespace vpkl
