// SPDX-License-Identifier: Apache-2.0
#include "profiler.hpp"

#include <cuda_profiler_api.h>

namespace vpkl::apps {

bool has_profiler() { return true; }

// Without a profiler the calls do nothing, and no profiler is a reason to end a run.
ProfilerRange::ProfilerRange() { (void)cudaProfilerStart(); }
ProfilerRange::~ProfilerRange() { (void)cudaProfilerStop(); }

}  // namespace vpkl::apps
