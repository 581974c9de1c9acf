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

template <class T>
struct ArgmaxOfRow {
  T const* logits;
  RowIndex index;
  std::int64_t columns;
  std::int64_t first_id;
  Argmax* out;

  void operator()(std::int64_t row) const {
    T const* const from = logits + index(row);
    Argmax best;
    for (std::int64_t c = 0; c < columns; ++c) {
      float const score = ElementTraits<T>::to_float(from[c]);
      if (score > -std::numeric_limits<float>::infinity() || score != score)
        best.add(score, first_id + c);
    }
    out[row] = best;
  }
};

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

}  // namespace

template <class ExecutionSpace>
std::vector<std::int64_t> greedy_tokens(ExecutionSpace const& exec, Communicator const& comm,
                                        VocabShard const& shard, ConstRows const& logits) {
  trace::Range const range(trace::Phase::rollout, trace::Category::phase, logits.index.count);
  ByteView<ExecutionSpace> records;
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
      Kokkos::parallel_for("vpkl::greedy_tokens::argmax",
                           impl::RangePolicy64<ExecutionSpace>(exec, 0, rows),
                           ArgmaxOfRow<T>{static_cast<T const*>(logits.data), logits.index,
                                          shard.width(), shard.begin(), own});
    });
  if (comm.size() > 1) comm.all_gather(exec, own, all, bytes);

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

#define VPKL_INSTANTIATE(Exec)                                                       \
  template std::vector<std::int64_t> greedy_tokens(Exec const&, Communicator const&, \
                                                   VocabShard const&, ConstRows const&);
VPKL_FOREACH_EXECUTION_SPACE(VPKL_INSTANTIATE)
#undef VPKL_INSTANTIATE

}  // namespace vpkl
