// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/cuda/check.hpp>
#include <vpkl/divergence/gather.hpp>

namespace vpkl::impl {

HeaderLog<Kokkos::Cuda>::HeaderLog(Communicator comm, std::int64_t messages)
    : comm_(std::move(comm)),
      headers_(comm_.size() == 1
                   ? 0
                   : static_cast<std::size_t>(messages * comm_.size()) * sizeof(MessageHeader),
               cuda::PinnedBlock::User::stream) {
  errors_.reserve(static_cast<std::size_t>(messages));
}

unsigned char* HeaderLog<Kokkos::Cuda>::slot(std::size_t message) const {
  return headers_.data() + message * static_cast<std::size_t>(comm_.size()) * sizeof(MessageHeader);
}

void HeaderLog<Kokkos::Cuda>::add(Kokkos::Cuda const& exec, void const* gathered, std::size_t bytes,
                                  std::exception_ptr error) {
  cudaStream_t const stream = exec.cuda_stream();
  if (errors_.empty()) headers_.order(stream);
  // One copy a rank: messages may be further apart than a two-dimensional copy can be told.
  for (std::size_t r = 0; r < static_cast<std::size_t>(comm_.size()); ++r)
    VPKL_CHECK_CUDA(cudaMemcpyAsync(slot(errors_.size()) + r * sizeof(MessageHeader),
                                    static_cast<unsigned char const*>(gathered) + r * bytes,
                                    sizeof(MessageHeader), cudaMemcpyDeviceToHost, stream));
  headers_.used_by(stream);
  errors_.push_back(std::move(error));
}

void HeaderLog<Kokkos::Cuda>::check() const {
  for (std::size_t message = 0; message < errors_.size(); ++message)
    check_headers(comm_, slot(message), sizeof(MessageHeader), errors_[message]);
}

}  // namespace vpkl::impl
