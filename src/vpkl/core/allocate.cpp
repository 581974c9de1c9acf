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

/// Sum of the named entries of a group's memory.stat.
std::size_t entries_of(std::string const& path, std::string const& first,
                       std::string const& second) {
  std::ifstream file(path);
  std::string key;
  std::size_t value = 0, sum = 0;
  while (file >> key >> value)
    if (key == first || key == second) sum += value;
  return sum;
}

/// What a group may still take; the file cache it holds is given back under pressure.
std::size_t left_of(std::size_t limit, std::size_t used, std::size_t cache) {
  if (limit == unlimited || used == unlimited) return unlimited;
  used = used > cache ? used - cache : 0;
  return limit > used ? limit - used : 0;
}

std::size_t left_of_group_v2(std::string const& folder) {
  return left_of(number_in(folder + "/memory.max"), number_in(folder + "/memory.current"),
                 entries_of(folder + "/memory.stat", "inactive_file", "active_file"));
}

std::size_t left_of_group_v1(std::string const& folder) {
  return left_of(number_in(folder + "/memory.limit_in_bytes"),
                 number_in(folder + "/memory.usage_in_bytes"),
                 entries_of(folder + "/memory.stat", "total_inactive_file", "total_active_file"));
}

/// Least of a group and all groups above it. Inside a container the group's own folder is often the
/// mount's root, which comes last.
template <class Left>
std::size_t least_up(std::string const& mount, std::string path, Left&& left) {
  std::size_t least = unlimited;
  while (true) {
    least = std::min(least, left(mount + path));
    if (path.empty()) return least;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
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
  return std::min({machine_available(),
                   least_up("/sys/fs/cgroup", group_path(""), left_of_group_v2),
                   least_up("/sys/fs/cgroup/memory", group_path("memory"), left_of_group_v1)});
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
