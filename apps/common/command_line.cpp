// SPDX-License-Identifier: Apache-2.0
#include "command_line.hpp"

#include "runtime.hpp"

#include <vpkl/core/error.hpp>

#include <cstdio>
#include <sstream>

namespace vpkl::apps {

std::optional<int> parse_command_line(CLI::App& app, int argc, char** argv, bool quiet,
                                      std::function<void()> const& finish) {
  std::ostringstream out, err;
  int status = 0;
  try {
    app.parse(argc, argv);
    finish();
    return std::nullopt;
  } catch (CLI::ParseError const& error) {
    // Success is how CLI11 reports --help and --version.
    status = app.exit(error, out, err) == 0 ? 0 : exit_usage;
  } catch (InvalidArgument const& error) {
    err << app.get_name() << ": " << error.what() << "\nRun with --help for more information.\n";
    status = exit_usage;
  }
  if (!quiet) {
    std::fputs(out.str().c_str(), stdout);
    std::fputs(err.str().c_str(), stderr);
  }
  return status;
}

}  // namespace vpkl::apps
