// SPDX-License-Identifier: Apache-2.0
// Teacher rows in pinned host memory, and the ways to bring them back to a device.
#include <vpkl/core/copy_rows.hpp>
#include <vpkl/core/cuda/pinned_pool.hpp>
#include <vpkl/teacher/row_store.hpp>

#include <algorithm>
#include <cstring>
#include <limits>

namespace vpkl::impl {

namespace {

using cuda::Event;
using cuda::PinnedBlock;

/// Drivers refuse or crawl at single pinned allocations beyond this.
constexpr std::size_t largest_slab = std::size_t(64) << 30;
/// What cudaMemcpy2D accepts as a pitch.
constexpr std::int64_t largest_pitch = std::numeric_limits<std::int32_t>::max();
/// Below this many bytes a copy its fixed cost shows, and a kernel reading the bus is faster.
constexpr std::int64_t worth_a_copy = std::int64_t(1) << 20;
/// Thread blocks of a kernel on mapped memory: enough to fill the bus.
constexpr int mapped_teams = 528;

/// Two nested regular strides on either side of a copy, in bytes.
struct Group {
  unsigned char const* from = nullptr;
  unsigned char* to = nullptr;
  std::int64_t inner = 1, outer = 1;  ///< rows
  std::int64_t from_inner = 0, to_inner = 0;
  std::int64_t from_outer = 0, to_outer = 0;
  std::int64_t slab = 0;
};

/// One row to copy.
struct Piece {
  unsigned char const* from;
  unsigned char* to;
  std::int64_t slab;  ///< no copy may span two
};

/// \brief Joins rows at equal distances, and such runs at equal distances.
std::vector<Group> groups_of(std::vector<Piece> const& rows, std::int64_t row_bytes) {
  std::vector<Group> groups;
  std::size_t const count = rows.size();
  for (std::size_t first = 0; first < count;) {
    Group run;
    run.from = rows[first].from;
    run.to = rows[first].to;
    run.slab = rows[first].slab;
    std::size_t last = first + 1;
    if (last < count && rows[last].slab == run.slab) {
      std::int64_t const from_step = rows[last].from - rows[first].from;
      std::int64_t const to_step = rows[last].to - rows[first].to;
      if (from_step >= row_bytes && to_step >= row_bytes && from_step <= largest_pitch &&
          to_step <= largest_pitch) {
        while (last < count && rows[last].slab == run.slab &&
               rows[last].from - rows[last - 1].from == from_step &&
               rows[last].to - rows[last - 1].to == to_step)
          ++last;
        run.inner = static_cast<std::int64_t>(last - first);
        run.from_inner = from_step;
        run.to_inner = to_step;
      }
    }
    first = last;
    Group* const before = groups.empty() ? nullptr : &groups.back();
    bool const alike = before && before->slab == run.slab && run.inner > 1 &&
                       before->inner == run.inner && before->from_inner == run.from_inner &&
                       before->to_inner == run.to_inner;
    if (alike) {
      std::int64_t const from_step =
          run.from - (before->from + (before->outer - 1) * before->from_outer);
      std::int64_t const to_step = run.to - (before->to + (before->outer - 1) * before->to_outer);
      bool const extends = before->outer > 1
                               ? from_step == before->from_outer && to_step == before->to_outer
                               : from_step >= run.inner * run.from_inner &&
                                     to_step >= run.inner * run.to_inner &&
                                     from_step % run.from_inner == 0 && to_step % run.to_inner == 0;
      if (extends) {
        ++before->outer;
        before->from_outer = from_step;
        before->to_outer = to_step;
        continue;
      }
    }
    groups.push_back(run);
  }
  return groups;
}

void copy_2d(Group const& g, std::int64_t row_bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  auto const size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  bool const tight = g.inner == 1 || (g.from_inner == row_bytes && g.to_inner == row_bytes);
  if (tight && g.outer == 1) {
    VPKL_CHECK_CUDA(cudaMemcpyAsync(g.to, g.from, size(g.inner * row_bytes), kind, stream));
  } else if (g.outer == 1) {
    VPKL_CHECK_CUDA(cudaMemcpy2DAsync(g.to, size(g.to_inner), g.from, size(g.from_inner),
                                      size(row_bytes), size(g.inner), kind, stream));
  } else if (tight && g.from_outer <= largest_pitch && g.to_outer <= largest_pitch) {
    VPKL_CHECK_CUDA(cudaMemcpy2DAsync(g.to, size(g.to_outer), g.from, size(g.from_outer),
                                      size(g.inner * row_bytes), size(g.outer), kind, stream));
  } else if (!tight) {
    cudaMemcpy3DParms copy{};
    copy.srcPtr = make_cudaPitchedPtr(const_cast<unsigned char*>(g.from), size(g.from_inner),
                                      size(row_bytes), size(g.from_outer / g.from_inner));
    copy.dstPtr =
        make_cudaPitchedPtr(g.to, size(g.to_inner), size(row_bytes), size(g.to_outer / g.to_inner));
    copy.extent = make_cudaExtent(size(row_bytes), size(g.inner), size(g.outer));
    copy.kind = kind;
    VPKL_CHECK_CUDA(cudaMemcpy3DAsync(&copy, stream));
  } else {
    for (std::int64_t o = 0; o < g.outer; ++o)
      VPKL_CHECK_CUDA(cudaMemcpyAsync(g.to + o * g.to_outer, g.from + o * g.from_outer,
                                      size(g.inner * row_bytes), kind, stream));
  }
}

class PinnedRowStore final : public RowStore<Kokkos::Cuda> {
 public:
  PinnedRowStore(std::int64_t rows, std::int64_t width, ElementType type, TransferEngine engine)
      : width_(width),
        type_(type),
        pitch_(row_pitch(width, type)),
        bytes_(row_store_bytes(rows, width, type)),
        engine_(engine) {
    std::size_t const pitch_bytes = static_cast<std::size_t>(pitch_) * size_of(type);
    if (bytes_ == 0) return;
    rows_per_slab_ =
        std::max<std::int64_t>(1, static_cast<std::int64_t>(largest_slab / pitch_bytes));
    for (std::int64_t first = 0; first < rows; first += rows_per_slab_) {
      std::int64_t const count = std::min(rows_per_slab_, rows - first);
      slabs_.emplace_back(static_cast<std::size_t>(count) * pitch_bytes, PinnedBlock::User::stream);
    }
  }

