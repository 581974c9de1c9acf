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

}  // namespace vpkl::impl
