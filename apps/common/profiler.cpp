// SPDX-License-Identifier: Apache-2.0
#include "profiler.hpp"

namespace vpkl::apps {

bool has_profiler() { return false; }

ProfilerRange::ProfilerRange() = default;
ProfilerRange::~ProfilerRange() = default;

}  // namespace vpkl::apps
