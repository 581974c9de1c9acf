// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief What to do about transfers that are slower than they need be.
#pragma once

#include "backend.hpp"

#include <string>
#include <vector>

namespace vpkl::transfer {

/// \brief One sentence for each fault that the traffic of a transfer shows; none for a good one.
/// \param[in] seconds what the caller waited for the transfer
std::vector<std::string> remedies(Work const& work, std::vector<Traffic> const& traffic,
                                  double seconds);

}  // namespace vpkl::transfer
