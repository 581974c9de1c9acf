// SPDX-License-Identifier: Apache-2.0
#include "runtime.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/parallel/agreement.hpp>

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>

namespace vpkl::apps {

namespace {

/// Threads of this rank: what OMP_NUM_THREADS says, otherwise an even share of the usable cores.
/// Setting the variable here would be too late, the OpenMP runtime has read it.
int threads_for(int ranks_on_host) {
  return std::getenv("OMP_NUM_THREADS") ? -1 : std::max(1, usable_cpus() / ranks_on_host);
}

void initialize_kokkos(int threads) {
#if KOKKOS_VERSION >= 30700
  Kokkos::InitializationSettings settings;
  if (threads > 0) settings.set_num_threads(threads);
#else
  Kokkos::InitArguments settings;
  settings.num_threads = threads;
#endif
  Kokkos::initialize(settings);
}

void print_error(std::string const& name, std::string const& message) {
  fmt::print(stderr, "{}: {}\n", name, message);
  std::fflush(stderr);
}

/// \return exit status of a body that threw `error` on this rank
int end_together(Communicator world, std::string const& name, std::exception_ptr error) {
  try {
    world.set_timeout(std::chrono::seconds(5));
    Agreement("failure").fail(error).exchange(world);
  } catch (CommunicationError const&) {
    // The others are elsewhere.
    print_error(name, fmt::format("rank {}: {}", world.rank(), error_message(error)));
#ifdef VPKL_ENABLE_MPI
    MPI_Abort(MPI_COMM_WORLD, exit_failure);
#endif
  } catch (...) {
    // Agreed errors name their rank already.
    if (world.rank() == 0) print_error(name, error_message(error));
  }
  return exit_failure;
}

}  // namespace

int launcher_rank() {
  for (char const* variable : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"})
    if (char const* text = std::getenv(variable)) return std::atoi(text);
  return 0;
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

int run_parallel(int& argc, char**& argv, std::string const& name,
                 std::function<void(Communicator const& world)> const& body) {
  int ranks_on_host = 1;
#ifdef VPKL_ENABLE_MPI
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  MPI_Comm host = MPI_COMM_NULL;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  MPI_Comm_size(host, &ranks_on_host);
  MPI_Comm_free(&host);
#endif
  int status = 0;
  initialize_kokkos(threads_for(ranks_on_host));
  {
#ifdef VPKL_ENABLE_MPI
    Communicator const world = Communicator::mpi(MPI_COMM_WORLD);
#else
    Communicator const world;
#endif
    try {
      body(world);
    } catch (...) {
      status = end_together(world, name, std::current_exception());
    }
  }
  Kokkos::finalize();
#ifdef VPKL_ENABLE_MPI
  MPI_Finalize();
#endif
  return status;
}

Progress::Progress(bool wanted) : active_(wanted && isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (active_) std::fputs("\r\033[K", stderr);
}

void Progress::show(std::string const& text) {
  if (!active_) return;
  std::fprintf(stderr, "\r\033[K%s", text.c_str());
  std::fflush(stderr);
}

}  // namespace vpkl::apps
