// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Seconds that a call takes.
#pragma once

#include <chrono>

namespace vpkl::transfer {

template <class F>
double seconds_of(F&& f) {
  auto const start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace vpkl::transfer
