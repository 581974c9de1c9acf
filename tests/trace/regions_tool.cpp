// SPDX-License-Identifier: Apache-2.0
// A Kokkos Tools library: writes the regions of a process to "$VPKL_REGIONS_FILE.<process id>", one
// line each, indented by their depth.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

namespace {

std::string lines;
int depth = 0;

}  // namespace

extern "C" void kokkosp_init_library(int, std::uint64_t, std::uint32_t, void*) {}

extern "C" void kokkosp_push_profile_region(char const* name) {
  lines += std::string(static_cast<std::size_t>(depth++), ' ') + name + '\n';
}

extern "C" void kokkosp_pop_profile_region() {
  // Nothing may close that did not open; the reader sees it.
  if (--depth < 0) lines += "pop without a push\n";
}

extern "C" void kokkosp_finalize_library() {
  char const* const path = std::getenv("VPKL_REGIONS_FILE");
  if (!path) return;
  if (depth != 0) lines += "regions left open\n";
  std::ofstream(std::string(path) + "." + std::to_string(getpid())) << lines;
}
