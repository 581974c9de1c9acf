// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Chunk copies on several devices at once.
#pragma once

#include "../backend.hpp"

#include <string>
#include <vector>

namespace vpkl::transfer {

/// \brief PCI address as the system writes it: 0000:65:00.0.
std::string pci_address_of(int device);

/// \brief Strided copies of the work's chunk, one thread a device; each thread pins its memory on
/// its device's NUMA node where that is known. All devices start a round together. \throws what the
/// first failing thread threw
std::vector<Round> copy_together(Work const& work, std::vector<int> const& devices, int rounds);

}  // namespace vpkl::transfer
