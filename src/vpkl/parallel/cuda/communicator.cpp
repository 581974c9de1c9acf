// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/cuda/check.hpp>
#include <vpkl/core/cuda/pinned_pool.hpp>
#include <vpkl/parallel/communicator_state.hpp>
#include <vpkl/parallel/cuda/device_transport.hpp>
#include <vpkl/parallel/poll.hpp>

namespace vpkl {

namespace {

using impl::DeviceTransport;
using impl::cuda::PinnedBlock;

DeviceTransport* device_transport(Transport& transport) {
  return dynamic_cast<DeviceTransport*>(&transport);
}

/// Polls, so that a stream held up by a rank that never came cannot hold the host for ever.
void wait_for(cudaStream_t stream, std::chrono::milliseconds timeout, DeviceTransport* device) {
  ++impl::host_waits;
  bool const ended = impl::poll(
      [&] {
        cudaError_t const code = cudaStreamQuery(stream);
        if (code == cudaSuccess) return true;
        if (code != cudaErrorNotReady) impl::cuda::check(code, "cudaStreamQuery(stream)");
        (void)cudaGetLastError();
        if (device) device->check();
        return false;
      },
      timeout);
  if (!ended && device)
    throw CommunicationError(fmt::format(
        "work enqueued on the device did not end within {} ms on rank {}: another rank failed or "
        "never made the call",
        timeout.count(), device->rank()));
  if (!ended)
    throw CommunicationError(
        fmt::format("work enqueued on the device did not end within {} ms", timeout.count()));
  // A collective that was given up ends, too.
  if (device) device->check();
}

/// The staging block, at least `bytes` large, usable by the host once `stream` has been waited for.
unsigned char* grown(PinnedBlock& staging, std::size_t bytes, cudaStream_t stream) {
  if (staging.size() < bytes) staging = PinnedBlock(bytes, PinnedBlock::User::stream);
  staging.order(stream);
  return staging.data();
}

/// Device memory through the host: `collective` works on `bytes` bytes in place.
template <class F>
void staged(PinnedBlock& staging, void* data, std::size_t bytes, cudaStream_t stream,
            std::chrono::milliseconds timeout, F&& collective) {
  unsigned char* const host = grown(staging, bytes, stream);
  VPKL_CHECK_CUDA(cudaMemcpyAsync(host, data, bytes, cudaMemcpyDeviceToHost, stream));
  wait_for(stream, timeout, nullptr);
  collective(host);
  VPKL_CHECK_CUDA(cudaMemcpyAsync(data, host, bytes, cudaMemcpyHostToDevice, stream));
  staging.used_by(stream);
}

}  // namespace

bool Communicator::stays_on_device() const { return device_transport(*state_->transport); }

template <>
void const* Communicator::all_gather(Kokkos::Cuda const& exec, void const* local, void* gathered,
                                     std::size_t bytes) const {
  cudaStream_t const stream = exec.cuda_stream();
  std::size_t const all = bytes * static_cast<std::size_t>(size());
  void const* visible = nullptr;
  guarded([&](Transport& transport) {
    if (DeviceTransport* const device = device_transport(transport)) {
      device->enqueue_all_gather(stream, local, gathered, bytes, state_->timeout);
      ++state_->counters.device_collectives;
      return;
    }
    if (size() == 1) {
      if (local != gathered && bytes > 0)
        VPKL_CHECK_CUDA(cudaMemcpyAsync(gathered, local, bytes, cudaMemcpyDeviceToDevice, stream));
      return;
    }
    unsigned char* const host = grown(state_->staging, all, stream);
    unsigned char* const own = host + bytes * static_cast<std::size_t>(rank());
    if (bytes > 0)
      VPKL_CHECK_CUDA(cudaMemcpyAsync(own, local, bytes, cudaMemcpyDeviceToHost, stream));
    wait_for(stream, state_->timeout, nullptr);
    transport.all_gather(own, host, bytes, state_->timeout);
    if (bytes > 0)
      VPKL_CHECK_CUDA(cudaMemcpyAsync(gathered, host, all, cudaMemcpyHostToDevice, stream));
    state_->staging.used_by(stream);
    visible = host;
  });
  ++state_->counters.all_gathers;
  state_->counters.all_gather_bytes += static_cast<std::int64_t>(bytes);
  return visible;
}

template <>
void Communicator::all_reduce(Kokkos::Cuda const& exec, float* data, std::int64_t count,
                              Reduction reduction) const {
  if (count <= 0) return;
  cudaStream_t const stream = exec.cuda_stream();
  guarded([&](Transport& transport) {
    if (DeviceTransport* const device = device_transport(transport)) {
      device->enqueue_all_reduce(stream, data, count, reduction, state_->timeout);
      ++state_->counters.device_collectives;
    } else if (size() > 1) {
      staged(state_->staging, data, static_cast<std::size_t>(count) * sizeof(float), stream,
             state_->timeout, [&](unsigned char* host) {
               transport.all_reduce(reinterpret_cast<float*>(host), count, reduction,
                                    state_->timeout);
             });
    }
  });
  ++state_->counters.all_reduces;
}

template <>
void Communicator::broadcast(Kokkos::Cuda const& exec, void* data, std::size_t bytes,
                             int root) const {
  check_root(root);
  cudaStream_t const stream = exec.cuda_stream();
  guarded([&](Transport& transport) {
    if (DeviceTransport* const device = device_transport(transport)) {
      device->enqueue_broadcast(stream, data, bytes, root, state_->timeout);
      ++state_->counters.device_collectives;
    } else if (size() > 1 && bytes > 0) {
      staged(state_->staging, data, bytes, stream, state_->timeout,
             [&](unsigned char* host) { transport.broadcast(host, bytes, root, state_->timeout); });
    }
  });
  ++state_->counters.broadcasts;
}

template <>
void Communicator::wait(Kokkos::Cuda const& exec) const {
  try {
    wait_for(exec.cuda_stream(), state_->timeout,
             state_->alive ? device_transport(*state_->transport) : nullptr);
  } catch (CommunicationError const&) {
    if (state_->alive) state_->fail();
    throw;
  }
}

}  // namespace vpkl