  void store(Kokkos::Cuda const& exec, ConstRows const& rows,
             std::vector<std::int64_t> const* listed) override {
    if (bytes_ == 0) return;
    cudaStream_t const stream = exec.cuda_stream();
    for (PinnedBlock const& slab : slabs_)
      slab.order(stream);
    std::int64_t const count =
        listed ? static_cast<std::int64_t>(listed->size()) : rows.index.count;
    bool by_kernel = rows.type != type_ || rows.index.offsets != nullptr;
    if (!by_kernel) {
      std::vector<Piece> pieces;
      pieces.reserve(static_cast<std::size_t>(count));
      std::int64_t const size = static_cast<std::int64_t>(size_of(type_));
      for (std::int64_t slot = 0; slot < count; ++slot) {
        std::int64_t const slab = slab_of(slot);
        pieces.push_back({static_cast<unsigned char const*>(rows.data) +
                              rows.index(listed ? (*listed)[slot] : slot) * size,
                          address(slot, slab), slab});
      }
      auto const groups = groups_of(pieces, row_bytes());
      by_kernel = scattered(count, groups.size());
      if (!by_kernel)
        for (Group const& group : groups)
          copy_2d(group, row_bytes(), cudaMemcpyDeviceToHost, stream);
    }
    if (by_kernel) store_by_kernel(exec, rows, listed, count);
    stored_.record(stream);
    used_by(stream);
  }

