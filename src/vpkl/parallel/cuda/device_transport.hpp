// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief What a message layer between devices does beside one between hosts.
#pragma once

#include <vpkl/parallel/transport.hpp>

#include <cuda_runtime_api.h>

namespace vpkl::impl {

/// A transport that also carries device memory. Its collectives are enqueued: ordered after the
/// work on `stream`, before what follows there, and not waited for. `timeout` bounds what the host
/// has to wait for until a collective is enqueued, such as connections at first use.
class DeviceTransport : public Transport {
 public:
  virtual void enqueue_all_gather(cudaStream_t stream, void const* local, void* gathered,
                                  std::size_t bytes, std::chrono::milliseconds timeout) = 0;
  virtual void enqueue_all_reduce(cudaStream_t stream, float* data, std::int64_t count,
                                  Reduction reduction, std::chrono::milliseconds timeout) = 0;
  virtual void enqueue_broadcast(cudaStream_t stream, void* data, std::size_t bytes, int root,
                                 std::chrono::milliseconds timeout) = 0;

  /// \throws CommunicationError once the layer has noticed that something enqueued has failed
  virtual void check() = 0;
};

}  // namespace vpkl::impl
