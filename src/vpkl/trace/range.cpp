// SPDX-License-Identifier: Apache-2.0
#include <vpkl/trace/range.hpp>

#include <array>
#include <string>

#ifdef VPKL_ENABLE_KOKKOS_REGIONS
#include <Kokkos_Core.hpp>
#endif
#ifdef VPKL_ENABLE_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace vpkl::trace {

namespace {

constexpr std::array<char const*, 9> phase_names = {
    "rollout", "teacher", "store", "fetch", "statistics", "combine", "gradient", "update", "chunk"};

#ifdef VPKL_ENABLE_NVTX
struct Nvtx {
  nvtxDomainHandle_t domain = nvtxDomainCreateA("vpkl");
  std::array<nvtxStringHandle_t, phase_names.size()> names{};

  Nvtx() {
    for (std::size_t i = 0; i < names.size(); ++i)
      names[i] = nvtxDomainRegisterStringA(domain, phase_names[i]);
    char const* const categories[] = {"cache", "kernel", "comm", "io", "phase"};
    for (std::uint32_t i = 0; i < 5; ++i)
      nvtxDomainNameCategoryA(domain, i + 1, categories[i]);
  }
  static Nvtx const& get() {
    static Nvtx const nvtx;
    return nvtx;
  }
};
#endif

}  // namespace

char const* to_string(Phase phase) { return phase_names[static_cast<std::size_t>(phase)]; }

#if defined(VPKL_ENABLE_NVTX) || defined(VPKL_ENABLE_KOKKOS_REGIONS)

Range::Range(Phase phase, [[maybe_unused]] Category category,
             [[maybe_unused]] std::int64_t payload) {
#ifdef VPKL_ENABLE_KOKKOS_REGIONS
  Kokkos::Profiling::pushRegion(std::string("vpkl::") + to_string(phase));
#endif
#ifdef VPKL_ENABLE_NVTX
  Nvtx const& nvtx = Nvtx::get();
  nvtxEventAttributes_t event{};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.category = static_cast<std::uint32_t>(category);
  event.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
  event.message.registered = nvtx.names[static_cast<std::size_t>(phase)];
  event.payloadType = NVTX_PAYLOAD_TYPE_INT64;
  event.payload.llValue = payload;
  // The level a tool answers is not used: a pop is owed whatever it says.
  nvtxDomainRangePushEx(nvtx.domain, &event);
#endif
}

Range::~Range() {
#ifdef VPKL_ENABLE_NVTX
  nvtxDomainRangePop(Nvtx::get().domain);
#endif
#ifdef VPKL_ENABLE_KOKKOS_REGIONS
  Kokkos::Profiling::popRegion();
#endif
}

#endif

}  // namespace vpkl::trace
