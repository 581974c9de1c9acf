// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/allocate.hpp>
#include <vpkl/core/cuda/check.hpp>
#include <vpkl/core/error.hpp>

#include <fmt/format.h>

namespace vpkl::impl {

namespace cuda {

void check(cudaError_t code, char const* call) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();
  std::string const text =
      fmt::format("{} failed: {} ({})", call, cudaGetErrorString(code), cudaGetErrorName(code));
  if (code == cudaErrorMemoryAllocation) throw OutOfMemory(text);
  throw Error(text);
}

Event::~Event() {
  // Once Kokkos is gone the process may be exiting, and the driver with it.
  if (event_ && !Kokkos::is_finalized()) (void)cudaEventDestroy(event_);
}

void Event::record(cudaStream_t stream) {
  if (!event_) VPKL_CHECK_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  VPKL_CHECK_CUDA(cudaEventRecord(event_, stream));
}

void Event::order(cudaStream_t stream) const {
  if (event_) VPKL_CHECK_CUDA(cudaStreamWaitEvent(stream, event_, 0));
}

bool Event::done() const {
  if (!event_) return true;
  cudaError_t const code = cudaEventQuery(event_);
  if (code == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  VPKL_CHECK_CUDA(code);
  return true;
}

void Event::wait() const {
  if (done()) return;
  ++host_waits;
  VPKL_CHECK_CUDA(cudaEventSynchronize(event_));
}

}  // namespace cuda

std::size_t available_device_memory() {
  std::size_t available = 0, total = 0;
  VPKL_CHECK_CUDA(cudaMemGetInfo(&available, &total));
  return available;
}

}  // namespace vpkl::impl
