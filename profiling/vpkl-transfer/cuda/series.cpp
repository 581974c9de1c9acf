// SPDX-License-Identifier: Apache-2.0
#include "series.hpp"

#include "../clock.hpp"

namespace vpkl::transfer {

Sample CudaSeries::transfer() {
  prepare();
  Sample sample;
  sample.seconds = seconds_of([&] { move(); });
  sample.wrong = wrong();
  return sample;
}

}  // namespace vpkl::transfer
