// SPDX-License-Identifier: Apache-2.0
#include "numa.hpp"

#include "sysfs.hpp"

#include <vpkl/core/error.hpp>

#include <fmt/format.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <sstream>

namespace vpkl::transfer {

namespace {

// Of <numaif.h>, which not every system has.
constexpr int prefer_node = 1;

/// "0-3,8" as numbers.
std::vector<int> number_list(std::string const& text) {
  std::vector<int> numbers;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    int first = 0, last = 0;
    int const found = std::sscanf(part.c_str(), "%d-%d", &first, &last);
    if (found < 1) continue;
    if (found == 1) last = first;
    for (int n = first; n <= last; ++n)
      numbers.push_back(n);
  }
  return numbers;
}

}  // namespace

std::vector<int> numa_nodes() { return number_list(read_line("/sys/devices/system/node/online")); }

std::vector<int> cpus_of_node(int node) {
  return number_list(read_line(fmt::format("/sys/devices/system/node/node{}/cpulist", node)));
}

int node_of_page(void* address) {
  void* pages[] = {address};
  int status[] = {-1};
  // Without target nodes the call only asks.
  if (syscall(SYS_move_pages, 0, 1ul, pages, nullptr, status, 0) != 0) return -1;
  return std::max(status[0], -1);
}

int node_of_this_thread() {
  unsigned cpu = 0, node = 0;
  return syscall(SYS_getcpu, &cpu, &node, nullptr) == 0 ? static_cast<int>(node) : -1;
}

void bind_to_node(int node) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int const cpu : cpus_of_node(node))
    CPU_SET(cpu, &set);
  if (sched_setaffinity(0, sizeof set, &set) != 0)
    throw Error(
        fmt::format("--numa-node {}: its CPUs cannot be used: {}", node, std::strerror(errno)));
  std::array<unsigned long, 16> mask{};
  constexpr std::size_t bits = 8 * sizeof mask[0];
  mask[static_cast<std::size_t>(node) / bits] |= 1ul << (static_cast<std::size_t>(node) % bits);
  if (syscall(SYS_set_mempolicy, prefer_node, mask.data(), mask.size() * bits) != 0)
    throw Error(
        fmt::format("--numa-node {}: its memory cannot be used: {}", node, std::strerror(errno)));
}

int node_of_pci(std::string const& address) {
  std::string const text = read_line(pci_folder(address) + "/numa_node");
  return text.empty() ? -1 : std::atoi(text.c_str());
}

}  // namespace vpkl::transfer
