// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/allocate.hpp>
#include <vpkl/core/error.hpp>
#include <vpkl/divergence/options.hpp>
#include <vpkl/parallel/agreement.hpp>
#include <vpkl/teacher/cache.hpp>
#include <vpkl/trace/range.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace vpkl {

char const* to_string(CacheMode mode) {
  switch (mode) {
    case CacheMode::response: return "response";
    case CacheMode::hidden: return "hidden";
    case CacheMode::all: break;
  }
  return "all";
}

CacheMode cache_mode_from_string(std::string const& text) {
  for (CacheMode mode : {CacheMode::all, CacheMode::response, CacheMode::hidden})
    if (text == to_string(mode)) return mode;
  throw InvalidArgument(fmt::format("cache mode is '{}', expected all, response or hidden", text));
}

char const* to_string(TransferEngine engine) {
  switch (engine) {
    case TransferEngine::pageable: return "pageable";
    case TransferEngine::staged: return "staged";
    case TransferEngine::pinned_rows: return "pinned_rows";
    case TransferEngine::pinned_2d: return "pinned_2d";
    case TransferEngine::mapped: return "mapped";
    case TransferEngine::automatic: break;
  }
  return "automatic";
}

TransferEngine transfer_engine_from_string(std::string const& text) {
  for (TransferEngine engine :
       {TransferEngine::automatic, TransferEngine::pageable, TransferEngine::staged,
        TransferEngine::pinned_rows, TransferEngine::pinned_2d, TransferEngine::mapped})
    if (text == to_string(engine)) return engine;
  throw InvalidArgument(
      fmt::format("transfer engine is '{}', expected automatic, pageable, staged, pinned_rows, "
                  "pinned_2d or mapped",
                  text));
}

template <class ExecutionSpace>
TeacherCache<ExecutionSpace>::TeacherCache(Communicator comm, Options options)
    : comm_(std::move(comm)), options_(options) {
  Agreement("teacher cache")
      .equal("modes", options_.mode)
      .equal("store types", options_.store_type ? static_cast<int>(*options_.store_type) : -1)
      .equal("statistics' temperatures",
             options_.statistics ? options_.statistics->temperature : 0.0)
      .check([&] {
        if (options_.statistics) {
          DivergenceOptions divergence;
          divergence.temperature = options_.statistics->temperature;
          check_options(divergence);
          if (options_.statistics->columns < -1)
            throw InvalidArgument(
                fmt::format("teacher cache: statistics of {} columns, expected at least 0, or -1",
                            options_.statistics->columns));
        }
        if (options_.mode == CacheMode::hidden)
          throw InvalidArgument(
              "teacher cache: mode hidden is not part of this version, expected "
              "all or response");
      })
      .exchange(comm_);
}

template <class ExecutionSpace>
void TeacherCache<ExecutionSpace>::check_store(ConstRows const& logits, std::int64_t batch,
                                               std::int64_t length,
                                               std::vector<std::int64_t> const& rows) const {
  check_rows(logits, "teacher cache, logits");
  if (batch < 0 || length < 0)
    throw InvalidArgument(
        fmt::format("teacher cache: shape is [{}, {}], expected at least [0, 0]", batch, length));
  if (logits.index.count != batch * length)
    throw InvalidArgument(fmt::format("teacher cache: {} rows of logits, expected {} · {} = {}",
                                      logits.index.count, batch, length, batch * length));
  if (options_.statistics && options_.statistics->columns > logits.width)
    throw InvalidArgument(
        fmt::format("teacher cache: statistics of {} columns, expected at most the {} stored",
                    options_.statistics->columns, logits.width));
  if (options_.mode == CacheMode::all && !rows.empty())
    throw InvalidArgument(
        fmt::format("teacher cache: {} rows listed in mode all, expected none", rows.size()));
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (rows[i] < 0 || rows[i] >= batch * length || (i > 0 && rows[i] <= rows[i - 1]))
      throw InvalidArgument(fmt::format(
          "teacher cache: listed row {} is {}, expected ascending numbers inside [0, {})", i,
          rows[i], batch * length));
}

template <class ExecutionSpace>
void TeacherCache<ExecutionSpace>::store(ExecutionSpace const& exec, ConstRows const& logits,
                                         std::int64_t batch, std::int64_t length,
                                         std::vector<std::int64_t> const& rows) {
  // Of arguments that are not checked yet: as unsigned numbers, which may overflow.
  std::uint64_t const kept = options_.mode == CacheMode::response
                                 ? rows.size()
                                 : static_cast<std::uint64_t>(logits.index.count);
  std::uint64_t const kept_bytes = kept * static_cast<std::uint64_t>(logits.width) *
                                   size_of(options_.store_type.value_or(logits.type));
  trace::Range const range(trace::Phase::store, trace::Category::cache,
                           static_cast<std::int64_t>(kept_bytes));
  free();
  try {
    std::uint64_t const listed = hash_bytes(rows.data(), rows.size() * sizeof(rows[0]));
    Agreement("teacher cache")
        .equal("batch sizes", batch)
        .equal("sequence lengths", length)
        .equal("types", logits.type)
        .equal_hash("listed rows", listed)
        .check([&] {
          check_store(logits, batch, length, rows);
          batch_ = batch;
          length_ = length;
          width_ = logits.width;
          type_ = options_.store_type.value_or(logits.type);
          store_local(exec, logits, rows);
        })
        .exchange(comm_);
  } catch (...) {
    free();
    throw;
  }
  ++counters_.stores;
}

