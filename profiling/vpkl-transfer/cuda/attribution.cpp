// SPDX-License-Identifier: Apache-2.0
// Through CUPTI's activity records. The caller's range is an external correlation id: CUPTI ties it
// to each call of the runtime, and each copy and kernel to its call.
#include "attribution.hpp"

#include <vpkl/core/error.hpp>

#include <cuda_runtime_api.h>
#include <cupti.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

namespace vpkl::transfer {

namespace {

#if CUPTI_API_VERSION >= 130000
using CopyRecord = CUpti_ActivityMemcpy6;
using KernelRecord = CUpti_ActivityKernel10;
#else
using CopyRecord = CUpti_ActivityMemcpy5;
using KernelRecord = CUpti_ActivityKernel9;
#endif

constexpr std::uint64_t range_id = 1;
constexpr CUpti_ActivityKind kinds[] = {
    CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_RUNTIME,
    CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION};

/// The library's functions, found at run time so that the program starts without it.
struct Cupti {
#define VPKL_CUPTI_FUNCTION(name) decltype(&::name) name = nullptr
  VPKL_CUPTI_FUNCTION(cuptiActivityRegisterCallbacks);
  VPKL_CUPTI_FUNCTION(cuptiActivityEnable);
  VPKL_CUPTI_FUNCTION(cuptiActivityDisable);
  VPKL_CUPTI_FUNCTION(cuptiActivityFlushAll);
  VPKL_CUPTI_FUNCTION(cuptiActivityGetNextRecord);
  VPKL_CUPTI_FUNCTION(cuptiActivityPushExternalCorrelationId);
  VPKL_CUPTI_FUNCTION(cuptiActivityPopExternalCorrelationId);
  VPKL_CUPTI_FUNCTION(cuptiGetResultString);
#undef VPKL_CUPTI_FUNCTION
  std::string missing;

  Cupti() {
    std::string const versioned = fmt::format("libcupti.so.{}", CUDART_VERSION / 1000);
    void* library = dlopen(versioned.c_str(), RTLD_NOW);
    if (!library) library = dlopen("libcupti.so", RTLD_NOW);
    if (!library) {
      missing = fmt::format(
          "{} cannot be loaded; it comes with the CUDA toolkit: add its folder to "
          "LD_LIBRARY_PATH",
          versioned);
      return;
    }
#define VPKL_CUPTI_FIND(name)                                     \
  name = reinterpret_cast<decltype(name)>(dlsym(library, #name)); \
  if (!name) missing = "the CUPTI found here has no " #name
    VPKL_CUPTI_FIND(cuptiActivityRegisterCallbacks);
    VPKL_CUPTI_FIND(cuptiActivityEnable);
    VPKL_CUPTI_FIND(cuptiActivityDisable);
    VPKL_CUPTI_FIND(cuptiActivityFlushAll);
    VPKL_CUPTI_FIND(cuptiActivityGetNextRecord);
    VPKL_CUPTI_FIND(cuptiActivityPushExternalCorrelationId);
    VPKL_CUPTI_FIND(cuptiActivityPopExternalCorrelationId);
    VPKL_CUPTI_FIND(cuptiGetResultString);
#undef VPKL_CUPTI_FIND
  }

  static Cupti const& get() {
    static Cupti const cupti;
    return cupti;
  }
};

void check(CUptiResult code, char const* call) {
  if (code == CUPTI_SUCCESS) return;
  char const* text = nullptr;
  Cupti::get().cuptiGetResultString(code, &text);
  throw Error(fmt::format("{} failed: {}", call, text ? text : "unknown"));
}
#define VPKL_CHECK_CUPTI(function, ...) check(Cupti::get().function(__VA_ARGS__), #function)

char const* memory_name(std::uint8_t kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE: return "pageable";
    case CUPTI_ACTIVITY_MEMORY_KIND_PINNED: return "pinned";
    case CUPTI_ACTIVITY_MEMORY_KIND_DEVICE:
    case CUPTI_ACTIVITY_MEMORY_KIND_DEVICE_STATIC: return "device";
    case CUPTI_ACTIVITY_MEMORY_KIND_MANAGED:
    case CUPTI_ACTIVITY_MEMORY_KIND_MANAGED_STATIC: return "managed";
    default: return "other";
  }
}

/// Records as they arrive, from a thread of CUPTI's own. The callbacks carry no pointer of ours.
class Records {
 public:
  static Records& get() {
    static Records records;
    return records;
  }

