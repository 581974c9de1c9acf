// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Memory and streams that free themselves, on the device that is current.
#pragma once

#include <vpkl/core/cuda/check.hpp>

#include <cstddef>
#include <utility>

namespace vpkl::transfer {

/// Newly pinned host memory: not the library's pool, which would hand out old blocks.
class Pinned {
 public:
  explicit Pinned(std::size_t bytes) {
    VPKL_CHECK_CUDA(cudaHostAlloc(&data_, bytes, cudaHostAllocPortable));
  }
  ~Pinned() { (void)cudaFreeHost(data_); }
  Pinned(Pinned const&) = delete;
  Pinned& operator=(Pinned const&) = delete;
  unsigned char* data() const { return static_cast<unsigned char*>(data_); }

 private:
  void* data_ = nullptr;
};

class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes) { VPKL_CHECK_CUDA(cudaMalloc(&data_, bytes)); }
  ~DeviceBytes() { (void)cudaFree(data_); }
  DeviceBytes(DeviceBytes const&) = delete;
  DeviceBytes& operator=(DeviceBytes const&) = delete;
  unsigned char* data() const { return static_cast<unsigned char*>(data_); }

 private:
  void* data_ = nullptr;
};

class Stream {
 public:
  Stream() { VPKL_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(Stream const&) = delete;
  Stream& operator=(Stream const&) = delete;
  cudaStream_t get() const { return stream_; }
  void wait() const { VPKL_CHECK_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// A mark that knows when it was passed.
class TimedEvent {
 public:
  TimedEvent() { VPKL_CHECK_CUDA(cudaEventCreate(&event_)); }
  ~TimedEvent() { (void)cudaEventDestroy(event_); }
  TimedEvent(TimedEvent const&) = delete;
  TimedEvent& operator=(TimedEvent const&) = delete;
  void record(cudaStream_t stream) { VPKL_CHECK_CUDA(cudaEventRecord(event_, stream)); }
  bool done() const {
    cudaError_t const code = cudaEventQuery(event_);
    if (code == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    VPKL_CHECK_CUDA(code);
    return true;
  }
  double seconds_since(TimedEvent const& earlier) const {
    float milliseconds = 0;
    VPKL_CHECK_CUDA(cudaEventElapsedTime(&milliseconds, earlier.event_, event_));
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace vpkl::transfer