template <class ExecutionSpace>
void TeacherCache<ExecutionSpace>::store_local(ExecutionSpace const& exec, ConstRows const& logits,
                                               std::vector<std::int64_t> const& rows) {
  bool const listed = options_.mode == CacheMode::response;
  std::int64_t const kept = listed ? static_cast<std::int64_t>(rows.size()) : batch_ * length_;
  std::size_t const bytes = impl::row_store_bytes(kept, width_, type_);
  std::size_t const budget =
      options_.memory_budget ? options_.memory_budget : impl::row_store_budget<ExecutionSpace>();
  if (bytes > budget)
    throw OutOfMemory(
        fmt::format("teacher cache: {} rows of {} {} columns take {} bytes, the budget is {} bytes",
                    kept, width_, to_string(type_), bytes, budget));

  auto store = impl::make_row_store(exec, kept, width_, type_, options_.engine);
  slot_of_row_.assign(static_cast<std::size_t>(batch_ * length_), -1);
  for (std::int64_t slot = 0; slot < kept; ++slot)
    slot_of_row_[listed ? rows[slot] : slot] = slot;
  // Before the rows: who has waited for those need not wait for these.
  if (auto const& of = options_.statistics)
    statistics_.make(exec, logits, listed ? &rows : nullptr, of->columns < 0 ? width_ : of->columns,
                     type_, of->temperature);
  store->store(exec, logits, listed ? &rows : nullptr);
  counters_.stored_rows += kept;
  counters_.bytes = store->bytes();
  counters_.high_water_bytes = std::max(counters_.high_water_bytes, counters_.bytes);
  store_ = std::move(store);
}

template <class ExecutionSpace>
void TeacherCache<ExecutionSpace>::check_holds() const {
  if (!store_)
    throw InvalidArgument("teacher cache: fetch from an empty cache, expected a store first");
}

template <class ExecutionSpace>
void TeacherCache<ExecutionSpace>::check_out(Rows const& out, std::int64_t rows) const {
  check_rows(out, "teacher cache, fetched rows");
  if (out.index.count != rows || out.width != width_)
    throw InvalidArgument(
        fmt::format("teacher cache: room for [{}, {}] fetched rows, expected [{}, {}]",
                    out.index.count, out.width, rows, width_));
}

template <class ExecutionSpace>
void TeacherCache<ExecutionSpace>::fetch_chunk(ExecutionSpace const& exec, std::int64_t begin,
                                               std::int64_t end, Rows const& out) {
  check_holds();
  if (begin < 0 || end < begin || end > length_)
    throw InvalidArgument(fmt::format(
        "teacher cache: chunk is [{}, {}), expected it inside [0, {})", begin, end, length_));
  check_out(out, batch_ * (end - begin));
  std::vector<std::int64_t> slots;
  slots.reserve(static_cast<std::size_t>(batch_ * (end - begin)));
  for (std::int64_t b = 0; b < batch_; ++b)
    for (std::int64_t t = begin; t < end; ++t)
      slots.push_back(slot_of_row_[b * length_ + t]);
  fetch(exec, slots, out);
}

template <class ExecutionSpace>
void TeacherCache<ExecutionSpace>::fetch_rows(ExecutionSpace const& exec,
                                              std::vector<std::int64_t> const& rows,
                                              Rows const& out) {
  check_holds();
  check_out(out, static_cast<std::int64_t>(rows.size()));
  std::vector<std::int64_t> slots;
  slots.reserve(rows.size());
  for (std::int64_t row : rows) {
    if (!holds(row))
      throw InvalidArgument(
          fmt::format("teacher cache: row {} is not held, expected a stored row of [0, {})", row,
                      batch_ * length_));
    slots.push_back(slot_of_row_[row]);
  }
  fetch(exec, slots, out);
}

template <class ExecutionSpace>
void TeacherCache<ExecutionSpace>::fetch(ExecutionSpace const& exec,
                                         std::vector<std::int64_t> const& slots, Rows const& out) {
  std::int64_t const held =
      std::count_if(slots.begin(), slots.end(), [](std::int64_t slot) { return slot >= 0; });
  std::int64_t const bytes = held * width_ * static_cast<std::int64_t>(size_of(type_));
  trace::Range const range(trace::Phase::fetch, trace::Category::cache, bytes);
  store_->fetch(exec, slots, out);
  ++counters_.fetches;
  counters_.fetched_rows += held;
  counters_.fetched_bytes += bytes;
}

template <class ExecutionSpace>
bool TeacherCache<ExecutionSpace>::holds(std::int64_t row) const {
  return row >= 0 && row < batch_ * length_ && slot_of_row_[row] >= 0;
}

template <class ExecutionSpace>
RowStatistics const* TeacherCache<ExecutionSpace>::begin_statistics(
    ExecutionSpace const& exec) const {
  check_holds();
  return options_.statistics ? statistics_.begin_reading(exec) : nullptr;
}

template <class ExecutionSpace>
void TeacherCache<ExecutionSpace>::free() noexcept {
  store_.reset();
  slot_of_row_.clear();
  batch_ = length_ = width_ = 0;
  counters_.bytes = 0;
}

#define VPKL_INSTANTIATE(Exec) template class TeacherCache<Exec>;
VPKL_FOREACH_EXECUTION_SPACE(VPKL_INSTANTIATE)
#undef VPKL_INSTANTIATE

}  // namespace vpkl
