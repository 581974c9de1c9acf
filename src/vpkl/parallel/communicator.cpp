// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/error.hpp>
#include <vpkl/parallel/agreement.hpp>
#include <vpkl/parallel/communicator.hpp>
#include <vpkl/parallel/communicator_state.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace vpkl {

void Transport::all_reduce(float* data, std::int64_t count, Reduction reduction,
                           std::chrono::milliseconds timeout) {
  std::size_t const n = static_cast<std::size_t>(count);
  std::vector<float> all(n * static_cast<std::size_t>(size()));
  all_gather(data, all.data(), n * sizeof(float), timeout);
  std::copy_n(all.begin(), n, data);
  for (std::size_t i = n; i < all.size(); ++i) {
    float& to = data[i % n];
    to = reduction == Reduction::sum ? to + all[i] : std::max(to, all[i]);
  }
}

void Transport::broadcast(void* data, std::size_t bytes, int root,
                          std::chrono::milliseconds timeout) {
  std::vector<unsigned char> all(bytes * static_cast<std::size_t>(size()));
  all_gather(data, all.data(), bytes, timeout);
  if (bytes > 0) std::memcpy(data, all.data() + bytes * static_cast<std::size_t>(root), bytes);
}

namespace {

class SelfTransport final : public Transport {
 public:
  char const* name() const override { return "self"; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_gather(void const* local, void* gathered, std::size_t bytes,
                  std::chrono::milliseconds) override {
    if (local != gathered && bytes > 0) std::memcpy(gathered, local, bytes);
  }
  void all_reduce(float*, std::int64_t, Reduction, std::chrono::milliseconds) override {}
  void broadcast(void*, std::size_t, int, std::chrono::milliseconds) override {}
  std::unique_ptr<Transport> split(int, int) override { return std::make_unique<SelfTransport>(); }
};

}  // namespace

Communicator::Communicator() : state_(std::make_shared<State>()) {
  state_->transport = std::make_unique<SelfTransport>();
}

Communicator::Communicator(std::shared_ptr<State> state) : state_(std::move(state)) {}

Communicator Communicator::from_transport(std::unique_ptr<Transport> transport) {
  if (!transport) throw InvalidArgument("Communicator: the transport is null");
  auto state = std::make_shared<State>();
  state->transport = std::move(transport);
  return Communicator(std::move(state));
}

int Communicator::rank() const { return state_->transport->rank(); }
int Communicator::size() const { return state_->transport->size(); }
char const* Communicator::transport_name() const { return state_->transport->name(); }
bool Communicator::alive() const { return state_->alive; }
std::chrono::milliseconds Communicator::timeout() const { return state_->timeout; }
CommunicationCounters Communicator::counters() const { return state_->counters; }

void Communicator::set_timeout(std::chrono::milliseconds timeout) {
  State::check_timeout(timeout);
  state_->timeout = timeout;
}

Communicator Communicator::split(int color, int key) const {
  Agreement("split")
      .check([&] {
        if (color < 0)
          throw InvalidArgument(fmt::format("split: color is {}, expected at least 0", color));
      })
      .exchange(*this);
  auto state = std::make_shared<State>();
  state->timeout = state_->timeout;
  guarded([&](Transport& t) { state->transport = t.split(color, key); });
  return Communicator(std::move(state));
}

template <class ExecutionSpace>
void const* Communicator::all_gather(ExecutionSpace const& exec, void const* local, void* gathered,
                                     std::size_t bytes) const {
  static_assert(impl::is_host_space<ExecutionSpace>, "vpkl::Communicator: host spaces only");
  impl::fence(exec, "vpkl::Communicator::all_gather");
  guarded([&](Transport& t) { t.all_gather(local, gathered, bytes, state_->timeout); });
  ++state_->counters.all_gathers;
  state_->counters.all_gather_bytes += static_cast<std::int64_t>(bytes);
  return gathered;
}

template <class ExecutionSpace>
void Communicator::all_reduce(ExecutionSpace const& exec, float* data, std::int64_t count,
                              Reduction reduction) const {
  static_assert(impl::is_host_space<ExecutionSpace>, "vpkl::Communicator: host spaces only");
  if (count <= 0) return;
  impl::fence(exec, "vpkl::Communicator::all_reduce");
  guarded([&](Transport& t) { t.all_reduce(data, count, reduction, state_->timeout); });
  ++state_->counters.all_reduces;
}

void Communicator::check_root(int root) const {
  if (root < 0 || root >= size())
    throw InvalidArgument(
        fmt::format("broadcast: root is {}, expected a rank below {}", root, size()));
}

template <class ExecutionSpace>
void Communicator::broadcast(ExecutionSpace const& exec, void* data, std::size_t bytes,
                             int root) const {
  static_assert(impl::is_host_space<ExecutionSpace>, "vpkl::Communicator: host spaces only");
  check_root(root);
  impl::fence(exec, "vpkl::Communicator::broadcast");
  guarded([&](Transport& t) { t.broadcast(data, bytes, root, state_->timeout); });
  ++state_->counters.broadcasts;
}

template <class ExecutionSpace>
void Communicator::wait(ExecutionSpace const& exec) const {
  impl::fence(exec, "vpkl::Communicator::wait");
}

void Communicator::exchange_record(void const* local, void* gathered, std::size_t bytes) const {
  guarded([&](Transport& t) { t.all_gather(local, gathered, bytes, state_->timeout); });
  ++state_->counters.records;
}

#define VPKL_INSTANTIATE(Exec)                                                                \
  template void const* Communicator::all_gather(Exec const&, void const*, void*, std::size_t) \
      const;                                                                                  \
  template void Communicator::all_reduce(Exec const&, float*, std::int64_t, Reduction) const; \
  template void Communicator::broadcast(Exec const&, void*, std::size_t, int) const;          \
  template void Communicator::wait(Exec const&) const;
VPKL_FOREACH_HOST_SPACE(VPKL_INSTANTIATE)
#undef VPKL_INSTANTIATE

}  // namespace vpkl
