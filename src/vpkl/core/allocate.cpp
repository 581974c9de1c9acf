// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/allocate.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace vpkl {

namespace {

constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();

/// A file that holds one number; `unlimited` when it is absent or says "max".
std::size_t number_in(std::string const& path) {
  std::ifstream file(path);
  std::size_t value = 0;
  return file >> value ? value : unlimited;
}

std::size_t machine_available() {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  std::size_t kib = 0;
  while (file >> key >> kib && std::getline(file, unit))
    if (key == "MemAvailable:") return kib * 1024;
  return unlimited;
}

std::size_t left_of(std::string const& limit_file, std::string const& usage_file) {
  std::size_t const limit = number_in(limit_file), used = number_in(usage_file);
  if (limit == unlimited || used == unlimited) return unlimited;
  return limit > used ? limit - used : 0;
}

/// Path of this process's group in the unified hierarchy, or the named controller's.
std::string group_path(std::string const& controller) {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    std::size_t const first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    if (line.substr(first + 1, second - first - 1) == controller) return line.substr(second + 1);
  }
  return {};
}

}  // namespace

std::size_t available_host_memory() {
  std::size_t available = machine_available();
  // Inside a container the group's own folder is often the mount's root, so both are read.
  for (std::string const& path : {group_path(""), std::string()}) {
    std::string const folder = "/sys/fs/cgroup" + path;
    available = std::min(available, left_of(folder + "/memory.max", folder + "/memory.current"));
  }
  for (std::string const& path : {group_path("memory"), std::string()}) {
    std::string const folder = "/sys/fs/cgroup/memory" + path;
    available = std::min(
        available, left_of(folder + "/memory.limit_in_bytes", folder + "/memory.usage_in_bytes"));
  }
  return available;
}

namespace impl {

void throw_out_of_memory(std::string const& label, std::size_t bytes, bool on_host) {
  throw OutOfMemory(fmt::format(
      "{}: {} bytes requested, {} bytes of {} memory available", label, bytes,
      on_host ? available_host_memory() : available_device_memory(), on_host ? "host" : "device"));
}

#ifndef VPKL_ENABLE_CUDA
std::size_t available_device_memory() { return 0; }
#endif

}  // namespace impl

#ifndef VPKL_ENABLE_CUDA
PinnedMemoryUsage pinned_memory_usage() { return {}; }
#endif

}  // namespace vpkl
