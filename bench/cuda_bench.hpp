// SPDX-License-Identifier: Apache-2.0
// What benchmarks on a CUDA device share: event timing, data, limits of the machine, provenance.
#pragma once

#include <vpkl/config.hpp>
#include <vpkl/core/allocate.hpp>
#include <vpkl/core/cuda/check.hpp>
#include <vpkl/core/element_type.hpp>

#include <benchmark/benchmark.h>

#include <cuda_runtime_api.h>
#include <Kokkos_Core.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace vpkl::bench {

using Exec = Kokkos::Cuda;

/// \brief Median of samples.
inline double median(std::vector<double> samples) {
  auto const middle = samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2);
  std::nth_element(samples.begin(), middle, samples.end());
  return *middle;
}

/// Milliseconds of the work that `f` enqueues on the instance's stream.
class Timer {
 public:
  Timer() {
    VPKL_CHECK_CUDA(cudaEventCreate(&begin_));
    VPKL_CHECK_CUDA(cudaEventCreate(&end_));
  }
  ~Timer() {
    (void)cudaEventDestroy(begin_);
    (void)cudaEventDestroy(end_);
  }
  Timer(Timer const&) = delete;
  Timer& operator=(Timer const&) = delete;

  template <class F>
  double milliseconds(cudaStream_t stream, F&& f) {
    VPKL_CHECK_CUDA(cudaEventRecord(begin_, stream));
    f();
    VPKL_CHECK_CUDA(cudaEventRecord(end_, stream));
    VPKL_CHECK_CUDA(cudaEventSynchronize(end_));
    float ms = 0;
    VPKL_CHECK_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return ms;
  }

 private:
  cudaEvent_t begin_, end_;
};

/// Pseudo-random logits, about normal with deviation 2; seeded by position.
template <class T>
struct FillLogits {
  T* to;
  std::uint64_t seed;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    std::uint64_t x = (static_cast<std::uint64_t>(i) + seed) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9ull;
    x ^= x >> 29;
    float const sum =
        static_cast<float>((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48));
    to[i] = ElementTraits<T>::from_float((sum - 131070.0f) * (2.0f / 37837.0f));
  }
};

/// Bytes a second, read and written, of a device-to-device copy of 1 GiB.
inline double copy_bandwidth() {
  static double const measured = [] {
    Exec const exec;
    std::size_t const bytes = std::size_t(1) << 30;
    ByteView<Exec> from("vpkl_bench::from", bytes), to("vpkl_bench::to", bytes);
    Timer timer;
    std::vector<double> times;
    for (int i = 0; i < 12; ++i)
      times.push_back(timer.milliseconds(exec.cuda_stream(), [&] {
        VPKL_CHECK_CUDA(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice,
                                        exec.cuda_stream()));
      }));
    times.erase(times.begin(), times.begin() + 2);
    return 2.0 * static_cast<double>(bytes) / (median(times) * 1e-3);
  }();
  return measured;
}

inline void add_context() {
  int device = 0, driver = 0, runtime = 0;
  cudaDeviceProp properties;
  VPKL_CHECK_CUDA(cudaGetDevice(&device));
  VPKL_CHECK_CUDA(cudaGetDeviceProperties(&properties, device));
  VPKL_CHECK_CUDA(cudaDriverGetVersion(&driver));
  VPKL_CHECK_CUDA(cudaRuntimeGetVersion(&runtime));
  benchmark::AddCustomContext("vpkl", VPKL_VERSION_STRING);
  benchmark::AddCustomContext("kokkos", std::to_string(KOKKOS_VERSION));
  benchmark::AddCustomContext("gpu", properties.name);
  benchmark::AddCustomContext("cuda_driver", std::to_string(driver));
  benchmark::AddCustomContext("cuda_runtime", std::to_string(runtime));
}

}  // namespace vpkl::bench
