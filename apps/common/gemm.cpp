// SPDX-License-Identifier: Apache-2.0
#include "gemm.hpp"

#include <KokkosBlas3_gemm.hpp>

#include <algorithm>

namespace vpkl::apps {

namespace {

// A tile of fp32 copies stays in cache; the operands themselves are never copied whole.
constexpr std::int64_t tile_rows = 256;
constexpr std::int64_t tile_columns = 2048;

template <class ExecutionSpace>
using Tile = Kokkos::View<float**, Kokkos::LayoutRight, typename ExecutionSpace::memory_space>;

template <class ExecutionSpace>
using UnmanagedTile =
    Kokkos::View<float**, Kokkos::LayoutRight, typename ExecutionSpace::memory_space,
                 Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

template <class T, bool to_tile>
struct ConvertTile {
  T* matrix;
  std::int64_t stride;
  float* tile;
  std::int64_t columns;
  void operator()(std::int64_t row) const {
    T* const m = matrix + row * stride;
    float* const t = tile + row * columns;
    for (std::int64_t c = 0; c < columns; ++c) {
      if constexpr (to_tile)
        t[c] = ElementTraits<T>::to_float(m[c]);
      else
        m[c] = ElementTraits<T>::from_float(t[c]);
    }
  }
};

/// Converts between part of a matrix and an fp32 tile of its size.
template <bool to_tile, class ExecutionSpace>
void convert(ExecutionSpace const& exec, Matrix const& matrix, std::int64_t first_row,
             std::int64_t first_column, Tile<ExecutionSpace> const& tile) {
  std::int64_t const rows = static_cast<std::int64_t>(tile.extent(0));
  std::int64_t const columns = static_cast<std::int64_t>(tile.extent(1));
  dispatch(matrix.type, [&](auto element) {
    using T = decltype(element);
    Kokkos::parallel_for(
        to_tile ? "vpkl::apps::gemm::load" : "vpkl::apps::gemm::store",
        Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0, rows),
        ConvertTile<T, to_tile>{
            static_cast<T*>(matrix.data) + first_row * matrix.columns + first_column,
            matrix.columns, tile.data(), columns});
  });
}

template <class ExecutionSpace>
Tile<ExecutionSpace> load(ExecutionSpace const& exec, Matrix const& matrix, std::int64_t first_row,
                          std::int64_t rows, std::int64_t first_column, std::int64_t columns) {
  Tile<ExecutionSpace> tile(
      Kokkos::view_alloc(exec, "vpkl::apps::gemm::tile", Kokkos::WithoutInitializing), rows,
      columns);
  convert<true>(exec, matrix, first_row, first_column, tile);
  return tile;
}

}  // namespace

template <class ExecutionSpace>
void head_forward(ExecutionSpace const& exec, Matrix const& hidden, Matrix const& head,
                  Matrix const& logits) {
  for (std::int64_t r = 0; r < hidden.rows; r += tile_rows) {
    std::int64_t const rows = std::min(tile_rows, hidden.rows - r);
    auto const a = load(exec, hidden, r, rows, 0, hidden.columns);
    for (std::int64_t v = 0; v < head.rows; v += tile_columns) {
      std::int64_t const columns = std::min(tile_columns, head.rows - v);
      auto const b = load(exec, head, v, columns, 0, head.columns);
      Tile<ExecutionSpace> c("vpkl::apps::gemm::tile", rows, columns);
      exec.fence();
      KokkosBlas::gemm("N", "T", 1.0f, a, b, 0.0f, c);
      convert<false>(exec, logits, r, v, c);
      exec.fence();
    }
  }
}

template <class ExecutionSpace>
void head_backward(ExecutionSpace const& exec, Matrix const& gradient, Matrix const& hidden,
                   Matrix const& head_gradient) {
  for (std::int64_t r = 0; r < hidden.rows; r += tile_rows) {
    std::int64_t const rows = std::min(tile_rows, hidden.rows - r);
    auto const h = load(exec, hidden, r, rows, 0, hidden.columns);
    for (std::int64_t v = 0; v < gradient.columns; v += tile_columns) {
      std::int64_t const columns = std::min(tile_columns, gradient.columns - v);
      auto const g = load(exec, gradient, r, rows, v, columns);
      UnmanagedTile<ExecutionSpace> const part(
          static_cast<float*>(head_gradient.data) + v * head_gradient.columns, columns,
          head_gradient.columns);
      exec.fence();
      KokkosBlas::gemm("T", "N", 1.0f, g, h, 1.0f, part);
      exec.fence();
    }
  }
}

using Exec = Kokkos::DefaultExecutionSpace;
template void head_forward(Exec const&, Matrix const&, Matrix const&, Matrix const&);
template void head_backward(Exec const&, Matrix const&, Matrix const&, Matrix const&);

}  // namespace vpkl::apps
