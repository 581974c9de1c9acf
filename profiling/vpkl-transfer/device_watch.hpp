// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief PCIe link, clocks and throttle reasons of a GPU while something is measured.
#pragma once

#include "nvml.hpp"

#include <nlohmann/json.hpp>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace vpkl::transfer {

class DeviceWatch {
 public:
  explicit DeviceWatch(std::string pci_address);
  ~DeviceWatch();

  /// \brief Driver, NUMA node and the best link of the GPU; `null` and a reason where unknown.
  nlohmann::json describe() const;

  /// \brief Looks every few milliseconds until stop().
  void start();
  /// \brief The widest link, lowest and highest clocks and all throttle reasons since start().
  nlohmann::json stop();

 private:
  void look();

  std::string pci_address_;
  Nvml nvml_;
  std::atomic<bool> watching_{false};
  std::thread thread_;
  std::vector<GpuState> seen_;
};

/// \brief Payload of a PCIe link in 1e9 bytes a second, encoding taken off; 0 if unknown.
double link_gigabytes_per_second(unsigned generation, unsigned width);

}  // namespace vpkl::transfer
