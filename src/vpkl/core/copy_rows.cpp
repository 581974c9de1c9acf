// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/copy_rows.hpp>

#include <cstring>

namespace vpkl::impl {

namespace {

template <class From, class To>
struct ConvertRows {
  From const* from;
  RowIndex from_index;
  To* to;
  RowIndex to_index;
  std::int64_t columns;
  float const* weight;

  void operator()(std::int64_t row) const {
    if (weight && weight[row] == 0) return;
    From const* const source = from + from_index(row);
    To* const target = to + to_index(row);
    if constexpr (std::is_same<From, To>::value) {
      std::memcpy(target, source, static_cast<std::size_t>(columns) * sizeof(To));
    } else {
      for (std::int64_t c = 0; c < columns; ++c)
        target[c] = ElementTraits<To>::from_float(ElementTraits<From>::to_float(source[c]));
    }
  }
};

struct ZeroRows {
  Rows rows;
  std::uint8_t const* selected;

  void operator()(std::int64_t row) const {
    std::size_t const size = size_of(rows.type);
    if (selected[row])
      std::memset(
          static_cast<unsigned char*>(rows.data) + static_cast<std::size_t>(rows.index(row)) * size,
          0, static_cast<std::size_t>(rows.width) * size);
  }
};

}  // namespace

template <class ExecutionSpace>
int copy_rows(ExecutionSpace const& exec, char const* label, ConstRows const& from,
              std::int64_t from_first, Rows const& to, std::int64_t to_first, std::int64_t columns,
              float const* weight) {
  if (from.index.count == 0 || columns == 0) return 0;
  dispatch(from.type, [&](auto source) {
    dispatch(to.type, [&](auto target) {
      using From = decltype(source);
      using To = decltype(target);
      Kokkos::parallel_for(
          label, RangePolicy64<ExecutionSpace>(exec, 0, from.index.count),
          ConvertRows<From, To>{static_cast<From const*>(from.data) + from_first, from.index,
                                static_cast<To*>(to.data) + to_first, to.index, columns, weight});
    });
  });
  return 1;
}

template <class ExecutionSpace>
void zero_rows(ExecutionSpace const& exec, char const* label, Rows const& rows,
               std::uint8_t const* selected) {
  if (rows.index.count == 0 || rows.width == 0) return;
  Kokkos::parallel_for(label, RangePolicy64<ExecutionSpace>(exec, 0, rows.index.count),
                       ZeroRows{rows, selected});
}

#define VPKL_INSTANTIATE(Exec)                                                                  \
  template int copy_rows(Exec const&, char const*, ConstRows const&, std::int64_t, Rows const&, \
                         std::int64_t, std::int64_t, float const*);                             \
  template void zero_rows(Exec const&, char const*, Rows const&, std::uint8_t const*);
VPKL_FOREACH_HOST_SPACE(VPKL_INSTANTIATE)
#undef VPKL_INSTANTIATE

}  // namespace vpkl::impl
