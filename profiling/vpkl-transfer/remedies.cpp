// SPDX-License-Identifier: Apache-2.0
#include "remedies.hpp"

#include <fmt/format.h>

namespace vpkl::transfer {

std::vector<std::string> remedies(Work const& work, std::vector<Traffic> const& traffic,
                                  double seconds) {
  std::vector<std::string> found;
  bool pageable = false;
  std::int64_t copies = 0;
  double busy = 0;
  for (Traffic const& t : traffic) {
    busy += t.seconds;
    if (!t.copy) continue;
    copies += t.count;
    if (t.what.find("pageable") != std::string::npos) {
      pageable = true;
      found.push_back(
          fmt::format("{} ({} copies, {} bytes): the driver moves it through a small buffer of its "
                      "own while the caller waits; keep the rows in pinned memory and copy the "
                      "chunk as it lies (TeacherCache with engine automatic)",
                      t.what, t.count, t.bytes));
    } else if (t.synchronous) {
      found.push_back(
          fmt::format("{} ({} copies) is synchronous: use cudaMemcpyAsync or cudaMemcpy2DAsync on "
                      "a stream, and order other streams by events",
                      t.what, t.count));
    }
  }
  // A copy costs about 4 µs of the host and the bus; below some hundred KB a row it shows.
  if (copies > 64 && copies >= static_cast<std::int64_t>(work.rows.size()))
    found.push_back(fmt::format(
        "{} copies, one a row: copy each run of rows at equal distances at once "
        "(cudaMemcpy2DAsync; engine pinned_2d), scattered rows by a kernel (engine mapped)",
        copies));
  if (!pageable && busy < seconds / 2)
    found.push_back(
        fmt::format("the device is busy for {:.0f} % of the {:.0f} µs that the caller waits: the "
                    "rest is the host packing rows, or launches",
                    100 * busy / seconds, seconds * 1e6));
  return found;
}

}  // namespace vpkl::transfer
