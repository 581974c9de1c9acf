// SPDX-License-Identifier: Apache-2.0
#include <vpkl/capi/runtime.hpp>

#include <fmt/format.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <unordered_map>

#ifdef VPKL_ENABLE_CUDA
#include <vpkl/core/cuda/check.hpp>
#endif

namespace vpkl::capi {

namespace {

thread_local char last_error[2048] = "";

std::atomic<std::int64_t> handles{0};

/// What vpkl holds of Kokkos.
struct Runtime {
  std::mutex mutex;
  bool owns_kokkos = false;
  bool finalized = false;
  bool hooked = false;  ///< drop_instances() runs when Kokkos is finalised, by whomever
  std::unique_ptr<HostExec> host;
#ifdef VPKL_ENABLE_CUDA
  std::unordered_map<void*, std::unique_ptr<Kokkos::Cuda>> streams;
#endif
};

// Never destroyed: instances go with Kokkos, not with the process.
Runtime& runtime() {
  static auto* const one = new Runtime;
  return *one;
}

void drop_instances() {
  Runtime& r = runtime();
  r.host.reset();
#ifdef VPKL_ENABLE_CUDA
  r.streams.clear();
#endif
}

void initialize_kokkos() {
#ifdef VPKL_ENABLE_CUDA
  int device = 0;
  VPKL_CHECK_CUDA(cudaGetDevice(&device));
#endif
#if KOKKOS_VERSION >= 30700
  Kokkos::InitializationSettings settings;
#ifdef VPKL_ENABLE_CUDA
  settings.set_device_id(device);
#endif
#else
  Kokkos::InitArguments settings;
#ifdef VPKL_ENABLE_CUDA
  settings.device_id = device;
#endif
#endif
  Kokkos::initialize(settings);
}

}  // namespace

vpkl_status note(std::exception_ptr const& error) noexcept {
  try {
    std::snprintf(last_error, sizeof last_error, "%s", error_message(error).c_str());
  } catch (...) {
    std::snprintf(last_error, sizeof last_error, "%s", "out of memory");
  }
  return static_cast<vpkl_status>(error_kind(error));
}

Handle::Handle() { ++handles; }
Handle::~Handle() { --handles; }

void ensure_kokkos() {
  Runtime& r = runtime();
  std::lock_guard<std::mutex> const lock(r.mutex);
  if (r.finalized) throw InvalidArgument("vpkl: used after vpkl_finalize()");
  if (!Kokkos::is_initialized()) {
    initialize_kokkos();
    r.owns_kokkos = true;
  }
  if (!r.hooked) Kokkos::push_finalize_hook(drop_instances);
  r.hooked = true;
}

template <>
HostExec const& instance<HostExec>(void* stream) {
  if (stream)
    throw InvalidArgument(fmt::format("CUDA stream is {}, expected null in VPKL_HOST", stream));
  Runtime& r = runtime();
  std::lock_guard<std::mutex> const lock(r.mutex);
  if (!r.host) r.host = std::make_unique<HostExec>();
  return *r.host;
}

template <>
void check_memory<HostExec>(void const* pointer, char const* what) {
#ifdef VPKL_ENABLE_CUDA
  if (!pointer) return;
  cudaPointerAttributes attributes;
  VPKL_CHECK_CUDA(cudaPointerGetAttributes(&attributes, pointer));
  if (attributes.type == cudaMemoryTypeDevice)
    throw InvalidArgument(fmt::format("{}: {} is memory of CUDA device {}, expected host memory",
                                      what, pointer, attributes.device));
#else
  (void)pointer;
  (void)what;
#endif
}

#ifdef VPKL_ENABLE_CUDA

template <>
Kokkos::Cuda const& instance<Kokkos::Cuda>(void* stream) {
  static int const own = Kokkos::Cuda().cuda_device();
  int device = 0;
  VPKL_CHECK_CUDA(cudaGetDevice(&device));
  if (device != own)
    throw InvalidArgument(
        fmt::format("the current CUDA device is {}, expected Kokkos' device {}", device, own));
  Runtime& r = runtime();
  std::lock_guard<std::mutex> const lock(r.mutex);
  auto& kept = r.streams[stream];
  if (!kept) kept = std::make_unique<Kokkos::Cuda>(static_cast<cudaStream_t>(stream));
  return *kept;
}

template <>
void check_memory<Kokkos::Cuda>(void const* pointer, char const* what) {
  if (!pointer) return;
  cudaPointerAttributes attributes;
  VPKL_CHECK_CUDA(cudaPointerGetAttributes(&attributes, pointer));
  if (attributes.type == cudaMemoryTypeManaged) return;
  static int const own = Kokkos::Cuda().cuda_device();
  if (attributes.type != cudaMemoryTypeDevice)
    throw InvalidArgument(fmt::format("{}: {} is host memory, expected memory of CUDA device {}",
                                      what, pointer, own));
  if (attributes.device != own)
    throw InvalidArgument(
        fmt::format("{}: {} is memory of CUDA device {}, expected Kokkos' device {}", what, pointer,
                    attributes.device, own));
}

#endif

ElementType element_type(int type, char const* what) {
  switch (type) {
    case VPKL_FP32: return ElementType::fp32;
    case VPKL_BF16: return ElementType::bf16;
    case VPKL_FP16: return ElementType::fp16;
    default: break;
  }
  throw InvalidArgument(
      fmt::format("{}: type is {}, expected VPKL_FP32, VPKL_BF16 or VPKL_FP16", what, type));
}

template <class ExecutionSpace>
Rows rows(vpkl_rows const* from, char const* what) {
  vpkl_rows const& r = deref(from, what);
  Rows to;
  to.data = r.data;
  to.type = element_type(r.type, what);
  to.width = r.width;
  if (r.rows_per_batch == 0)
    to.index = RowIndex::strided(r.rows, r.row_stride);
  else
    to.index = RowIndex{r.rows, r.rows_per_batch, r.batch_stride, r.row_stride, nullptr};
  to.index.offsets = r.offsets;
  check_memory<ExecutionSpace>(r.data, what);
  check_memory<ExecutionSpace>(r.offsets, what);
  return to;
}

template Rows rows<HostExec>(vpkl_rows const*, char const*);
#ifdef VPKL_ENABLE_CUDA
template Rows rows<Kokkos::Cuda>(vpkl_rows const*, char const*);
#endif

}  // namespace vpkl::capi

