// SPDX-License-Identifier: Apache-2.0
// features VERSION [FEATURE...]: whether the header's version and feature macros are these.
#include <vpkl/config.hpp>

#include <cstdio>
#include <string>

int main(int argc, char** argv) {
  std::string const numbers = std::to_string(VPKL_VERSION_MAJOR) + '.' +
                              std::to_string(VPKL_VERSION_MINOR) + '.' +
                              std::to_string(VPKL_VERSION_PATCH);
  std::string has = VPKL_VERSION_STRING;
#ifdef VPKL_ENABLE_MPI
  has += " MPI";
#endif
#ifdef VPKL_ENABLE_HDF5
  has += " HDF5";
#endif
#ifdef VPKL_ENABLE_CUDA
  has += " CUDA";
#endif
#ifdef VPKL_ENABLE_NCCL
  has += " NCCL";
#endif
  std::string expected;
  for (int i = 1; i < argc; ++i)
    expected += (i > 1 ? " " : "") + std::string(argv[i]);
  std::printf("vpkl %s, expected %s\n", has.c_str(), expected.c_str());
  return has == expected && numbers == VPKL_VERSION_STRING ? 0 : 1;
}
