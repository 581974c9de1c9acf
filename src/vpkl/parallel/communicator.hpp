// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Communicator: the group of ranks a collective runs over.
#pragma once

#include <vpkl/config.hpp>
#include <vpkl/core/kokkos.hpp>
#include <vpkl/parallel/transport.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#ifdef VPKL_ENABLE_MPI
#include <mpi.h>
#endif
#ifdef VPKL_ENABLE_NCCL
#include <nccl.h>
#endif

namespace vpkl {

/// What a communicator has carried; proves which path ran.
struct CommunicationCounters {
  std::int64_t all_gathers = 0;         ///< calls
  std::int64_t all_gather_bytes = 0;    ///< bytes this rank contributed
  std::int64_t all_reduces = 0;         ///< calls
  std::int64_t broadcasts = 0;          ///< calls
  std::int64_t device_collectives = 0;  ///< of all these, enqueued on the device's stream
  std::int64_t records = 0;             ///< agreement exchanges, not counted above
};

/// A group of ranks and the message layer between them; cheap to copy, copies share the group.
///
/// A collective that fails or outlives the deadline throws CommunicationError on the ranks that
/// notice, and the communicator is dead from then on: later calls throw at once.
class Communicator {
 public:
  /// \brief A group of one; every collective is a local copy.
  Communicator();
  /// \brief A group of one.
  static Communicator self() { return {}; }

  /// \brief A communicator over a message layer of the caller's.
  static Communicator from_transport(std::unique_ptr<Transport> transport);

#ifdef VPKL_ENABLE_MPI
  /// \brief Collective. Duplicates `comm`, so that vpkl's messages never meet the caller's; `comm`
  /// stays the caller's and may be freed. MPI must be initialised.
  /// \throws InvalidArgument when MPI is not initialised or `comm` is MPI_COMM_NULL
  static Communicator mpi(MPI_Comm comm);
#endif

#ifdef VPKL_ENABLE_NCCL
  /// \brief Collective over `bootstrap`. An NCCL communicator of the same ranks, made without
  /// blocking within the bootstrap's time-out, which becomes its own. Host records go over a
  /// duplicate of the bootstrap's message layer.
  ///
  /// Collectives in device memory are enqueued on the instance's stream; the host waits only for
  /// connections at first use, and when the device is 16 collectives behind.
  /// \throws InvalidArgument on every rank when ranks share a GPU, or when one's current CUDA
  /// device is not Kokkos'; Error on every rank when a process has loaded two shared libraries of
  /// NCCL; CommunicationError
  static Communicator nccl(Communicator const& bootstrap);

  /// \brief Collective over the `size` ranks that hold `id`, as above. Host records go through
  /// device memory, on a stream of the communicator's own.
  ///
  /// Before there is a communicator the ranks cannot agree: what one rank gets wrong it alone
  /// throws, and the others wait for it until `timeout`. Ranks that share a GPU are left to NCCL.
  /// \throws InvalidArgument, and Error for two shared libraries of NCCL, on that rank alone;
  /// CommunicationError
  static Communicator nccl(ncclUniqueId const& id, int rank, int size,
                           std::chrono::milliseconds timeout = std::chrono::minutes(10));

  /// \brief A communicator of the caller's, on Kokkos' device and able to work. It stays the
  /// caller's: keep it alive as long as this one and what was made from it, and ncclCommAbort it
  /// after a CommunicationError, or work on the device may wait for ever. Calls of a blocking one
  /// may outlive the time-out. Host records go through device memory.
  /// \throws InvalidArgument, and Error for two shared libraries of NCCL, on that rank alone
  static Communicator nccl(ncclComm_t comm);

  /// \brief Collective. Whether every rank has a GPU of its own, as NCCL demands.
  /// \throws Error on every rank when one cannot ask its GPU
  static bool has_gpu_for_each_rank(Communicator const& comm);
#endif

