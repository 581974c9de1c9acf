// SPDX-License-Identifier: Apache-2.0
// Streams, slow kernels and patterns for tests on a CUDA device.
#pragma once

#include <vpkl/core/cuda/check.hpp>
#include <vpkl/core/element_type.hpp>
#include <vpkl/core/rows.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace vpkl::test {

/// A stream and the execution space instance on it.
class Stream {
 public:
  Stream() {
    VPKL_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    exec_ = std::make_unique<Kokkos::Cuda>(stream_);
  }
  ~Stream() {
    exec_.reset();
    (void)cudaStreamDestroy(stream_);
  }
  Stream(Stream const&) = delete;
  Stream& operator=(Stream const&) = delete;
  Kokkos::Cuda const& exec() const { return *exec_; }

 private:
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Kokkos::Cuda> exec_;  ///< one for good: the last of its copies waits as it dies
};

/// Keeps a stream busy for a number of milliseconds.
struct Spin {
  double milliseconds;
  KOKKOS_FUNCTION void operator()(int) const {
#ifdef __CUDA_ARCH__
    std::uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (static_cast<double>(now - start) < milliseconds * 1e6);
#endif
  }
};

inline void spin(Kokkos::Cuda const& exec, double milliseconds) {
  Kokkos::parallel_for("vpkl_test::spin", Kokkos::RangePolicy<Kokkos::Cuda>(exec, 0, 1),
                       Spin{milliseconds});
}

using DeviceWords = Kokkos::View<std::uint16_t*, Kokkos::CudaSpace>;

/// 16-bit words of one value, counted where they differ.
struct FillWords {
  std::uint16_t* words;
  std::uint16_t value;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const { words[i] = value; }
};
struct CountOthers {
  std::uint16_t const* words;
  std::uint16_t value;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t& others) const {
    if (words[i] != value) ++others;
  }
};

inline void fill(Kokkos::Cuda const& exec, DeviceWords const& words, std::uint16_t value) {
  Kokkos::parallel_for(
      "vpkl_test::fill",
      vpkl::impl::RangePolicy64<Kokkos::Cuda>(exec, 0, static_cast<std::int64_t>(words.size())),
      FillWords{words.data(), value});
}

/// \brief Words that are not `value`; waits.
inline std::int64_t others(Kokkos::Cuda const& exec, DeviceWords const& words,
                           std::uint16_t value) {
  std::int64_t count = 0;
  Kokkos::parallel_reduce(
      "vpkl_test::others",
      vpkl::impl::RangePolicy64<Kokkos::Cuda>(exec, 0, static_cast<std::int64_t>(words.size())),
      CountOthers{words.data(), value}, count);
  return count;
}

/// `[rows, width]` of bf16 words in device memory, each row `pitch` words apart.
inline Rows bf16_rows(DeviceWords const& words, std::int64_t rows, std::int64_t width,
                      std::int64_t pitch) {
  return {words.data(), ElementType::bf16, width, RowIndex::strided(rows, pitch)};
}

inline std::vector<std::uint16_t> on_host(DeviceWords const& words) {
  std::vector<std::uint16_t> out(words.size());
  VPKL_CHECK_CUDA(cudaMemcpy(out.data(), words.data(), out.size() * 2, cudaMemcpyDeviceToHost));
  return out;
}

inline DeviceWords on_device(std::vector<std::uint16_t> const& values) {
  DeviceWords out(Kokkos::view_alloc("vpkl_test::words", Kokkos::WithoutInitializing),
                  values.size());
  VPKL_CHECK_CUDA(cudaMemcpy(out.data(), values.data(), values.size() * 2, cudaMemcpyHostToDevice));
  // From pageable memory it returns once the data are staged, and other streams do not wait for it.
  VPKL_CHECK_CUDA(cudaDeviceSynchronize());
  return out;
}

}  // namespace vpkl::test
