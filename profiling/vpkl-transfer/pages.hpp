// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Pageable memory that nobody has touched.
#pragma once

#include <vpkl/core/allocate.hpp>
#include <vpkl/core/error.hpp>

#include <fmt/format.h>
#include <sys/mman.h>

#include <cstddef>

namespace vpkl::transfer {

/// \brief To be asked off the clock: the answer takes longer than a small allocation.
/// \throws OutOfMemory
inline void require_host_memory(char const* what, std::size_t bytes) {
  std::size_t const available = available_host_memory();
  if (bytes > available)
    throw OutOfMemory(
        fmt::format("{}: {} bytes requested, {} bytes available", what, bytes, available));
}

/// Anonymous pages straight from the system: fresh means that none has been touched, which an
/// allocator that reuses memory would not promise.
class Pages {
 public:
  explicit Pages(std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    void* const data =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
      throw OutOfMemory(fmt::format("host buffer: {} bytes requested, {} bytes available", bytes,
                                    available_host_memory()));
    data_ = static_cast<unsigned char*>(data);
  }
  ~Pages() {
    if (data_) munmap(data_, bytes_);
  }
  Pages(Pages const&) = delete;
  Pages& operator=(Pages const&) = delete;
  unsigned char* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  unsigned char* data_ = nullptr;
  std::size_t bytes_;
};

}  // namespace vpkl::transfer
