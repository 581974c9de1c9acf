// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief What the device does during a call.
#pragma once

#include "../backend.hpp"

#include <functional>
#include <string>
#include <vector>

namespace vpkl::transfer {

/// \brief Why attributed() cannot be called; empty if it can.
std::string why_no_attribution();

/// \brief Copies and kernels that run while `body` does, joined by kind.
/// \param[in] body ends when its work on the device has ended
std::vector<Traffic> attributed(std::function<void()> const& body);

}  // namespace vpkl::transfer
