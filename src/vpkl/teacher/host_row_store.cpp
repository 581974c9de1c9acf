// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/allocate.hpp>
#include <vpkl/core/copy_rows.hpp>
#include <vpkl/teacher/host_row_store.hpp>

#include <cstring>
#include <limits>

namespace vpkl::impl {

namespace {

std::int64_t pitch_of(std::int64_t width, ElementType type) {
  std::size_t const size = size_of(type);
  std::size_t const per_line =
      HostRowStore<Kokkos::DefaultHostExecutionSpace>::pitch_alignment / size;
  return static_cast<std::int64_t>((static_cast<std::size_t>(width) + per_line - 1) / per_line *
                                   per_line);
}

/// Copies slot slots[i] to row i, or passes over it.
struct FetchSlots {
  ConstRows held;
  Rows out;
  std::int64_t const* slots;

  void operator()(std::int64_t row) const {
    if (slots[row] < 0) return;
    dispatch(held.type, [&](auto source) {
      dispatch(out.type, [&](auto target) {
        using From = decltype(source);
        using To = decltype(target);
        From const* const from = static_cast<From const*>(held.data) + held.index(slots[row]);
        To* const to = static_cast<To*>(out.data) + out.index(row);
        if constexpr (std::is_same<From, To>::value)
          std::memcpy(to, from, static_cast<std::size_t>(held.width) * sizeof(To));
        else
          for (std::int64_t c = 0; c < held.width; ++c)
            to[c] = ElementTraits<To>::from_float(ElementTraits<From>::to_float(from[c]));
      });
    });
  }
};

}  // namespace

template <class ExecutionSpace>
std::size_t HostRowStore<ExecutionSpace>::bytes_for(std::int64_t rows, std::int64_t width,
                                                    ElementType type) {
  std::size_t const count = static_cast<std::size_t>(rows);
  std::size_t const row = static_cast<std::size_t>(pitch_of(width, type)) * size_of(type);
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  return count > 0 && row > most / count ? most : count * row;
}

template <class ExecutionSpace>
HostRowStore<ExecutionSpace>::HostRowStore(ExecutionSpace const& exec, std::int64_t rows,
                                           std::int64_t width, ElementType type)
    : exec_(exec),
      rows_(rows),
      width_(width),
      type_(type),
      pitch_(pitch_of(width, type)),
      memory_(allocate_bytes(exec, "vpkl::TeacherCache::rows", bytes_for(rows, width, type))) {}

template <class ExecutionSpace>
HostRowStore<ExecutionSpace>::~HostRowStore() {
  fence(exec_, "vpkl::TeacherCache::free");
}

template <class ExecutionSpace>
Rows HostRowStore<ExecutionSpace>::all_rows() const {
  return {memory_.data(), type_, width_, RowIndex::strided(rows_, pitch_)};
}

template <class ExecutionSpace>
void HostRowStore<ExecutionSpace>::store(ExecutionSpace const& exec, ConstRows const& rows) {
  copy_rows(exec, "vpkl::TeacherCache::store", rows, 0, all_rows(), 0, width_);
}

template <class ExecutionSpace>
void HostRowStore<ExecutionSpace>::fetch(ExecutionSpace const& exec,
                                         std::vector<std::int64_t> const& slots,
                                         Rows const& out) const {
  std::int64_t const count = static_cast<std::int64_t>(slots.size());
  if (count == 0 || width_ == 0) return;
  Kokkos::parallel_for("vpkl::TeacherCache::fetch", RangePolicy64<ExecutionSpace>(exec, 0, count),
                       FetchSlots{all_rows(), out, slots.data()});
  // The slot list is the caller's.
  fence(exec, "vpkl::TeacherCache::fetch");
}

#define VPKL_INSTANTIATE(Exec) template class HostRowStore<Exec>;
VPKL_FOREACH_EXECUTION_SPACE(VPKL_INSTANTIATE)
#undef VPKL_INSTANTIATE

}  // namespace vpkl::impl