  void fetch(Kokkos::Cuda const& exec, std::vector<std::int64_t> const& slots,
             Rows const& out) const override {
    if (bytes_ == 0 || out.index.count == 0) return;
    cudaStream_t const stream = exec.cuda_stream();
    stored_.order(stream);
    if (out.type != type_ || out.index.offsets != nullptr || engine_ == TransferEngine::mapped) {
      fetch_by_kernel(exec, slots, out);
    } else {
      std::vector<Piece> pieces;
      pieces.reserve(slots.size());
      std::int64_t const size = static_cast<std::int64_t>(size_of(type_));
      // Positions row by row: a division each would take longer than the driver's call.
      auto* outer = static_cast<unsigned char*>(out.data);
      std::int64_t inner = 0;
      for (std::int64_t const slot : slots) {
        if (inner == out.index.inner) {
          inner = 0;
          outer += out.index.outer_stride * size;
        }
        if (slot >= 0) {
          std::int64_t const slab = slab_of(slot);
          pieces.push_back(
              {address(slot, slab), outer + inner * out.index.inner_stride * size, slab});
        }
        ++inner;
      }
      fetch_by_copies(exec, slots, out, pieces);
    }
    used_by(stream);
  }

  std::size_t bytes() const override { return bytes_; }

 private:
  std::int64_t row_bytes() const { return width_ * static_cast<std::int64_t>(size_of(type_)); }

  std::int64_t slab_of(std::int64_t slot) const {
    return slabs_.size() == 1 ? 0 : slot / rows_per_slab_;
  }
  unsigned char* address(std::int64_t slot, std::int64_t slab) const {
    return slabs_[static_cast<std::size_t>(slab)].data() +
           (slot - slab * rows_per_slab_) * pitch_ * static_cast<std::int64_t>(size_of(type_));
  }

  bool scattered(std::int64_t rows, std::size_t groups) const {
    return rows * row_bytes() < worth_a_copy * static_cast<std::int64_t>(groups) && groups > 4;
  }

  /// Rows [first, last) of a slab.
  Rows slab_rows(std::size_t slab, std::int64_t count) const {
    return {slabs_[slab].data(), type_, width_, RowIndex::strided(count, pitch_)};
  }

  void used_by(cudaStream_t stream) const {
    for (PinnedBlock& slab : slabs_)
      slab.used_by(stream);
  }

  /// A list that a kernel reads where it lies, in pinned memory.
  static PinnedBlock pinned(std::int64_t const* values, std::size_t count) {
    PinnedBlock block(count * sizeof values[0], PinnedBlock::User::host);
    std::memcpy(block.data(), values, count * sizeof values[0]);
    return block;
  }

  void store_by_kernel(Kokkos::Cuda const& exec, ConstRows const& rows,
                       std::vector<std::int64_t> const* listed, std::int64_t count) {
    PinnedBlock list;
    if (listed)
      list = pinned(listed->data(), listed->size());
    else if (slabs_.size() > 1) {
      std::vector<std::int64_t> every(static_cast<std::size_t>(count));
      for (std::int64_t row = 0; row < count; ++row)
        every[static_cast<std::size_t>(row)] = row;
      list = pinned(every.data(), every.size());
    }
    auto const* const first = reinterpret_cast<std::int64_t const*>(list.data());
    for (std::size_t s = 0; s < slabs_.size(); ++s) {
      std::int64_t const begin = static_cast<std::int64_t>(s) * rows_per_slab_;
      cuda::copy_listed_rows(exec, "vpkl::TeacherCache::store", rows, first ? first + begin : first,
                             slab_rows(s, std::min(rows_per_slab_, count - begin)), width_,
                             mapped_teams);
    }
    list.used_by(exec.cuda_stream());
  }

