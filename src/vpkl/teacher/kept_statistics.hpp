// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Statistics of a teacher's rows, kept beside them.
#pragma once

#include <vpkl/core/rows.hpp>
#include <vpkl/stats/row_statistics.hpp>

#include <cstdint>
#include <vector>

#ifdef VPKL_ENABLE_CUDA
#include <vpkl/core/cuda/check.hpp>
#endif

namespace vpkl::impl {

/// Work on one piece of memory from several instances, each after the one before.
template <class ExecutionSpace>
class UseInTurn {
 public:
  void begin(ExecutionSpace const&) const {}
  void end(ExecutionSpace const&) {}
};

#ifdef VPKL_ENABLE_CUDA
template <>
class UseInTurn<Kokkos::Cuda> {
 public:
  void begin(Kokkos::Cuda const& exec) const { last_.order(exec.cuda_stream()); }
  void end(Kokkos::Cuda const& exec) {
    // Another may have ended since begin().
    last_.order(exec.cuda_stream());
    last_.record(exec.cuda_stream());
  }

 private:
  cuda::Event last_;
};
#endif

/// One record a kept row, in the execution space's memory.
template <class ExecutionSpace>
class KeptStatistics {
 public:
  /// \brief Enqueues the statistics of the listed rows, or of all without a list.
  /// \param[in] columns that count, from the first
  /// \param[in] type that the rows are kept in
  /// \throws OutOfMemory
  void make(ExecutionSpace const& exec, ConstRows const& logits,
            std::vector<std::int64_t> const* listed, std::int64_t columns, ElementType type,
            double temperature);

  /// \brief Work enqueued on `exec` until end_reading() may read the records.
  RowStatistics const* begin_reading(ExecutionSpace const& exec) const {
    turn_.begin(exec);
    return reinterpret_cast<RowStatistics const*>(memory_.data());
  }
  void end_reading(ExecutionSpace const& exec) { turn_.end(exec); }

 private:
  ByteView<ExecutionSpace> memory_;  ///< records, then the offsets of listed rows
  UseInTurn<ExecutionSpace> turn_;
};

}  // namespace vpkl::impl
