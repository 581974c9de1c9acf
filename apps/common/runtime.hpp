// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief What every program does around its work: MPI, Kokkos, errors that end all ranks.
#pragma once

#include <vpkl/parallel/communicator.hpp>

#include <functional>
#include <string>

namespace vpkl::apps {

constexpr int exit_failure = 1;
constexpr int exit_usage = 2;

/// \brief Rank as the launcher announces it in the environment, before MPI is up; 0 without one.
int launcher_rank();

/// \brief Starts MPI and Kokkos, runs `body` and ends both.
///
/// Threads: where OMP_NUM_THREADS is unset, the ranks of a host share its usable cores evenly. A
/// body that throws ends the program on all ranks: rank 0 prints the error if all ranks share it,
/// otherwise the failing rank prints it and aborts the others.
/// \param[in] name program name, first word of messages
/// \return exit status
int run_parallel(int& argc, char**& argv, std::string const& name,
                 std::function<void(Communicator const& world)> const& body);

/// \brief Usable CPUs of this process.
int usable_cpus();

/// A line on the terminal that is written over; silent when standard error is no terminal.
class Progress {
 public:
  explicit Progress(bool wanted);
  ~Progress();
  Progress(Progress const&) = delete;
  Progress& operator=(Progress const&) = delete;
  void show(std::string const& text);

 private:
  bool active_;
};

}  // namespace vpkl::apps