using namespace vpkl::capi;

const char* vpkl_last_error(void) { return last_error; }

const char* vpkl_version(void) { return VPKL_VERSION_STRING; }

unsigned vpkl_features(void) {
  unsigned features = 0;
#ifdef VPKL_ENABLE_CUDA
  features |= VPKL_FEATURE_CUDA;
#endif
#ifdef VPKL_ENABLE_MPI
  features |= VPKL_FEATURE_MPI;
#endif
#ifdef VPKL_ENABLE_NCCL
  features |= VPKL_FEATURE_NCCL;
#endif
#ifdef VPKL_ENABLE_HDF5
  features |= VPKL_FEATURE_HDF5;
#endif
  return features;
}

vpkl_status vpkl_initialize(void) {
  return guarded([] { ensure_kokkos(); });
}

vpkl_status vpkl_finalize(void) {
  return guarded([] {
    Runtime& r = runtime();
    std::lock_guard<std::mutex> const lock(r.mutex);
    if (handles > 0)
      throw vpkl::InvalidArgument(
          fmt::format("vpkl_finalize: {} handles are alive, expected none", handles.load()));
    if (r.finalized) return;
    drop_instances();
    if (r.owns_kokkos) {
      Kokkos::finalize();
      r.owns_kokkos = false;
      r.finalized = true;
    }
  });
}

vpkl_status vpkl_release_stream(void* cuda_stream) {
  return guarded([&] {
#ifdef VPKL_ENABLE_CUDA
    Runtime& r = runtime();
    std::lock_guard<std::mutex> const lock(r.mutex);
    r.streams.erase(cuda_stream);
#else
    (void)cuda_stream;
#endif
  });
}