  void clear() {
    std::lock_guard<std::mutex> const lock(mutex_);
    traffic_.clear();
    in_range_.clear();
  }

  void add(CUpti_Activity const* record) {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (record->kind == CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION) {
      auto const* const tie = reinterpret_cast<CUpti_ActivityExternalCorrelation const*>(record);
      if (tie->externalId == range_id) in_range_.insert(tie->correlationId);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      auto const* const copy = reinterpret_cast<CopyRecord const*>(record);
      Traffic one;
      one.what = fmt::format("{} to {}", memory_name(copy->srcKind), memory_name(copy->dstKind));
      one.synchronous = (copy->flags & CUPTI_ACTIVITY_FLAG_MEMCPY_ASYNC) == 0;
      one.bytes = static_cast<std::int64_t>(copy->bytes);
      one.seconds = static_cast<double>(copy->end - copy->start) * 1e-9;
      traffic_.emplace_back(copy->correlationId, one);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL ||
               record->kind == CUPTI_ACTIVITY_KIND_KERNEL) {
      auto const* const kernel = reinterpret_cast<KernelRecord const*>(record);
      Traffic one;
      one.what = "kernel";
      one.copy = false;
      one.seconds = static_cast<double>(kernel->end - kernel->start) * 1e-9;
      traffic_.emplace_back(kernel->correlationId, one);
    }
  }

  std::vector<Traffic> joined() {
    std::lock_guard<std::mutex> const lock(mutex_);
    std::map<std::tuple<std::string, bool, bool>, Traffic> by_kind;
    for (auto const& [correlation, one] : traffic_) {
      bool const inside = in_range_.count(correlation) > 0;
      Traffic& sum = by_kind[{one.what, one.synchronous, inside}];
      Traffic const before = sum;
      sum = one;
      sum.in_range = inside;
      sum.count = before.count + 1;
      sum.bytes += before.bytes;
      sum.seconds += before.seconds;
    }
    std::vector<Traffic> all;
    for (auto const& [kind, sum] : by_kind)
      all.push_back(sum);
    return all;
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<std::uint32_t, Traffic>> traffic_;
  std::set<std::uint32_t> in_range_;
};

void CUPTIAPI buffer_wanted(std::uint8_t** buffer, std::size_t* size, std::size_t* most_records) {
  *size = std::size_t(1) << 20;
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(64, *size));
  if (!*buffer) *size = 0;
  *most_records = 0;
}

void CUPTIAPI buffer_full(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t,
                          std::size_t valid) {
  CUpti_Activity* record = nullptr;
  while (Cupti::get().cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS)
    Records::get().add(record);
  std::free(buffer);
}

/// Records are made while it lives.
class Recording {
 public:
  Recording() {
    VPKL_CHECK_CUPTI(cuptiActivityRegisterCallbacks, buffer_wanted, buffer_full);
    for (CUpti_ActivityKind const kind : kinds)
      VPKL_CHECK_CUPTI(cuptiActivityEnable, kind);
    VPKL_CHECK_CUPTI(cuptiActivityPushExternalCorrelationId,
                     CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, range_id);
  }
  ~Recording() {
    std::uint64_t id = 0;
    Cupti const& cupti = Cupti::get();
    (void)cupti.cuptiActivityPopExternalCorrelationId(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, &id);
    (void)cupti.cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    for (CUpti_ActivityKind const kind : kinds)
      (void)cupti.cuptiActivityDisable(kind);
  }
  Recording(Recording const&) = delete;
  Recording& operator=(Recording const&) = delete;
};

}  // namespace

std::string why_no_attribution() { return Cupti::get().missing; }

std::vector<Traffic> attributed(std::function<void()> const& body) {
  Records::get().clear();
  {
    Recording const recording;
    body();
  }
  return Records::get().joined();
}

}  // namespace vpkl::transfer
