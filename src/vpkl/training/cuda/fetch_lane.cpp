// SPDX-License-Identifier: Apache-2.0
#include <vpkl/training/fetch_lane.hpp>

#include <memory>

namespace vpkl::impl {

FetchLane<Kokkos::Cuda>::FetchLane(Kokkos::Cuda const&) {
  // Not ordered with the default stream: nothing here depends on it.
  VPKL_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  exec_ = std::make_unique<Kokkos::Cuda>(stream_);
}

FetchLane<Kokkos::Cuda>::~FetchLane() {
  if (Kokkos::is_finalized()) return;
  exec_.reset();
  (void)cudaStreamDestroy(stream_);  // after its work, without waiting
}

}  // namespace vpkl::impl
