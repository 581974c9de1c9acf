// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/rows.hpp>

#include <fmt/format.h>

namespace vpkl {

void check_rows(ConstRows const& rows, std::string const& what) {
  RowIndex const& index = rows.index;
  if (index.count < 0)
    throw InvalidArgument(
        fmt::format("{}: row count is {}, expected at least 0", what, index.count));
  if (rows.width < 0)
    throw InvalidArgument(fmt::format("{}: width is {}, expected at least 0", what, rows.width));
  if (index.count == 0 || rows.width == 0) return;
  if (rows.data == nullptr)
    throw InvalidArgument(fmt::format("{}: data is null, expected {} rows of {} columns", what,
                                      index.count, rows.width));
  if (reinterpret_cast<std::uintptr_t>(rows.data) % size_of(rows.type) != 0)
    throw InvalidArgument(fmt::format("{}: address {} is not aligned to its {} elements", what,
                                      rows.data, to_string(rows.type)));
  if (index.offsets != nullptr) return;
  if (index.inner < 1)
    throw InvalidArgument(
        fmt::format("{}: rows per outer step is {}, expected at least 1", what, index.inner));
  if (index.count > 1 && index.inner > 1 && index.inner_stride < rows.width)
    throw InvalidArgument(
        fmt::format("{}: row stride is {} elements, expected at least the width {}", what,
                    index.inner_stride, rows.width));
  if (index.count > index.inner && index.outer_stride < rows.width)
    throw InvalidArgument(
        fmt::format("{}: batch stride is {} elements, expected at least the width {}", what,
                    index.outer_stride, rows.width));
}

namespace impl {

void refuse_column_stride(std::int64_t stride) {
  throw InvalidArgument(
      fmt::format("the view's last dimension has stride {}, expected 1: a row's columns must be "
                  "contiguous (a transposed view must be copied first)",
                  stride));
}

}  // namespace impl
}  // namespace vpkl