  void fetch_by_kernel(Kokkos::Cuda const& exec, std::vector<std::int64_t> const& slots,
                       Rows const& out) const {
    std::vector<std::int64_t> of_slab;
    for (std::size_t s = 0; s < slabs_.size(); ++s) {
      std::int64_t const begin = static_cast<std::int64_t>(s) * rows_per_slab_;
      if (slabs_.size() > 1) {
        of_slab = slots;
        for (std::int64_t& slot : of_slab)
          slot = slot >= begin && slot < begin + rows_per_slab_ ? slot - begin : -1;
      }
      PinnedBlock list = pinned(slabs_.size() > 1 ? of_slab.data() : slots.data(), slots.size());
      cuda::copy_listed_rows(exec, "vpkl::TeacherCache::fetch", slab_rows(s, rows_per_slab_),
                             reinterpret_cast<std::int64_t const*>(list.data()), out, width_,
                             mapped_teams);
      list.used_by(exec.cuda_stream());
    }
  }

  void fetch_by_copies(Kokkos::Cuda const& exec, std::vector<std::int64_t> const& slots,
                       Rows const& out, std::vector<Piece>& pieces) const {
    cudaStream_t const stream = exec.cuda_stream();
    std::int64_t const count = static_cast<std::int64_t>(pieces.size());
    std::size_t const packed = pieces.size() * static_cast<std::size_t>(row_bytes());
    auto const copy_groups = [&](std::vector<Group> const& groups) {
      for (Group const& group : groups)
        copy_2d(group, row_bytes(), cudaMemcpyHostToDevice, stream);
    };
    switch (engine_) {
      case TransferEngine::pageable: {
        std::unique_ptr<unsigned char[]> const fresh(new unsigned char[packed]);
        pack(pieces, fresh.get());
        copy_groups(groups_of(pieces, row_bytes()));
        fence(exec, "vpkl::TeacherCache::fetch");
        return;
      }
      case TransferEngine::staged: {
        PinnedBlock staging(packed, PinnedBlock::User::host);
        pack(pieces, staging.data());
        copy_groups(groups_of(pieces, row_bytes()));
        staging.used_by(stream);
        return;
      }
      case TransferEngine::pinned_rows:
        for (Piece const& row : pieces)
          VPKL_CHECK_CUDA(cudaMemcpyAsync(row.to, row.from, static_cast<std::size_t>(row_bytes()),
                                          cudaMemcpyHostToDevice, stream));
        return;
      default: break;
    }
    auto const groups = groups_of(pieces, row_bytes());
    if (engine_ == TransferEngine::automatic && scattered(count, groups.size()))
      fetch_by_kernel(exec, slots, out);
    else
      copy_groups(groups);
  }

  /// Copies rows one after the other to `to`, and lets the pieces start there.
  void pack(std::vector<Piece>& pieces, unsigned char* to) const {
    stored_.wait();
    for (Piece& row : pieces) {
      std::memcpy(to, row.from, static_cast<std::size_t>(row_bytes()));
      row.from = to;
      row.slab = 0;
      to += row_bytes();
    }
  }

  std::int64_t width_;
  ElementType type_;
  std::int64_t pitch_;  ///< elements
  std::size_t bytes_;
  TransferEngine engine_;
  std::int64_t rows_per_slab_ = 1;
  mutable std::vector<PinnedBlock> slabs_;  ///< uses are noted by fetches too
  Event stored_;
};

}  // namespace

template <>
std::size_t row_store_budget<Kokkos::Cuda>() {
  std::size_t const available = available_host_memory(), idle = cuda::idle_pinned_memory();
  return available > std::numeric_limits<std::size_t>::max() - idle ? available : available + idle;
}

template <>
std::unique_ptr<RowStore<Kokkos::Cuda>> make_row_store(Kokkos::Cuda const&, std::int64_t rows,
                                                       std::int64_t width, ElementType type,
                                                       TransferEngine engine) {
  return std::make_unique<PinnedRowStore>(rows, width, type, engine);
}

}  // namespace vpkl::impl
