// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/cuda/check.hpp>
#include <vpkl/core/cuda/pinned_pool.hpp>
#include <vpkl/parallel/communicator_state.hpp>

#include <chrono>
#include <thread>

namespace vpkl {

namespace {

using impl::cuda::PinnedBlock;

/// Polls, so that a stream held up by a rank that never came cannot hold the host for ever.
void wait_for(cudaStream_t stream, std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  ++impl::host_waits;
  auto const start = Clock::now();
  for (std::int64_t polls = 0;; ++polls) {
    cudaError_t const code = cudaStreamQuery(stream);
    if (code == cudaSuccess) return;
    if (code != cudaErrorNotReady) impl::cuda::check(code, "cudaStreamQuery(stream)");
    (void)cudaGetLastError();
    if (polls < 1000) continue;
    auto const waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
    if (waited > timeout)
      throw CommunicationError(
          fmt::format("work enqueued on the device did not end within {} ms", timeout.count()));
    // Ranks may share a core: let the others run.
    if (waited > std::chrono::milliseconds(20))
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    else
      std::this_thread::yield();
  }
}

/// The staging block, at least `bytes` large, usable by the host once `stream` has been waited for.
unsigned char* grown(PinnedBlock& staging, std::size_t bytes, cudaStream_t stream) {
  if (staging.size() < bytes) staging = PinnedBlock(bytes, PinnedBlock::User::stream);
  staging.order(stream);
  return staging.data();
}

}  // namespace

template <>
void const* Communicator::all_gather(Kokkos::Cuda const& exec, void const* local, void* gathered,
                                     std::size_t bytes) const {
  cudaStream_t const stream = exec.cuda_stream();
  std::size_t const all = bytes * static_cast<std::size_t>(size());
  void const* visible = nullptr;
  guarded([&](Transport& transport) {
    if (size() == 1) {
      if (local != gathered && bytes > 0)
        VPKL_CHECK_CUDA(cudaMemcpyAsync(gathered, local, bytes, cudaMemcpyDeviceToDevice, stream));
      return;
    }
    unsigned char* const staged = grown(state_->staging, all, stream);
    unsigned char* const own = staged + bytes * static_cast<std::size_t>(rank());
    if (bytes > 0)
      VPKL_CHECK_CUDA(cudaMemcpyAsync(own, local, bytes, cudaMemcpyDeviceToHost, stream));
    wait_for(stream, state_->timeout);
    transport.all_gather(own, staged, bytes, state_->timeout);
    if (bytes > 0)
      VPKL_CHECK_CUDA(cudaMemcpyAsync(gathered, staged, all, cudaMemcpyHostToDevice, stream));
    state_->staging.used_by(stream);
    visible = staged;
  });
  ++state_->counters.all_gathers;
  state_->counters.all_gather_bytes += static_cast<std::int64_t>(bytes);
  return visible;
}

template <>
void Communicator::all_reduce_sum(Kokkos::Cuda const& exec, float* data, std::int64_t count) const {
  cudaStream_t const stream = exec.cuda_stream();
  std::size_t const bytes = static_cast<std::size_t>(count) * sizeof(float);
  guarded([&](Transport& transport) {
    if (size() == 1 || count == 0) return;
    unsigned char* const staged = grown(state_->staging, bytes, stream);
    VPKL_CHECK_CUDA(cudaMemcpyAsync(staged, data, bytes, cudaMemcpyDeviceToHost, stream));
    wait_for(stream, state_->timeout);
    transport.all_reduce_sum(reinterpret_cast<float*>(staged), count, state_->timeout);
    VPKL_CHECK_CUDA(cudaMemcpyAsync(data, staged, bytes, cudaMemcpyHostToDevice, stream));
    state_->staging.used_by(stream);
  });
  ++state_->counters.all_reduces;
}

template <>
void Communicator::wait(Kokkos::Cuda const& exec) const {
  try {
    wait_for(exec.cuda_stream(), state_->timeout);
  } catch (CommunicationError const&) {
    state_->alive = false;
    throw;
  }
}

}  // namespace vpkl
