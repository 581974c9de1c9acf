// SPDX-License-Identifier: Apache-2.0
// An NVTX tool as a profiler would be: a library that NVTX loads by NVTX_INJECTION64_PATH. It
// records the calls, and answers -1 to every push.
#include "probe.hpp"

#include <nvtx3/nvToolsExt.h>

#include <cstring>
#include <deque>
#include <string>
#include <vector>

namespace {

using vpkl::test::ProbeEvent;

struct Registered {
  std::string text;
  nvtxDomainHandle_t domain;
};

struct State {
  std::vector<ProbeEvent> events;
  std::deque<std::string> domains;    // a handle is the address
  std::deque<Registered> registered;  // likewise
};

// Never destroyed: ranges may still close while the process ends.
State& state() {
  static State& s = *new State;
  return s;
}

ProbeEvent& add(ProbeEvent::Kind kind, nvtxDomainHandle_t domain, std::string const& text) {
  ProbeEvent event{};
  event.kind = kind;
  text.copy(event.text, sizeof event.text - 1);
  if (domain)
    reinterpret_cast<std::string const*>(domain)->copy(event.domain_name,
                                                       sizeof event.domain_name - 1);
  state().events.push_back(event);
  return state().events.back();
}

nvtxDomainHandle_t NVTX_API create_domain(char const* name) {
  state().domains.emplace_back(name);
  auto* const handle = reinterpret_cast<nvtxDomainHandle_t>(&state().domains.back());
  add(ProbeEvent::domain, handle, name);
  return handle;
}

nvtxStringHandle_t NVTX_API register_string(nvtxDomainHandle_t domain, char const* text) {
  state().registered.push_back({text, domain});
  add(ProbeEvent::string, domain, text);
  return reinterpret_cast<nvtxStringHandle_t>(&state().registered.back());
}

void NVTX_API name_category(nvtxDomainHandle_t domain, std::uint32_t id, char const* name) {
  add(ProbeEvent::category, domain, name).category_id = static_cast<std::int32_t>(id);
}

int NVTX_API push(nvtxDomainHandle_t domain, nvtxEventAttributes_t const* event) {
  std::string text;
  bool registered = false;
  if (event->messageType == NVTX_MESSAGE_TYPE_REGISTERED) {
    auto const* const found = reinterpret_cast<Registered const*>(event->message.registered);
    text = found->text;
    registered = found->domain == domain;
  } else if (event->messageType == NVTX_MESSAGE_TYPE_ASCII) {
    text = event->message.ascii;
  }
  ProbeEvent& recorded = add(ProbeEvent::push, domain, text);
  recorded.registered = registered;
  recorded.category_id = static_cast<std::int32_t>(event->category);
  recorded.is_int64 = event->payloadType == NVTX_PAYLOAD_TYPE_INT64;
  recorded.payload = event->payload.llValue;
  return -1;
}

int NVTX_API pop(nvtxDomainHandle_t domain) {
  add(ProbeEvent::pop, domain, "");
  return -1;
}

template <class F>
void set(NvtxFunctionTable table, unsigned size, unsigned id, F* function) {
  if (id < size) *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" NVTX_DYNAMIC_EXPORT int NVTX_API
InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table) {
  auto const* const callbacks =
      static_cast<NvtxExportTableCallbacks const*>(get_export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size))
    return 0;
  set(table, size, NVTX_CBID_CORE2_DomainCreateA, &create_domain);
  set(table, size, NVTX_CBID_CORE2_DomainRegisterStringA, &register_string);
  set(table, size, NVTX_CBID_CORE2_DomainNameCategoryA, &name_category);
  set(table, size, NVTX_CBID_CORE2_DomainRangePushEx, &push);
  set(table, size, NVTX_CBID_CORE2_DomainRangePop, &pop);
  return 1;
}

extern "C" NVTX_DYNAMIC_EXPORT ProbeEvent const* vpkl_probe_events(std::int64_t* count) {
  *count = static_cast<std::int64_t>(state().events.size());
  return state().events.data();
}
