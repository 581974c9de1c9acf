// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/cuda/check.hpp>
#include <vpkl/divergence/gather.hpp>

#include <limits>

namespace vpkl::impl {

HeaderLog<Kokkos::Cuda>::HeaderLog(Communicator comm, std::int64_t messages)
    : comm_(std::move(comm)),
      headers_(comm_.size() > 1 && comm_.stays_on_device()
                   ? static_cast<std::size_t>(messages * comm_.size()) * sizeof(MessageHeader)
                   : 0,
               cuda::PinnedBlock::User::stream) {
  errors_.reserve(static_cast<std::size_t>(messages));
}

unsigned char* HeaderLog<Kokkos::Cuda>::slot(std::size_t message) const {
  return headers_.data() + message * static_cast<std::size_t>(comm_.size()) * sizeof(MessageHeader);
}

void HeaderLog<Kokkos::Cuda>::add(Kokkos::Cuda const& exec, void const* gathered, std::size_t bytes,
                                  std::exception_ptr error) {
  cudaStream_t const stream = exec.cuda_stream();
  bool const first = errors_.empty();
  if (first) headers_.order(stream);
  std::size_t const ranks = static_cast<std::size_t>(comm_.size()), size = sizeof(MessageHeader);
  auto const* const from = static_cast<unsigned char const*>(gathered);
  unsigned char* const to = slot(errors_.size());
  // What cudaMemcpy2D accepts as a pitch.
  if (bytes <= std::numeric_limits<std::int32_t>::max()) {
    VPKL_CHECK_CUDA(
        cudaMemcpy2DAsync(to, size, from, bytes, size, ranks, cudaMemcpyDeviceToHost, stream));
  } else {
    for (std::size_t r = 0; r < ranks; ++r)
      VPKL_CHECK_CUDA(
          cudaMemcpyAsync(to + r * size, from + r * bytes, size, cudaMemcpyDeviceToHost, stream));
  }
  if (first)
    headers_.used_by(stream);
  else
    headers_.used_further_by(stream);
  errors_.push_back(std::move(error));
}

void HeaderLog<Kokkos::Cuda>::check() const {
  for (std::size_t message = 0; message < errors_.size(); ++message)
    check_headers(comm_, slot(message), sizeof(MessageHeader), errors_[message]);
}

}  // namespace vpkl::impl
