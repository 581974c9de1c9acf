// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/allocate.hpp>
#include <vpkl/teacher/row_store.hpp>

#include <cstring>
#include <limits>

namespace vpkl::impl {

namespace {

/// Copies row listed[i], or i without a list, to row i; negative entries are passed over.
struct CopyListed {
  ConstRows from;
  std::int64_t const* listed;
  Rows to;

  void operator()(std::int64_t row) const {
    std::int64_t const source_row = listed ? listed[row] : row;
    if (source_row < 0) return;
    dispatch(from.type, [&](auto source) {
      dispatch(to.type, [&](auto target) {
        using From = decltype(source);
        using To = decltype(target);
        From const* const a = static_cast<From const*>(from.data) + from.index(source_row);
        To* const b = static_cast<To*>(to.data) + to.index(row);
        if constexpr (std::is_same<From, To>::value)
          std::memcpy(b, a, static_cast<std::size_t>(from.width) * sizeof(To));
        else
          for (std::int64_t c = 0; c < from.width; ++c)
            b[c] = ElementTraits<To>::from_float(ElementTraits<From>::to_float(a[c]));
      });
    });
  }
};

/// One block of host memory.
template <class ExecutionSpace>
class HostRowStore final : public RowStore<ExecutionSpace> {
 public:
  HostRowStore(ExecutionSpace const& exec, std::int64_t rows, std::int64_t width, ElementType type)
      : exec_(exec),
        memory_(
            allocate_bytes(exec, "vpkl::TeacherCache::rows", row_store_bytes(rows, width, type))),
        rows_{memory_.data(), type, width, RowIndex::strided(rows, row_pitch(width, type))} {}
  ~HostRowStore() override { fence(exec_, "vpkl::TeacherCache::free"); }

  void store(ExecutionSpace const& exec, ConstRows const& rows,
             std::vector<std::int64_t> const* listed) override {
    copy(exec, "vpkl::TeacherCache::store", rows, listed, rows_);
  }
  void fetch(ExecutionSpace const& exec, std::vector<std::int64_t> const& slots,
             Rows const& out) const override {
    copy(exec, "vpkl::TeacherCache::fetch", rows_, &slots, out);
  }
  std::size_t bytes() const override { return memory_.size(); }

 private:
  static void copy(ExecutionSpace const& exec, char const* label, ConstRows const& from,
                   std::vector<std::int64_t> const* listed, Rows const& to) {
    if (to.index.count == 0 || from.width == 0) return;
    Kokkos::parallel_for(label, RangePolicy64<ExecutionSpace>(exec, 0, to.index.count),
                         CopyListed{from, listed ? listed->data() : nullptr, to});
    // The list is the caller's.
    if (listed) impl::fence(exec, label);
  }

  ExecutionSpace exec_;
  Kokkos::View<unsigned char*, Kokkos::HostSpace> memory_;
  Rows rows_;
};

}  // namespace

std::int64_t row_pitch(std::int64_t width, ElementType type) {
  constexpr std::size_t line = 128;
  std::size_t const per_line = line / size_of(type);
  return static_cast<std::int64_t>((static_cast<std::size_t>(width) + per_line - 1) / per_line *
                                   per_line);
}

std::size_t row_store_bytes(std::int64_t rows, std::int64_t width, ElementType type) {
  std::size_t const count = static_cast<std::size_t>(rows);
  std::size_t const row = static_cast<std::size_t>(row_pitch(width, type)) * size_of(type);
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  return count > 0 && row > most / count ? most : count * row;
}

template <class ExecutionSpace>
std::size_t row_store_budget() {
  return available_host_memory();
}

template <class ExecutionSpace>
std::unique_ptr<RowStore<ExecutionSpace>> make_row_store(ExecutionSpace const& exec,
                                                         std::int64_t rows, std::int64_t width,
                                                         ElementType type, TransferEngine) {
  return std::make_unique<HostRowStore<ExecutionSpace>>(exec, rows, width, type);
}

#define VPKL_INSTANTIATE(Exec)                                                                     \
  template std::size_t row_store_budget<Exec>();                                                   \
  template std::unique_ptr<RowStore<Exec>> make_row_store(Exec const&, std::int64_t, std::int64_t, \
                                                          ElementType, TransferEngine);
VPKL_FOREACH_HOST_SPACE(VPKL_INSTANTIATE)
#undef VPKL_INSTANTIATE

}  // namespace vpkl::impl
