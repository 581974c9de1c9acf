// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/cuda/pinned_pool.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <mutex>

namespace vpkl {

namespace impl::cuda {

/// Blocks without an owner, by size. Never destroyed: Kokkos' finalize hook empties it, and what
/// is given back later is left to the process's end.
class PinnedPool {
 public:
  static PinnedPool& get() {
    static PinnedPool& pool = *new PinnedPool;
    return pool;
  }

  PinnedBlock take(std::size_t bytes, PinnedBlock::User user) {
    std::lock_guard<std::mutex> const lock(mutex_);
    auto const fits = [&](PinnedBlock const& block) {
      // A block much too large would be missed by the next owner that needs all of it.
      return block.size_ >= bytes && block.size_ / 2 <= std::max(bytes, smallest) &&
             (user == PinnedBlock::User::stream || block.idle());
    };
    auto found = std::find_if(blocks_.begin(), blocks_.end(), fits);
    PinnedBlock block;
    if (found != blocks_.end()) {
      block = std::move(*found);
      blocks_.erase(found);
    } else {
      block = pin(rounded(bytes));
    }
    usage_.in_use += block.size_;
    usage_.high_water = std::max(usage_.high_water, usage_.in_use);
    return block;
  }

  void give_back(PinnedBlock block) noexcept {
    std::lock_guard<std::mutex> const lock(mutex_);
    usage_.in_use -= block.size_;
    if (closed_) {
      block.abandon();
      return;
    }
    try {
      auto const at = std::lower_bound(
          blocks_.begin(), blocks_.end(), block,
          [](PinnedBlock const& a, PinnedBlock const& b) { return a.size_ < b.size_; });
      blocks_.insert(at, std::move(block));
    } catch (...) {
      block.abandon();
    }
  }

  std::size_t idle_bytes() {
    std::lock_guard<std::mutex> const lock(mutex_);
    return usage_.bytes - usage_.in_use;
  }

  PinnedMemoryUsage usage() {
    std::lock_guard<std::mutex> const lock(mutex_);
    return usage_;
  }

 private:
  static constexpr std::size_t smallest = 4096;

  PinnedPool() {
    Kokkos::push_finalize_hook([this] {
      std::lock_guard<std::mutex> const lock(mutex_);
      unpin_all();
      closed_ = true;
    });
  }

  /// At most a thirty-second more, so that nearly equal sizes share blocks.
  static std::size_t rounded(std::size_t bytes) {
    std::size_t unit = smallest;
    while (unit <= bytes / 64)
      unit *= 2;
    return (bytes + unit - 1) / unit * unit;
  }

  PinnedBlock pin(std::size_t bytes) {
    PinnedBlock block;
    // Memory that is only reserved would be found missing by the kernel's killer, not by us.
    if (bytes > available_host_memory()) unpin_all();
    void* data = nullptr;
    cudaError_t code = cudaErrorMemoryAllocation;
    if (bytes <= available_host_memory()) {
      code = cudaHostAlloc(&data, bytes, cudaHostAllocPortable);
      if (code != cudaSuccess && !blocks_.empty()) {
        unpin_all();
        code = cudaHostAlloc(&data, bytes, cudaHostAllocPortable);
      }
    }
    if (code != cudaSuccess) {
      (void)cudaGetLastError();
      throw OutOfMemory(
          fmt::format("pinned host memory: {} bytes requested, {} bytes available; "
                      "cudaHostAlloc: {}",
                      bytes, available_host_memory(), cudaGetErrorString(code)));
    }
    block.data_ = static_cast<unsigned char*>(data);
    block.size_ = bytes;
    usage_.bytes += bytes;
    ++usage_.allocations;
    return block;
  }

  void unpin_all() {
    for (PinnedBlock& block : blocks_) {
      usage_.bytes -= block.size_;
      // Waits for the device where the block is still in use.
      cudaError_t const code = cudaFreeHost(block.data_);
      if (code != cudaSuccess) (void)cudaGetLastError();
      block.data_ = nullptr;
    }
    blocks_.clear();
  }

  std::mutex mutex_;
  std::vector<PinnedBlock> blocks_;  ///< ascending size
  PinnedMemoryUsage usage_;
  bool closed_ = false;
};

PinnedBlock::PinnedBlock(std::size_t bytes, User user) {
  if (bytes > 0) *this = PinnedPool::get().take(bytes, user);
}

PinnedBlock::~PinnedBlock() {
  if (data_) PinnedPool::get().give_back(std::move(*this));
}

void PinnedBlock::order(cudaStream_t stream) const {
  for (Event const& use : uses_)
    use.order(stream);
}

void PinnedBlock::used_by(cudaStream_t stream) {
  if (!data_) return;
  uses_.erase(
      std::remove_if(uses_.begin(), uses_.end(), [](Event const& use) { return use.done(); }),
      uses_.end());
  uses_.emplace_back();
  uses_.back().record(stream);
}

void PinnedBlock::used_further_by(cudaStream_t stream) {
  if (data_) uses_.back().record(stream);
}

bool PinnedBlock::idle() const {
  return std::all_of(uses_.begin(), uses_.end(), [](Event const& use) { return use.done(); });
}

std::size_t idle_pinned_memory() { return PinnedPool::get().idle_bytes(); }

}  // namespace impl::cuda

PinnedMemoryUsage pinned_memory_usage() { return impl::cuda::PinnedPool::get().usage(); }

}  // namespace vpkl
