// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Small files of the system.
#pragma once

#include <algorithm>
#include <cctype>
#include <fstream>
#include <string>

namespace vpkl::transfer {

/// \brief First line of a file; empty if it cannot be read.
inline std::string read_line(std::string const& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// \param[in] address as CUDA or NVML write it: 0000:65:00.0, in upper or lower case
inline std::string pci_folder(std::string address) {
  std::transform(address.begin(), address.end(), address.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return "/sys/bus/pci/devices/" + address;
}

}  // namespace vpkl::transfer
