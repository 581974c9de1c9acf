// SPDX-License-Identifier: Apache-2.0
#include "environment.hpp"

#include <cfenv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace vpkl::test {

namespace {

Communicator host_world() {
#ifdef VPKL_ENABLE_MPI
  return Communicator::mpi(MPI_COMM_WORLD);
#else
  return Communicator::self();
#endif
}

#ifdef VPKL_ENABLE_NCCL
/// Making one takes much longer than most tests: it is kept until a test has broken it.
Communicator nccl_world(Communicator const& host) {
  static std::unique_ptr<Communicator> kept;
  bool const first = !kept;
  if (!all_of(host, kept && kept->alive()))
    kept = std::make_unique<Communicator>(Communicator::nccl(host));
  if (first) Kokkos::push_finalize_hook([] { kept.reset(); });
  return *kept;
}
#endif

}  // namespace

bool wants_nccl() {
  char const* const name = std::getenv("VPKL_TEST_TRANSPORT");
  return name && std::strcmp(name, "nccl") == 0;
}

std::string why_no_nccl() {
#ifdef VPKL_ENABLE_NCCL
  return Communicator::has_gpu_for_each_rank(host_world())
             ? ""
             : "ranks share a GPU, NCCL needs one for each";
#else
  return "built without NCCL";
#endif
}

Communicator world() {
  Communicator host = host_world();
#ifdef VPKL_ENABLE_NCCL
  if (wants_nccl()) return nccl_world(host);
#endif
  return host;
}

std::uint64_t same_on_all_ranks(Communicator const& comm, std::uint64_t mine) {
  std::vector<std::uint64_t> all(static_cast<std::size_t>(comm.size()));
  comm.exchange_record(&mine, all.data(), sizeof mine);
  return all[0];
}

bool all_of(Communicator const& comm, bool mine) {
  std::vector<char> all(static_cast<std::size_t>(comm.size()));
  char const local = mine ? 1 : 0;
  comm.exchange_record(&local, all.data(), 1);
  for (char one : all)
    if (!one) return false;
  return true;
}

namespace {

// Traps are a property of each thread, and Kokkos' threads live as long as the process.
template <class F>
void on_every_thread(F&& f) {
  f();
#ifdef _OPENMP
#pragma omp parallel
  f();
#endif
}

}  // namespace

FloatingPointTraps::FloatingPointTraps() {
#ifdef __GLIBC__
  on_every_thread([] {
    std::feclearexcept(FE_ALL_EXCEPT);
    feenableexcept(FE_INVALID);
  });
#endif
}

FloatingPointTraps::~FloatingPointTraps() {
#ifdef __GLIBC__
  on_every_thread([] { fedisableexcept(FE_ALL_EXCEPT); });
#endif
}

double normal(Random& random) {
  double const u = uniform_real(random, 0, 1), v = uniform_real(random, 0, 1);
  return std::sqrt(-2 * std::log1p(-u)) * std::cos(6.283185307179586 * v);
}

std::uint64_t fuzz_seed(Communicator const& comm) {
  char const* const text = std::getenv("VPKL_FUZZ_SEED");
  std::uint64_t const seed =
      same_on_all_ranks(comm, text ? std::strtoull(text, nullptr, 0) : std::random_device{}());
  if (comm.rank() == 0) std::printf("VPKL_FUZZ_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

std::int64_t fuzz_iterations(std::int64_t otherwise) {
  char const* const text = std::getenv("VPKL_FUZZ_ITERATIONS");
  return text ? std::strtoll(text, nullptr, 0) : otherwise;
}

}  // namespace vpkl::test
