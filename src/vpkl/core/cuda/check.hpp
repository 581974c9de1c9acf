// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Checks of CUDA return codes, and an event that is freed by itself.
#pragma once

#include <vpkl/core/kokkos.hpp>

#include <cuda_runtime_api.h>

#include <utility>

namespace vpkl::impl::cuda {

/// \brief Throws when `code` is no success, and clears it, so that it surfaces here and not in
/// somebody's next launch.
/// \param[in] call text of the call
/// \throws OutOfMemory for a failed allocation, else Error
void check(cudaError_t code, char const* call);

#define VPKL_CHECK_CUDA(call) ::vpkl::impl::cuda::check((call), #call)

/// A mark in a stream's work. One never recorded is done.
class Event {
 public:
  Event() = default;
  ~Event();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }

  /// \brief Marks the work enqueued on `stream` so far.
  void record(cudaStream_t stream);
  /// \brief Work enqueued on `stream` from now on starts after the marked work.
  void order(cudaStream_t stream) const;
  /// \brief Whether the marked work has ended.
  bool done() const;
  /// \brief Blocks the host until it has.
  void wait() const;

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace vpkl::impl::cuda
