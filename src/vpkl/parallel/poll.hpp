// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Waiting that ends.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

namespace vpkl::impl {

/// \brief Calls `done` until it returns true.
/// \return false when `timeout` passes first
template <class Done>
bool poll(Done&& done, std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  auto const start = Clock::now();
  for (std::int64_t polls = 0;; ++polls) {
    if (done()) return true;
    if (polls < 1000) continue;
    auto const waited = Clock::now() - start;
    if (waited > timeout) return false;
    // Ranks may share a core: let the others run.
    if (polls % 64 == 0 && waited > std::chrono::milliseconds(20))
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    else
      std::this_thread::yield();
  }
}

}  // namespace vpkl::impl
