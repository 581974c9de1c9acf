// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief The few questions asked of NVIDIA's management library, loaded where it exists.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace vpkl::transfer {

/// What a GPU is doing now; a member is empty where the library does not answer.
struct GpuState {
  std::optional<unsigned> link_generation, link_width, sm_clock, memory_clock;  ///< clocks: MHz
  std::uint64_t throttle_reasons = 0;
};

/// One GPU as libnvidia-ml knows it.
class Nvml {
 public:
  /// \param[in] pci_address of the GPU
  explicit Nvml(std::string const& pci_address);
  ~Nvml();
  Nvml(Nvml const&) = delete;
  Nvml& operator=(Nvml const&) = delete;

  /// \brief Why nothing is known; empty when the library answers.
  std::string const& missing() const { return missing_; }
  std::string driver_version() const;
  GpuState state() const;
  std::optional<unsigned> largest_link_generation() const;
  std::optional<unsigned> largest_link_width() const;

 private:
  std::optional<unsigned> number(char const* function) const;
  std::optional<unsigned> clock(int kind) const;

  std::string missing_;
  void* library_ = nullptr;
  void* device_ = nullptr;
};

/// \brief Names of the set bits.
std::vector<std::string> throttle_names(std::uint64_t reasons);

}  // namespace vpkl::transfer
