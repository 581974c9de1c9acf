// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/copy_rows.hpp>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace vpkl::impl {

namespace {

using Policy = Kokkos::TeamPolicy<Kokkos::Cuda, Kokkos::IndexType<std::int64_t>>;
using Member = Policy::member_type;

constexpr int team_size = 256;
constexpr int words_per_thread = 4;  // loads in flight
constexpr int most_teams = 1 << 20;

template <std::size_t bytes>
using Word = std::conditional_t<bytes == 16, uint4, uint2>;

KOKKOS_FORCEINLINE_FUNCTION bool aligned(void const* address, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
}

KOKKOS_FORCEINLINE_FUNCTION std::int64_t offset_of(RowIndex const& index, std::int64_t row) {
  return !index.offsets && row < index.inner ? row * index.inner_stride : index(row);
}

/// Task number as row and piece. Blocks are short-lived: a 64-bit division would show.
struct Place {
  std::int64_t row, piece;
  KOKKOS_FORCEINLINE_FUNCTION Place(std::int64_t task, std::int64_t pieces) {
    constexpr std::int64_t small = std::int64_t(1) << 32;
    row = task < small && pieces < small
              ? static_cast<std::uint32_t>(task) / static_cast<std::uint32_t>(pieces)
              : task / pieces;
    piece = task - row * pieces;
  }
};

/// Copies rows in pieces of team_size · words_per_thread groups of `group` elements, a piece a
/// task. A group is one load and one store of 8 or 16 bytes; where `wide` does not promise that
/// all rows start at such boundaries, as far as each one's addresses allow.
template <class From, class To, bool wide>
struct CopyRows {
  static constexpr int group =
      static_cast<int>(16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To)));
  static constexpr std::int64_t piece = std::int64_t(group) * team_size * words_per_thread;

  From const* from;
  RowIndex from_index;
  std::int64_t const* listed;  ///< row of `from` for each row of `to`, or null for the same
  float const* weight;         ///< rows of weight 0 are passed over; null for none
  To* to;
  RowIndex to_index;
  std::int64_t rows, columns, pieces;

  KOKKOS_FUNCTION void operator()(Member const& team) const {
    for (std::int64_t task = team.league_rank(); task < rows * pieces; task += team.league_size()) {
      Place const place(task, pieces);
      std::int64_t const first = place.piece * piece;
      std::int64_t const source = listed ? listed[place.row] : place.row;
      if (source < 0 || (weight && weight[place.row] == 0)) continue;
      copy(team.team_rank(), from + offset_of(from_index, source) + first,
           to + offset_of(to_index, place.row) + first,
           columns - first < piece ? columns - first : piece);
    }
  }

  KOKKOS_FORCEINLINE_FUNCTION static To converted(From value) {
    if constexpr (std::is_same<From, To>::value)
      return value;
    else
      return ElementTraits<To>::from_float(ElementTraits<From>::to_float(value));
  }

  KOKKOS_FORCEINLINE_FUNCTION static void copy(int thread, From const* source, To* target,
                                               std::int64_t count) {
    using Load = Word<sizeof(From) * group>;
    using Store = Word<sizeof(To) * group>;
    struct alignas(Load) In {
      From element[group];
    };
    struct alignas(Store) Out {
      To element[group];
    };
    int const groups = static_cast<int>(count / group);
    bool const wide_load = wide || aligned(source, sizeof(Load));
    bool const wide_store = wide || aligned(target, sizeof(Store));
    In in[words_per_thread];
    for (int w = 0; w < words_per_thread; ++w) {
      int const g = thread + w * team_size;
      if (g >= groups) break;
      if (wide_load)
        in[w] = bit_cast<In>(reinterpret_cast<Load const*>(source)[g]);
      else
        for (int i = 0; i < group; ++i)
          in[w].element[i] = source[g * group + i];
    }
    for (int w = 0; w < words_per_thread; ++w) {
      int const g = thread + w * team_size;
      if (g >= groups) break;
      Out out;
      for (int i = 0; i < group; ++i)
        out.element[i] = converted(in[w].element[i]);
      if (wide_store)
        reinterpret_cast<Store*>(target)[g] = bit_cast<Store>(out);
      else
        for (int i = 0; i < group; ++i)
          target[g * group + i] = out.element[i];
    }
    std::int64_t const rest = std::int64_t(groups) * group + thread;
    if (rest < count) target[rest] = converted(source[rest]);
  }
};

struct ZeroRows {
  static constexpr std::int64_t piece = std::int64_t(16) * team_size * 8;  ///< bytes

