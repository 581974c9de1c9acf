// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/allocate.hpp>
#include <vpkl/divergence/kernels.hpp>
#include <vpkl/teacher/kept_statistics.hpp>

#ifdef VPKL_ENABLE_CUDA
#include <vpkl/core/cuda/pinned_pool.hpp>

#include <cstring>
#endif

namespace vpkl::impl {

namespace {

/// A list on the host that enqueued work may read until end().
template <class ExecutionSpace>
class ReadableList {
 public:
  explicit ReadableList(std::vector<std::int64_t> const& list) : list_(list) {}
  std::int64_t const* data() const { return list_.data(); }
  void end(ExecutionSpace const& exec) { fence(exec, "vpkl::TeacherCache::statistics"); }

 private:
  std::vector<std::int64_t> const& list_;
};

#ifdef VPKL_ENABLE_CUDA
template <>
class ReadableList<Kokkos::Cuda> {
 public:
  explicit ReadableList(std::vector<std::int64_t> const& list)
      : block_(list.size() * sizeof list[0], cuda::PinnedBlock::User::host) {
    std::memcpy(block_.data(), list.data(), list.size() * sizeof list[0]);
  }
  std::int64_t const* data() const { return reinterpret_cast<std::int64_t const*>(block_.data()); }
  void end(Kokkos::Cuda const& exec) { block_.used_by(exec.cuda_stream()); }

 private:
  cuda::PinnedBlock block_;
};
#endif

struct OffsetsOfListed {
  RowIndex index;
  std::int64_t const* listed;
  std::int64_t* offsets;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const { offsets[i] = index(listed[i]); }
};

}  // namespace

template <class ExecutionSpace>
void KeptStatistics<ExecutionSpace>::make(ExecutionSpace const& exec, ConstRows const& logits,
                                          std::vector<std::int64_t> const* listed,
                                          std::int64_t columns, ElementType type,
                                          double temperature) {
  std::int64_t const rows = listed ? static_cast<std::int64_t>(listed->size()) : logits.index.count;
  if (rows == 0) return;
  std::size_t const bytes = static_cast<std::size_t>(rows) *
                            (sizeof(RowStatistics) + (listed ? sizeof(std::int64_t) : 0));
  if (memory_.size() < bytes) memory_ = {};
  if (memory_.size() < bytes)
    memory_ = allocate_bytes(exec, "vpkl::TeacherCache::statistics", bytes);
  turn_.begin(exec);
  auto* const records = reinterpret_cast<RowStatistics*>(memory_.data());
  if (listed) {
    auto* const offsets = reinterpret_cast<std::int64_t*>(records + rows);
    ReadableList<ExecutionSpace> list(*listed);
    Kokkos::parallel_for("vpkl::TeacherCache::statistics",
                         RangePolicy64<ExecutionSpace>(exec, 0, rows),
                         OffsetsOfListed{logits.index, list.data(), offsets});
    list.end(exec);
    ConstRows kept = logits;
    kept.index = RowIndex{};
    kept.index.count = rows;
    kept.index.offsets = offsets;
    teacher_statistics(exec, kept, columns, type, temperature, records);
  } else {
    teacher_statistics(exec, logits, columns, type, temperature, records);
  }
  turn_.end(exec);
}

#define VPKL_INSTANTIATE(Exec) template class KeptStatistics<Exec>;
VPKL_FOREACH_EXECUTION_SPACE(VPKL_INSTANTIATE)
#undef VPKL_INSTANTIATE

}  // namespace vpkl::impl
