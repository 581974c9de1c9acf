// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Where cached teacher rows live.
#pragma once

#include <vpkl/core/rows.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace vpkl {

/// How rows come back from pinned host memory to a device; host spaces copy in memory whatever is
/// asked. All but `automatic` are kept for profiling. Rows that must be converted, or whose
/// positions only the device knows, always go as with `mapped`.
enum class TransferEngine : std::int32_t {
  automatic = 0,    ///< pinned_2d, or mapped where rows are so scattered that it is faster
  pageable = 1,     ///< packed into fresh pageable memory first (what frameworks do to a slice)
  staged = 2,       ///< packed into a pinned buffer first
  pinned_rows = 3,  ///< one copy a row
  pinned_2d = 4,    ///< one strided copy for each regular group of rows
  mapped = 5,       ///< a kernel reads the pinned memory
};

/// \brief The enumerator's name.
char const* to_string(TransferEngine engine);
/// \brief Inverse of to_string. \throws InvalidArgument naming the text and the accepted ones
TransferEngine transfer_engine_from_string(std::string const& text);

/// Rows of equal width and type, kept by slot number somewhere outside the execution space's
/// memory budget. Implementations differ in where (host memory; later a file, or nowhere: logits
/// rebuilt from hidden states).
template <class ExecutionSpace>
class RowStore {
 public:
  virtual ~RowStore() = default;

  /// \brief Keeps rows, the i-th listed one (or the i-th, without a list) in slot i; complete
  /// before any later fetch, on whatever instance.
  virtual void store(ExecutionSpace const& exec, ConstRows const& rows,
                     std::vector<std::int64_t> const* listed) = 0;

  /// \brief Enqueues the copy of `slots[i]` to row i of `out`, converting to its type; negative
  /// slots are passed over.
  virtual void fetch(ExecutionSpace const& exec, std::vector<std::int64_t> const& slots,
                     Rows const& out) const = 0;

  /// \brief Bytes of memory or file taken.
  virtual std::size_t bytes() const = 0;
};

namespace impl {

/// \brief Elements from one kept row to the next: its bytes are a multiple of 128.
std::int64_t row_pitch(std::int64_t width, ElementType type);

/// \brief Bytes that kept rows take; the largest number where they cannot be counted.
std::size_t row_store_bytes(std::int64_t rows, std::int64_t width, ElementType type);

/// \brief Host memory that a row store may take now, idle blocks of the pinned pool included.
template <class ExecutionSpace>
std::size_t row_store_budget();

/// \brief Rows in the host memory that suits the execution space: pageable or pinned.
/// \throws OutOfMemory
template <class ExecutionSpace>
std::unique_ptr<RowStore<ExecutionSpace>> make_row_store(ExecutionSpace const& exec,
                                                         std::int64_t rows, std::int64_t width,
                                                         ElementType type, TransferEngine engine);

#ifdef VPKL_ENABLE_CUDA
template <>
std::size_t row_store_budget<Kokkos::Cuda>();
template <>
std::unique_ptr<RowStore<Kokkos::Cuda>> make_row_store(Kokkos::Cuda const&, std::int64_t,
                                                       std::int64_t, ElementType, TransferEngine);
#endif

}  // namespace impl
}  // namespace vpkl