  int rank() const;  ///< of this process, in [0, size())
  int size() const;  ///< number of ranks
  /// \brief Name of the message layer: "self", "mpi", "nccl", ...
  char const* transport_name() const;
  /// \brief Whether no collective has failed so far.
  bool alive() const;
#ifdef VPKL_ENABLE_CUDA
  /// \brief Whether collectives of device memory stay on the device, as NCCL's do.
  bool stays_on_device() const;
#endif

  /// \brief Longest time a collective may take, default 10 minutes.
  void set_timeout(std::chrono::milliseconds timeout);
  /// \brief Longest time a collective may take.
  std::chrono::milliseconds timeout() const;

  /// \brief Collective. Sub-group of ranks with equal `color`, ordered by `key`.
  /// \throws InvalidArgument on every rank for a negative color
  Communicator split(int color, int key) const;

  /// \brief Gathers `bytes` of every rank in rank order, from and to memory of `exec`.
  ///
  /// Ordered after the work enqueued on `exec`. With NCCL the collective is enqueued on `exec` and
  /// not waited for. Otherwise, over more than one rank, the call waits once for that work; device
  /// memory is staged through pinned host memory, and the copy into `gathered` is enqueued.
  /// \param[in] exec instance whose memory holds both buffers
  /// \param[in] local `bytes` bytes; may be the own slot of `gathered`
  /// \param[out] gathered `size() * bytes` bytes
  /// \param[in] bytes contribution of a rank, equal on all
  /// \return the gathered bytes where the host can read them until the next collective; null when
  /// they never left the device
  template <class ExecutionSpace>
  void const* all_gather(ExecutionSpace const& exec, void const* local, void* gathered,
                         std::size_t bytes) const;

  /// \brief Sums floats over the ranks, in place, in memory of `exec`; ordering as all_gather.
  template <class ExecutionSpace>
  void all_reduce_sum(ExecutionSpace const& exec, float* data, std::int64_t count) const {
    all_reduce(exec, data, count, Reduction::sum);
  }

  /// \brief Maximum over the ranks, in place; without meaning where a rank has NaN.
  template <class ExecutionSpace>
  void all_reduce_max(ExecutionSpace const& exec, float* data, std::int64_t count) const {
    all_reduce(exec, data, count, Reduction::max);
  }

  /// \brief Copies `bytes` of rank `root`, in memory of `exec`, to every rank; ordering as
  /// all_gather.
  /// \throws InvalidArgument on a rank that names no rank
  template <class ExecutionSpace>
  void broadcast(ExecutionSpace const& exec, void* data, std::size_t bytes, int root) const;

  /// \brief Waits for the work on `exec`, communication included, at most until the time-out.
  template <class ExecutionSpace>
  void wait(ExecutionSpace const& exec) const;

  /// \brief Gathers a host record of every rank (agreement, status); counted as a record.
  void exchange_record(void const* local, void* gathered, std::size_t bytes) const;

  /// \brief Since the group was made, over all copies.
  CommunicationCounters counters() const;

 private:
  struct State;
  explicit Communicator(std::shared_ptr<State> state);
  template <class F>
  void guarded(F&& collective) const;
  template <class ExecutionSpace>
  void all_reduce(ExecutionSpace const& exec, float* data, std::int64_t count,
                  Reduction reduction) const;
  void check_root(int root) const;

  std::shared_ptr<State> state_;
};

#ifdef VPKL_ENABLE_CUDA
template <>
void const* Communicator::all_gather(Kokkos::Cuda const&, void const*, void*, std::size_t) const;
template <>
void Communicator::all_reduce(Kokkos::Cuda const&, float*, std::int64_t, Reduction) const;
template <>
void Communicator::broadcast(Kokkos::Cuda const&, void*, std::size_t, int) const;
template <>
void Communicator::wait(Kokkos::Cuda const&) const;
#endif

}  // namespace vpkl
