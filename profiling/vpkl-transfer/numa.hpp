// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Memory nodes: which there are, where a page lies, where a process runs.
#pragma once

#include <string>
#include <vector>

namespace vpkl::transfer {

std::vector<int> numa_nodes();
/// \brief CPUs of a node; empty for one that does not exist.
std::vector<int> cpus_of_node(int node);
/// \brief Node of the page at `address`, or -1 where the system does not tell.
int node_of_page(void* address);
/// \brief Node of the CPU that this thread runs on, or -1.
int node_of_this_thread();
/// \brief This thread, and threads it starts, run on the node's CPUs and take memory from it.
/// \throws Error
void bind_to_node(int node);
/// \brief Node of a PCI device, or -1.
int node_of_pci(std::string const& address);

}  // namespace vpkl::transfer
