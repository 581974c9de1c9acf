// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Copies and zeros rows, converting the element type on the way.
#pragma once

#include <vpkl/core/rows.hpp>

#include <cstdint>

namespace vpkl::impl {

/// \brief Enqueues `to[row][to_first + c] = from[row][from_first + c]` for c < columns.
/// Equal types are copied bit by bit; others go through float and round to nearest even.
/// \param[in] weight one a row, or null; rows of weight 0 are neither read nor written
/// \return number of kernels launched
template <class ExecutionSpace>
int copy_rows(ExecutionSpace const& exec, char const* label, ConstRows const& from,
              std::int64_t from_first, Rows const& to, std::int64_t to_first, std::int64_t columns,
              float const* weight = nullptr);

/// \brief Enqueues zeros to all `width` columns of the rows whose `selected` entry is not 0.
/// \param[in] selected one byte a row in the execution space's memory
template <class ExecutionSpace>
void zero_rows(ExecutionSpace const& exec, char const* label, Rows const& rows,
               std::uint8_t const* selected);

#ifdef VPKL_ENABLE_CUDA
template <>
int copy_rows(Kokkos::Cuda const&, char const*, ConstRows const&, std::int64_t, Rows const&,
              std::int64_t, std::int64_t, float const*);
template <>
void zero_rows(Kokkos::Cuda const&, char const*, Rows const&, std::uint8_t const*);

namespace cuda {

/// \brief As copy_rows, `to[row] = from[listed[row]]` for each row of `to`; negative entries are
/// passed over. Rows and list may lie in pinned host memory.
/// \param[in] teams thread blocks at most; few of them fill the bus and leave the device to others
void copy_listed_rows(Kokkos::Cuda const& exec, char const* label, ConstRows const& from,
                      std::int64_t const* listed, Rows const& to, std::int64_t columns, int teams);

}  // namespace cuda
#endif

}  // namespace vpkl::impl
