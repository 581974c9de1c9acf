// SPDX-License-Identifier: Apache-2.0
#include "../backend.hpp"

namespace vpkl::transfer {

std::unique_ptr<Device> make_device(std::string& why_none) {
  why_none = "needs a CUDA device, and this is a CPU build";
  return nullptr;
}

}  // namespace vpkl::transfer