  unsigned char* data;
  std::int64_t size;  ///< bytes of an element
  RowIndex index;
  std::uint8_t const* selected;
  std::int64_t rows, bytes, pieces;

  KOKKOS_FUNCTION void operator()(Member const& team) const {
    for (std::int64_t task = team.league_rank(); task < rows * pieces; task += team.league_size()) {
      Place const place(task, pieces);
      std::int64_t const first = place.piece * piece;
      if (!selected[place.row]) continue;
      zero(team.team_rank(), data + offset_of(index, place.row) * size + first,
           bytes - first < piece ? bytes - first : piece);
    }
  }

  KOKKOS_FUNCTION static void zero(int thread, unsigned char* target, std::int64_t count) {
    std::int64_t const to_boundary =
        (16 - static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(target) % 16)) % 16;
    std::int64_t const head = to_boundary < count ? to_boundary : count;
    std::int64_t const words = (count - head) / 16;
    if (thread < head) target[thread] = 0;
    auto* const middle = reinterpret_cast<uint4*>(target + head);
    for (std::int64_t w = thread; w < words; w += team_size)
      middle[w] = uint4{0, 0, 0, 0};
    std::int64_t const rest = head + words * 16 + thread;
    if (rest < count) target[rest] = 0;
  }
};

/// Whether every row starts at a multiple of 16 bytes.
bool all_aligned(void const* data, std::size_t size, RowIndex const& index) {
  auto const strided = [&](std::int64_t stride) {
    return static_cast<std::size_t>(stride) * size % 16 == 0;
  };
  return aligned(data, 16) && !index.offsets && (index.inner == 1 || strided(index.inner_stride)) &&
         (index.count <= index.inner || strided(index.outer_stride));
}

int launch_copy(Kokkos::Cuda const& exec, char const* label, ConstRows const& from,
                std::int64_t from_first, std::int64_t const* listed, float const* weight,
                Rows const& to, std::int64_t to_first, std::int64_t rows, std::int64_t columns,
                int teams) {
  if (rows == 0 || columns == 0) return 0;
  auto const launch = [&](auto const& functor) {
    int const league = static_cast<int>(std::min<std::int64_t>(rows * functor.pieces, teams));
    Kokkos::parallel_for(label, Policy(exec, league, team_size), functor);
  };
  dispatch(from.type, [&](auto source) {
    dispatch(to.type, [&](auto target) {
      using From = decltype(source);
      using To = decltype(target);
      using General = CopyRows<From, To, false>;
      using Wide = CopyRows<From, To, std::is_same<From, To>::value>;
      From const* const a = static_cast<From const*>(from.data) + from_first;
      To* const b = static_cast<To*>(to.data) + to_first;
      std::int64_t const pieces = (columns + General::piece - 1) / General::piece;
      if (all_aligned(a, sizeof(From), from.index) && all_aligned(b, sizeof(To), to.index))
        launch(Wide{a, from.index, listed, weight, b, to.index, rows, columns, pieces});
      else
        launch(General{a, from.index, listed, weight, b, to.index, rows, columns, pieces});
    });
  });
  return 1;
}

}  // namespace

template <>
int copy_rows(Kokkos::Cuda const& exec, char const* label, ConstRows const& from,
              std::int64_t from_first, Rows const& to, std::int64_t to_first, std::int64_t columns,
              float const* weight) {
  return launch_copy(exec, label, from, from_first, nullptr, weight, to, to_first, from.index.count,
                     columns, most_teams);
}

template <>
void zero_rows(Kokkos::Cuda const& exec, char const* label, Rows const& rows,
               std::uint8_t const* selected) {
  std::int64_t const count = rows.index.count;
  std::int64_t const size = static_cast<std::int64_t>(size_of(rows.type));
  if (count == 0 || rows.width == 0) return;
  std::int64_t const pieces = (rows.width * size + ZeroRows::piece - 1) / ZeroRows::piece;
  ZeroRows const functor{static_cast<unsigned char*>(rows.data),
                         size,
                         rows.index,
                         selected,
                         count,
                         rows.width * size,
                         pieces};
  int const league = static_cast<int>(std::min<std::int64_t>(count * pieces, most_teams));
  Kokkos::parallel_for(label, Policy(exec, league, team_size), functor);
}

namespace cuda {

void copy_listed_rows(Kokkos::Cuda const& exec, char const* label, ConstRows const& from,
                      std::int64_t const* listed, Rows const& to, std::int64_t columns, int teams) {
  launch_copy(exec, label, from, 0, listed, nullptr, to, 0, to.index.count, columns, teams);
}

}  // namespace cuda
}  // namespace vpkl::impl
