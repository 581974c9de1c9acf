// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Pinned host memory that is kept and handed out again.
#pragma once

#include <vpkl/core/allocate.hpp>
#include <vpkl/core/cuda/check.hpp>

#include <cstddef>
#include <utility>
#include <vector>

namespace vpkl::impl::cuda {

/// A block of the pool. It may be given back while copies from or to it are queued: the next owner
/// starts after them.
class PinnedBlock {
 public:
  /// Who touches the new block first.
  enum class User {
    stream,  ///< enqueued work, after order(): the block may still be in use by earlier work
    host     ///< the host, at once: the block is idle
  };

  PinnedBlock() = default;
  /// \brief Takes at least `bytes` from the pool; nothing for 0.
  /// \throws OutOfMemory with requested and available bytes
  PinnedBlock(std::size_t bytes, User user);
  ~PinnedBlock();
  PinnedBlock(PinnedBlock&& other) noexcept { swap(other); }
  PinnedBlock& operator=(PinnedBlock&& other) noexcept {
    swap(other);
    return *this;
  }

  unsigned char* data() const { return data_; }
  std::size_t size() const { return size_; }

  /// \brief Work enqueued on `stream` from now on starts after that of earlier owners.
  void order(cudaStream_t stream) const;
  /// \brief The work enqueued on `stream` so far uses this block.
  void used_by(cudaStream_t stream);
  /// \brief As the used_by() before it, which must have named the same `stream`; one mark for both.
  void used_further_by(cudaStream_t stream);
  /// \brief The block is never handed out again: somebody else may write it at any time.
  void abandon() noexcept { data_ = nullptr; }

 private:
  friend class PinnedPool;
  void swap(PinnedBlock& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(uses_, other.uses_);
  }
  bool idle() const;

  unsigned char* data_ = nullptr;
  std::size_t size_ = 0;
  std::vector<Event> uses_;  ///< by this owner and, until they are done, by earlier ones
};

/// \brief Bytes the pool holds without an owner.
std::size_t idle_pinned_memory();

}  // namespace vpkl::impl::cuda
