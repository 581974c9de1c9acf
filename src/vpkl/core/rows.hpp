// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Row sets: how every operation is told which rows of a tensor it works on.
#pragma once

#include <vpkl/core/element_type.hpp>
#include <vpkl/core/error.hpp>
#include <vpkl/core/kokkos.hpp>

#include <cstdint>
#include <string>

namespace vpkl {

/// Element offset of each row from a base pointer: two nested regular strides (the common case:
/// batch and position), or one explicit 64-bit offset a row.
struct RowIndex {
  std::int64_t count = 0;                 ///< number of rows
  std::int64_t inner = 1;                 ///< rows per outer step; row r is (r / inner, r % inner)
  std::int64_t outer_stride = 0;          ///< elements
  std::int64_t inner_stride = 0;          ///< elements
  std::int64_t const* offsets = nullptr;  ///< `count` elements in the execution space's memory

  /// \brief Element offset of a row in [0, count).
  KOKKOS_FORCEINLINE_FUNCTION std::int64_t operator()(std::int64_t row) const {
    return offsets ? offsets[row] : (row / inner) * outer_stride + (row % inner) * inner_stride;
  }
  /// Rows at a fixed distance.
  static RowIndex strided(std::int64_t count, std::int64_t stride) {
    return RowIndex{count, count > 0 ? count : 1, 0, stride, nullptr};
  }
};

/// Rows to read. Non-owning: memory and offsets must outlive the work enqueued on them.
struct ConstRows {
  void const* data = nullptr;            ///< in the execution space's memory
  ElementType type = ElementType::fp32;  ///< of every element
  std::int64_t width = 0;                ///< physical columns of a row; nothing beyond is read
  RowIndex index;                        ///< where the rows start
};

/// Rows to write. Rows must not overlap each other.
struct Rows {
  void* data = nullptr;                  ///< in the execution space's memory
  ElementType type = ElementType::fp32;  ///< of every element
  std::int64_t width = 0;                ///< physical columns of a row; nothing beyond is touched
  RowIndex index;                        ///< where the rows start

  /// \brief What can be written can be read.
  operator ConstRows() const { return {data, type, width, index}; }
};

/// \brief Refuses row sets no operation can work on: negative sizes, a null pointer with rows to
/// visit, a base pointer not aligned to its element, rows that overlap their neighbours.
/// \param[in] rows row set; its offsets, if any, are not looked at
/// \param[in] what name of the argument, used in messages
/// \throws InvalidArgument naming argument and value
void check_rows(ConstRows const& rows, std::string const& what);

namespace impl {

[[noreturn]] void refuse_column_stride(std::int64_t stride);

template <class View>
ConstRows rows_of_view(View const& view) {
  using Value = typename View::non_const_value_type;
  constexpr int rank = static_cast<int>(View::rank);
  static_assert(rank == 2 || rank == 3, "vpkl::rows_of: the view must be [rows, V] or [B, T, V]");
  std::int64_t strides[9] = {};
  view.stride(strides);
  std::int64_t const width = static_cast<std::int64_t>(view.extent(rank - 1));
  if (width > 1 && strides[rank - 1] != 1) refuse_column_stride(strides[rank - 1]);
  ConstRows rows;
  rows.data = view.data();
  rows.type = ElementTraits<Value>::type;
  rows.width = width;
  std::int64_t const outer = static_cast<std::int64_t>(view.extent(0));
  if constexpr (rank == 2) {
    rows.index = RowIndex::strided(outer, strides[0]);
  } else {
    std::int64_t const inner = static_cast<std::int64_t>(view.extent(1));
    rows.index = RowIndex{outer * inner, inner > 0 ? inner : 1, strides[0], strides[1], nullptr};
  }
  return rows;
}

}  // namespace impl

/// \brief The rows of a view `[rows, V]` or `[B, T, V]` (row = b·T + t) of float, bfloat16 or half.
/// Any row strides; the columns of a row must be contiguous.
/// \throws InvalidArgument for a column stride other than 1 (a transposed view)
template <class View>
ConstRows const_rows(View const& view) {
  return impl::rows_of_view(view);
}

/// \brief As const_rows, for output.
template <class View>
Rows rows(View const& view) {
  static_assert(!std::is_const<typename View::value_type>::value,
                "vpkl::rows: the view's elements are const");
  ConstRows const r = impl::rows_of_view(view);
  return {const_cast<void*>(r.data), r.type, r.width, r.index};
}

}  // namespace vpkl
