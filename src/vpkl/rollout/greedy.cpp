// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/allocate.hpp>
#include <vpkl/core/error.hpp>
#include <vpkl/core/transfer.hpp>
#include <vpkl/parallel/agreement.hpp>
#include <vpkl/rollout/greedy.hpp>
#include <vpkl/stats/argmax.hpp>
#include <vpkl/trace/range.hpp>

#include <fmt/format.h>

namespace vpkl {

namespace {

/// The winner among every `step`-th column from `first`.
template <class T>
KOKKOS_FUNCTION Argmax argmax_of(T const* row, std::int64_t columns, std::int64_t first,
                                 std::int64_t step, std::int64_t first_id) {
  Argmax best;
  for (std::int64_t c = first; c < columns; c += step) {
    float const score = ElementTraits<T>::to_float(row[c]);
    if (score > -impl::infinity || score != score) best.add(score, first_id + c);
  }
  return best;
}

template <class T>
struct ArgmaxOfRow {
  T const* logits;
  RowIndex index;
  std::int64_t columns;
  std::int64_t first_id;
  Argmax* out;

  KOKKOS_FUNCTION void operator()(std::int64_t row) const {
    out[row] = argmax_of(logits + index(row), columns, 0, 1, first_id);
  }
};

#ifdef VPKL_ENABLE_CUDA
/// As ArgmaxOfRow, a row a team. The winner does not depend on the order of the merges.
template <class T>
struct ArgmaxOfRowByTeam {
  static constexpr int team_size = 512;
  using Policy = Kokkos::TeamPolicy<Kokkos::Cuda>;

  ArgmaxOfRow<T> job;

  struct Winner {
    using reducer = Winner;
    using value_type = Argmax;
    using result_view_type = Kokkos::View<Argmax, Kokkos::AnonymousSpace, Kokkos::MemoryUnmanaged>;
    Argmax* value;
    KOKKOS_FUNCTION void join(Argmax& to, Argmax const& by) const { to.add(by); }
    KOKKOS_FUNCTION void init(Argmax& v) const { v = Argmax{}; }
    KOKKOS_FUNCTION Argmax& reference() const { return *value; }
    KOKKOS_FUNCTION result_view_type view() const { return result_view_type(value); }
    KOKKOS_FUNCTION bool references_scalar() const { return true; }
  };

  KOKKOS_FUNCTION void operator()(Policy::member_type const& team) const {
    std::int64_t const row = team.league_rank();
    Argmax best = argmax_of(job.logits + job.index(row), job.columns, team.team_rank(),
                            team.team_size(), job.first_id);
    team.team_reduce(Winner{&best});
    if (team.team_rank() == 0) job.out[row] = best;
  }
};
#endif

template <class ExecutionSpace, class T>
void launch_argmax(ExecutionSpace const& exec, std::int64_t rows, ArgmaxOfRow<T> const& job) {
  char const* const label = "vpkl::greedy_tokens::argmax";
  if constexpr (impl::is_host_space<ExecutionSpace>) {
    Kokkos::parallel_for(label, impl::RangePolicy64<ExecutionSpace>(exec, 0, rows), job);
  } else {
#ifdef VPKL_ENABLE_CUDA
    using ByTeam = ArgmaxOfRowByTeam<T>;
    Kokkos::parallel_for(label,
                         typename ByTeam::Policy(exec, static_cast<int>(rows), ByTeam::team_size),
                         ByTeam{job});
#endif
  }
}

void check_logits(Communicator const& comm, VocabShard const& shard, ConstRows const& logits) {
  check_rows(logits, "greedy selection, logits");
  if (logits.width < shard.width())
    throw InvalidArgument(fmt::format(
        "greedy selection: logits are {} columns wide, expected at least the shard's {}",
        logits.width, shard.width()));
  if (shard.ranks() != comm.size() || shard.rank() != comm.rank())
    throw InvalidArgument(fmt::format(
        "greedy selection: the shard is rank {} of {}, the communicator's rank {} of {}",
        shard.rank(), shard.ranks(), comm.rank(), comm.size()));
}

/// \param[out] records owner of what the ranks exchange, however this ends
template <class ExecutionSpace>
std::vector<std::int64_t> select_tokens(ExecutionSpace const& exec, Communicator const& comm,
                                        VocabShard const& shard, ConstRows const& logits,
                                        ByteView<ExecutionSpace>& records) {
  std::int64_t const rows = logits.index.count;
  std::size_t bytes = 0;
  Agreement("greedy selection")
      .equal("row counts", rows)
      .equal("vocabularies", shard.vocabulary())
      .check([&] {
        check_logits(comm, shard, logits);
        bytes = static_cast<std::size_t>(rows) * sizeof(Argmax);
        records = impl::allocate_bytes(exec, "vpkl::greedy_tokens::records",
                                       bytes * static_cast<std::size_t>(comm.size()));
      })
      .exchange(comm);

  auto* const all = reinterpret_cast<Argmax*>(records.data());
  Argmax* const own = all + comm.rank() * rows;
  if (rows > 0)
    dispatch(logits.type, [&](auto element) {
      using T = decltype(element);
      launch_argmax(exec, rows,
                    ArgmaxOfRow<T>{static_cast<T const*>(logits.data), logits.index, shard.width(),
                                   shard.begin(), own});
    });
  if (comm.size() > 1) {
    comm.all_gather(exec, own, all, bytes);
    comm.wait(exec);
  }

  std::vector<Argmax> const gathered =
      impl::to_host(exec, const_cast<Argmax const*>(all), rows * comm.size());
  std::vector<std::int64_t> tokens;
  tokens.reserve(static_cast<std::size_t>(rows));
  for (std::int64_t row = 0; row < rows; ++row) {
    Argmax best;
    for (int r = 0; r < comm.size(); ++r)
      best.add(gathered[r * rows + row]);
    if (best.invalid || best.id < 0)
      throw NumericalError(fmt::format("greedy selection: row {} {}, expected a largest logit", row,
                                       best.invalid ? "holds a NaN" : "is -inf everywhere"));
    tokens.push_back(best.id);
  }
  return tokens;
}

}  // namespace

template <class ExecutionSpace>
std::vector<std::int64_t> greedy_tokens(ExecutionSpace const& exec, Communicator const& comm,
                                        VocabShard const& shard, ConstRows const& logits) {
  trace::Range const range(trace::Phase::rollout, trace::Category::phase, logits.index.count);
  ByteView<ExecutionSpace> records;
  try {
    return select_tokens(exec, comm, shard, logits, records);
  } catch (CommunicationError const&) {
    impl::leak<ExecutionSpace>(records);
    throw;
  }
}

#define VPKL_INSTANTIATE(Exec)                                                       \
  template std::vector<std::int64_t> greedy_tokens(Exec const&, Communicator const&, \
                                                   VocabShard const&, ConstRows const&);
VPKL_FOREACH_EXECUTION_SPACE(VPKL_INSTANTIATE)
#undef VPKL_INSTANTIATE

}  // namespace vpkl
