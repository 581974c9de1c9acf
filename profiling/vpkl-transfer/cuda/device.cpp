// SPDX-License-Identifier: Apache-2.0
#include "../backend.hpp"
#include "../clock.hpp"
#include "../numa.hpp"
#include "../pages.hpp"
#include "all_gpus.hpp"
#include "attribution.hpp"
#include "kernels.hpp"
#include "series.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace vpkl::transfer {

namespace {

constexpr std::int64_t busy_bytes = std::int64_t(256) << 20;

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

/// Kokkos runs while this lives.
struct KokkosScope {
  KokkosScope() { Kokkos::initialize(); }
  ~KokkosScope() { Kokkos::finalize(); }
  KokkosScope(KokkosScope const&) = delete;
  KokkosScope& operator=(KokkosScope const&) = delete;
};

class CudaDevice final : public Device {
 public:
  CudaDevice() : exec_(stream_.get()) { VPKL_CHECK_CUDA(cudaGetDevice(&number_)); }

  std::unique_ptr<Series> open(Work const& work) override {
    busy_passes_ = 0;
    return work.direction == Direction::h2d ? open_h2d(exec_, work) : open_d2h(exec_, work);
  }

  nlohmann::json describe() const override {
    cudaDeviceProp properties{};
    VPKL_CHECK_CUDA(cudaGetDeviceProperties(&properties, number_));
    int runtime = 0, driver = 0;
    VPKL_CHECK_CUDA(cudaRuntimeGetVersion(&runtime));
    VPKL_CHECK_CUDA(cudaDriverGetVersion(&driver));
    return {{"name", properties.name},
            {"number", number_},
            {"devices", devices()},
            {"runtime_version", version_text(runtime)},
            {"driver_api_version", version_text(driver)},
            {"memory_bytes", properties.totalGlobalMem},
            {"multiprocessors", properties.multiProcessorCount},
            {"copy_engines", properties.asyncEngineCount},
            {"compute_capability", fmt::format("{}.{}", properties.major, properties.minor)}};
  }

  std::string pci_address() const override { return pci_address_of(number_); }

  int numa_node_of_pinned() override {
    Pinned const memory(1 << 20);
    std::memset(memory.data(), 1, 1 << 20);
    int const node = node_of_page(memory.data());
    // Where the kernel does not tell about a driver's pages: drivers take them from the caller's
    // node.
    return node >= 0 ? node : node_of_this_thread();
  }

  std::pair<double, double> pinning(std::size_t bytes) override {
    require_host_memory("pinned tensor", bytes);
    std::unique_ptr<Pinned> memory;
    double const pin = seconds_of([&] { memory = std::make_unique<Pinned>(bytes); });
    return {pin, seconds_of([&] { memory.reset(); })};
  }

  SizeSample size_sample(std::size_t bytes, bool pinned, Direction direction) override {
    std::int64_t const size = static_cast<std::int64_t>(bytes);
    bool const up = direction == Direction::h2d;
    require_host_memory("host buffer", bytes);
    DeviceBytes const device(bytes);
    std::unique_ptr<Pinned> locked;
    std::unique_ptr<Pages> loose;
    SizeSample sample;
    sample.allocate_seconds = seconds_of([&] {
      if (pinned)
        locked = std::make_unique<Pinned>(bytes);
      else
        loose = std::make_unique<Pages>(bytes);
    });
    unsigned char* const host = pinned ? locked->data() : loose->data();
    if (up)
      fill_pattern(host, size, 0);
    else
      fill_pattern(stream_.get(), device.data(), size, 0);
    stream_.wait();
    sample.seconds = seconds_of([&] {
      if (up)
        VPKL_CHECK_CUDA(
            cudaMemcpyAsync(device.data(), host, bytes, cudaMemcpyHostToDevice, stream_.get()));
      else
        VPKL_CHECK_CUDA(
            cudaMemcpyAsync(host, device.data(), bytes, cudaMemcpyDeviceToHost, stream_.get()));
      stream_.wait();
    });
    if (!up) {
      // Judged on the device as well, where that takes a moment only.
      VPKL_CHECK_CUDA(cudaMemsetAsync(device.data(), 0xa5, bytes, stream_.get()));
      VPKL_CHECK_CUDA(
          cudaMemcpyAsync(device.data(), host, bytes, cudaMemcpyHostToDevice, stream_.get()));
    }
    sample.wrong = wrong_elements(stream_.get(), device.data(), {0}, size, 1);
    return sample;
  }

  Disturbed disturbed(Series& opened) override {
    auto& series = static_cast<CudaSeries&>(opened);
    if (busy_passes_ == 0) calibrate(series);
    Disturbed result;
    result.kernel_alone_seconds = busy_alone_;
    series.prepare();
    TimedEvent begin, end;
    begin.record(other_.get());
    keep_busy(other_.get(), busy_->data(), busy_bytes, busy_passes_);
    end.record(other_.get());
    while (!begin.done()) {
    }
    result.sample.seconds = seconds_of([&] { series.move(); });
    result.covered = !end.done();
    other_.wait();
    result.kernel_seconds = end.seconds_since(begin);
    result.sample.wrong = series.wrong();
    return result;
  }

  std::vector<Traffic> attribute(Series& opened) override {
    auto& series = static_cast<CudaSeries&>(opened);
    series.prepare();
    return attributed([&] { series.move(); });
  }

  std::string attribution_waived() const override { return why_no_attribution(); }

  int devices() const override {
    int count = 0;
    VPKL_CHECK_CUDA(cudaGetDeviceCount(&count));
    return count;
  }

  std::vector<Round> together(Work const& work, std::vector<int> const& devices,
                              int rounds) override {
    return copy_together(work, devices, rounds);
  }

 private:
  /// Passes that last twice as long as a transfer, and how long they take alone.
  void calibrate(CudaSeries& series) {
    if (!busy_) busy_ = std::make_unique<DeviceBytes>(static_cast<std::size_t>(busy_bytes));
    series.prepare();
    double const transfer = seconds_of([&] { series.move(); });
    constexpr std::int64_t few = 8;
    (void)busy_seconds(few);
    double const pass = busy_seconds(few) / static_cast<double>(few);
    busy_passes_ = std::max<std::int64_t>(few, static_cast<std::int64_t>(2 * transfer / pass) + 1);
    busy_alone_ = busy_seconds(busy_passes_);
  }

  double busy_seconds(std::int64_t passes) {
    TimedEvent begin, end;
    begin.record(other_.get());
    keep_busy(other_.get(), busy_->data(), busy_bytes, passes);
    end.record(other_.get());
    other_.wait();
    return end.seconds_since(begin);
  }

  KokkosScope kokkos_;  // ends after all below
  Stream stream_, other_;
  Kokkos::Cuda exec_;
  int number_ = 0;
  std::unique_ptr<DeviceBytes> busy_;
  std::int64_t busy_passes_ = 0;  ///< 0: of another series
  double busy_alone_ = 0;
};

}  // namespace

std::unique_ptr<Device> make_device(std::string& why_none) {
  int count = 0;
  cudaError_t const code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    why_none = fmt::format("needs a CUDA device: {}",
                           code == cudaSuccess ? "there is none" : cudaGetErrorString(code));
    return nullptr;
  }
  return std::make_unique<CudaDevice>();
}

}  // namespace vpkl::transfer
