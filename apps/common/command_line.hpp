// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief How every program ends its command line: help, version, a flag that cannot be.
#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <optional>

namespace vpkl::apps {

/// \brief Parses into what `app` was told of, then calls `finish` for checks that need all flags.
/// \param[in] finish throws InvalidArgument naming the flag
/// \param[in] quiet nothing is printed, for ranks that would say the same
/// \return the exit status where the program is to end here
std::optional<int> parse_command_line(CLI::App& app, int argc, char** argv, bool quiet,
                                      std::function<void()> const& finish);

}  // namespace vpkl::apps
