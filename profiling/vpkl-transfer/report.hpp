// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief The records as tables for people.
#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace vpkl::transfer {

/// \param[in] records as Runner makes them, in their order
std::string tables(std::vector<nlohmann::json> const& records);

}  // namespace vpkl::transfer
