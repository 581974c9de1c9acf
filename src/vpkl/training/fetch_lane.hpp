// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Where the next chunk is fetched while this one is computed.
#pragma once

#include <vpkl/core/kokkos.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#ifdef VPKL_ENABLE_CUDA
#include <vpkl/core/cuda/pinned_pool.hpp>
#endif

namespace vpkl::impl {

/// A chunk's way through one of `depth` buffers: fetching() .. fetched(), then computing() ..
/// computed(). On host spaces everything happens in turn, in one buffer.
template <class ExecutionSpace>
class FetchLane {
 public:
  static constexpr int depth = 1;
  explicit FetchLane(ExecutionSpace const& exec) : exec_(exec) {}
  /// \return the instance to fetch on; `buffer` may be written by what is enqueued there
  ExecutionSpace const& fetching(int) { return exec_; }
  void fetched(int) {}
  /// \brief Work enqueued on `exec` from now on may read `buffer`.
  void computing(ExecutionSpace const&, int) {}
  void computed(ExecutionSpace const&, int) {}

 private:
  ExecutionSpace exec_;
};

/// A few small arrays that go to the device in one copy, and values that come back in one.
template <class ExecutionSpace>
class SmallCopies {
 public:
  /// \brief Takes all memory, so that what comes after can not run out of it.
  /// \param[in] values bytes that values() will bring back at most
  /// \return room for `bytes` that upload() sends
  unsigned char* room(std::size_t bytes, std::size_t values) {
    (void)values;
    bytes_.resize(bytes);
    return bytes_.data();
  }
  void upload(ExecutionSpace const& exec, unsigned char* target) {
    download(exec, bytes_.data(), target, bytes_.size());
    fence(exec, "vpkl::StreamedLoss::upload");
  }
  /// \brief Enqueues the copy of device bytes; `wait` is called before they are read.
  template <class T, class Wait>
  std::vector<T> values(ExecutionSpace const& exec, T const* source, std::size_t count,
                        Wait&& wait) {
    std::vector<T> out(count);
    download(exec, reinterpret_cast<unsigned char const*>(source),
             reinterpret_cast<unsigned char*>(out.data()), count * sizeof(T));
    wait();
    return out;
  }

 private:
  static void download(ExecutionSpace const& exec, unsigned char const* from, unsigned char* to,
                       std::size_t bytes) {
    using In = Kokkos::View<unsigned char const*, Kokkos::HostSpace, Kokkos::MemoryUnmanaged>;
    using Out = Kokkos::View<unsigned char*, Kokkos::HostSpace, Kokkos::MemoryUnmanaged>;
    if (bytes > 0) Kokkos::deep_copy(exec, Out(to, bytes), In(from, bytes));
  }

  std::vector<unsigned char> bytes_;
};

#ifdef VPKL_ENABLE_CUDA

/// Two buffers, and a stream of its own.
template <>
class FetchLane<Kokkos::Cuda> {
 public:
  static constexpr int depth = 2;
  explicit FetchLane(Kokkos::Cuda const& exec);
  ~FetchLane();
  FetchLane(FetchLane const&) = delete;
  FetchLane& operator=(FetchLane const&) = delete;

  Kokkos::Cuda const& fetching(int buffer) {
    computed_[buffer].order(stream_);
    return *exec_;
  }
  void fetched(int buffer) { fetched_[buffer].record(stream_); }
  void computing(Kokkos::Cuda const& exec, int buffer) {
    fetched_[buffer].order(exec.cuda_stream());
  }
  void computed(Kokkos::Cuda const& exec, int buffer) {
    computed_[buffer].record(exec.cuda_stream());
  }

 private:
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Kokkos::Cuda> exec_;
  cuda::Event fetched_[depth], computed_[depth];
};

template <>
class SmallCopies<Kokkos::Cuda> {
 public:
  unsigned char* room(std::size_t bytes, std::size_t values) {
    bytes_ = bytes;
    up_ = cuda::PinnedBlock();
    up_ = cuda::PinnedBlock(bytes, cuda::PinnedBlock::User::host);
    down_ = cuda::PinnedBlock();
    down_ = cuda::PinnedBlock(values, cuda::PinnedBlock::User::host);
    return up_.data();
  }
  void upload(Kokkos::Cuda const& exec, unsigned char* target) {
    if (bytes_ == 0) return;
    VPKL_CHECK_CUDA(
        cudaMemcpyAsync(target, up_.data(), bytes_, cudaMemcpyHostToDevice, exec.cuda_stream()));
    up_.used_by(exec.cuda_stream());
  }
  template <class T, class Wait>
  std::vector<T> values(Kokkos::Cuda const& exec, T const* source, std::size_t count, Wait&& wait) {
    if (count > 0)
      VPKL_CHECK_CUDA(cudaMemcpyAsync(down_.data(), source, count * sizeof(T),
                                      cudaMemcpyDeviceToHost, exec.cuda_stream()));
    down_.used_by(exec.cuda_stream());
    wait();
    auto const* const first = reinterpret_cast<T const*>(down_.data());
    return {first, first + count};
  }

 private:
  cuda::PinnedBlock up_, down_;
  std::size_t bytes_ = 0;
};

#endif

}  // namespace vpkl::impl
