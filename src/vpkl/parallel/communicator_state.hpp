// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief What copies of a communicator share.
#pragma once

#include <vpkl/core/error.hpp>
#include <vpkl/parallel/communicator.hpp>

#include <fmt/format.h>

#ifdef VPKL_ENABLE_CUDA
#include <vpkl/core/cuda/pinned_pool.hpp>
#endif

namespace vpkl {

struct Communicator::State {
  State() = default;
  State(State const&) = delete;
  State& operator=(State const&) = delete;
  ~State() {
#ifdef VPKL_ENABLE_CUDA
    // The message layer may still write to the memory of a collective that missed its deadline.
    if (!alive) staging.abandon();
#endif
  }

  static void check_timeout(std::chrono::milliseconds timeout) {
    if (timeout.count() <= 0)
      throw InvalidArgument(
          fmt::format("communication time-out is {} ms, expected more than 0", timeout.count()));
  }

  void fail() noexcept {
    alive = false;
    transport->abort();
  }

  std::unique_ptr<Transport> transport;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  CommunicationCounters counters;
  bool alive = true;
#ifdef VPKL_ENABLE_CUDA
  impl::cuda::PinnedBlock staging;  ///< device messages on their way through the host
#endif
};

template <class F>
void Communicator::guarded(F&& collective) const {
  if (!state_->alive)
    throw CommunicationError(fmt::format(
        "the {} communicator is dead after an earlier failure; make a new one", transport_name()));
  try {
    collective(*state_->transport);
  } catch (CommunicationError const&) {
    state_->fail();
    throw;
  }
}

}  // namespace vpkl
