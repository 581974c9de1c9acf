// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief What a profiler that waits for a range (cudaProfilerApi) records.
#pragma once

namespace vpkl::apps {

/// \brief Whether this build has a device whose profilers wait for a range.
bool has_profiler();

/// A range of the CUDA profiler, for this process; nothing where has_profiler() is false.
class ProfilerRange {
 public:
  ProfilerRange();
  ~ProfilerRange();
  ProfilerRange(ProfilerRange const&) = delete;
  ProfilerRange& operator=(ProfilerRange const&) = delete;
};

}  // namespace vpkl::apps
