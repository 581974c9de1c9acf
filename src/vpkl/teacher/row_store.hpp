// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Where cached teacher rows live.
#pragma once

#include <vpkl/core/rows.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace vpkl {

/// Rows of equal width and type, kept by slot number somewhere outside the execution space's
/// memory budget. Implementations differ in where (host memory; later a file, or nowhere: logits
/// rebuilt from hidden states).
template <class ExecutionSpace>
class RowStore {
 public:
  virtual ~RowStore() = default;

  /// \brief Keeps rows in slots `[0, rows.index.count)`; complete before any later fetch.
  virtual void store(ExecutionSpace const& exec, ConstRows const& rows) = 0;

  /// \brief Enqueues the copy of `slots[i]` to row i of `out`, converting to its type; negative
  /// slots are passed over.
  virtual void fetch(ExecutionSpace const& exec, std::vector<std::int64_t> const& slots,
                     Rows const& out) const = 0;

  /// \brief Bytes of memory or file taken.
  virtual std::size_t bytes() const = 0;
};

}  // namespace vpkl
