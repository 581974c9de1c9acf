// SPDX-License-Identifier: Apache-2.0
#include "nvml.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

namespace vpkl::transfer {

namespace {

// The library's C interface, as its header declares it; 0 is success.
template <class... Arguments>
int call(void* library, char const* name, Arguments... arguments) {
  auto const function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
  return function ? function(arguments...) : -1;
}

}  // namespace

Nvml::Nvml(std::string const& pci_address) {
  library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (!library_) {
    missing_ = "libnvidia-ml.so.1 cannot be loaded";
    return;
  }
  int code = call(library_, "nvmlInit_v2");
  if (code == 0)
    code = call(library_, "nvmlDeviceGetHandleByPciBusId_v2", pci_address.c_str(), &device_);
  if (code != 0) missing_ = fmt::format("NVML does not know {} (code {})", pci_address, code);
}

Nvml::~Nvml() {
  // The library stays loaded: others in the process may use it.
  if (library_) call(library_, "nvmlShutdown");
}

std::string Nvml::driver_version() const {
  char text[96] = {};
  if (!missing_.empty() || call(library_, "nvmlSystemGetDriverVersion", static_cast<char*>(text),
                                static_cast<unsigned>(sizeof text)) != 0)
    return {};
  return text;
}

std::optional<unsigned> Nvml::number(char const* function) const {
  unsigned value = 0;
  if (!missing_.empty() || call(library_, function, device_, &value) != 0) return std::nullopt;
  return value;
}

std::optional<unsigned> Nvml::clock(int kind) const {
  unsigned value = 0;
  if (!missing_.empty() || call(library_, "nvmlDeviceGetClockInfo", device_, kind, &value) != 0)
    return std::nullopt;
  return value;
}

GpuState Nvml::state() const {
  GpuState state;
  state.link_generation = number("nvmlDeviceGetCurrPcieLinkGeneration");
  state.link_width = number("nvmlDeviceGetCurrPcieLinkWidth");
  state.sm_clock = clock(1);
  state.memory_clock = clock(2);
  unsigned long long reasons = 0;
  if (missing_.empty() &&
      call(library_, "nvmlDeviceGetCurrentClocksThrottleReasons", device_, &reasons) == 0)
    state.throttle_reasons = reasons;
  return state;
}

std::optional<unsigned> Nvml::largest_link_generation() const {
  return number("nvmlDeviceGetMaxPcieLinkGeneration");
}
std::optional<unsigned> Nvml::largest_link_width() const {
  return number("nvmlDeviceGetMaxPcieLinkWidth");
}

std::vector<std::string> throttle_names(std::uint64_t reasons) {
  static constexpr char const* names[] = {"gpu_idle",
                                          "applications_clocks_setting",
                                          "sw_power_cap",
                                          "hw_slowdown",
                                          "sync_boost",
                                          "sw_thermal_slowdown",
                                          "hw_thermal_slowdown",
                                          "hw_power_brake_slowdown",
                                          "display_clock_setting"};
  std::vector<std::string> set;
  for (int bit = 0; bit < 64; ++bit)
    if (reasons >> bit & 1) set.push_back(bit < 9 ? names[bit] : fmt::format("bit_{}", bit));
  return set;
}

}  // namespace vpkl::transfer
