// SPDX-License-Identifier: Apache-2.0
#include "device_watch.hpp"

#include "numa.hpp"
#include "sysfs.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>

namespace vpkl::transfer {

namespace {

constexpr std::chrono::milliseconds interval(3);

/// Generation of a link that sysfs calls "32.0 GT/s PCIe"; 0 if unknown.
unsigned generation_of(std::string const& speed) {
  double const transfers = std::strtod(speed.c_str(), nullptr);
  constexpr double of_generation[] = {2.5, 5, 8, 16, 32, 64};
  for (unsigned g = 0; g < 6; ++g)
    if (transfers == of_generation[g]) return g + 1;
  return 0;
}

nlohmann::json or_null(unsigned value) { return value ? nlohmann::json(value) : nlohmann::json(); }

}  // namespace

double link_gigabytes_per_second(unsigned generation, unsigned width) {
  constexpr double of_lane[] = {
      0, 2.5 * 0.8, 5 * 0.8, 8 * 128.0 / 130, 16 * 128.0 / 130, 32 * 128.0 / 130, 64 * 242.0 / 256};
  return generation < 7 ? of_lane[generation] * width / 8 : 0;
}

DeviceWatch::DeviceWatch(std::string pci_address)
    : pci_address_(std::move(pci_address)), nvml_(pci_address_) {}

DeviceWatch::~DeviceWatch() {
  watching_ = false;
  if (thread_.joinable()) thread_.join();
}

nlohmann::json DeviceWatch::describe() const {
  std::string const folder = pci_folder(pci_address_);
  unsigned const generation = nvml_.largest_link_generation().value_or(
      generation_of(read_line(folder + "/max_link_speed")));
  unsigned const width = nvml_.largest_link_width().value_or(
      static_cast<unsigned>(std::max(0, std::atoi(read_line(folder + "/max_link_width").c_str()))));
  double const limit = link_gigabytes_per_second(generation, width);
  int const node = node_of_pci(pci_address_);
  std::string const driver = nvml_.driver_version();
  nlohmann::json object = {
      {"pci_address", pci_address_},
      {"driver", driver.empty() ? nlohmann::json() : nlohmann::json(driver)},
      {"numa_node", node < 0 ? nlohmann::json() : nlohmann::json(node)},
      {"largest_link_generation", or_null(generation)},
      {"largest_link_width", or_null(width)},
      {"link_gigabytes_per_second", limit > 0 ? nlohmann::json(limit) : nlohmann::json()}};
  if (node < 0) object["numa_node_reason"] = "the system does not tell the GPU's node";
  if (!nvml_.missing().empty()) object["nvml_reason"] = nvml_.missing();
  return object;
}

void DeviceWatch::start() {
  // What was watched before may have ended in an exception.
  if (thread_.joinable()) stop();
  seen_.clear();
  watching_ = true;
  thread_ = std::thread([this] {
    do {
      look();
      std::this_thread::sleep_for(interval);
    } while (watching_);
  });
}

void DeviceWatch::look() {
  GpuState state = nvml_.state();
  if (!state.link_generation) {
    std::string const folder = pci_folder(pci_address_);
    unsigned const generation = generation_of(read_line(folder + "/current_link_speed"));
    int const width = std::atoi(read_line(folder + "/current_link_width").c_str());
    if (generation > 0) state.link_generation = generation;
    if (width > 0) state.link_width = static_cast<unsigned>(width);
  }
  seen_.push_back(state);
}

nlohmann::json DeviceWatch::stop() {
  watching_ = false;
  thread_.join();
  std::uint64_t reasons = 0;
  nlohmann::json object = nlohmann::json::object();
  auto const extremes = [&](char const* low, char const* high,
                            std::optional<unsigned> GpuState::*member) {
    std::vector<unsigned> values;
    for (GpuState const& state : seen_)
      if (state.*member) values.push_back(*(state.*member));
    if (low) object[low] = nullptr;
    object[high] = nullptr;
    if (values.empty()) return;
    auto const [least, most] = std::minmax_element(values.begin(), values.end());
    if (low) object[low] = *least;
    object[high] = *most;
  };
  // An idle link sleeps at a lower speed: the highest is the one under load.
  extremes(nullptr, "link_generation", &GpuState::link_generation);
  extremes(nullptr, "link_width", &GpuState::link_width);
  extremes("sm_clock_lowest_mhz", "sm_clock_highest_mhz", &GpuState::sm_clock);
  extremes("memory_clock_lowest_mhz", "memory_clock_highest_mhz", &GpuState::memory_clock);
  for (GpuState const& state : seen_)
    reasons |= state.throttle_reasons;
  object["throttle_reasons"] = throttle_names(reasons);
  return object;
}

}  // namespace vpkl::transfer
