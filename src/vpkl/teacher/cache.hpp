// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief TeacherCache: the teacher's logits of a micro-batch, out of device memory until needed.
#pragma once

#include <vpkl/core/rows.hpp>
#include <vpkl/parallel/communicator.hpp>
#include <vpkl/teacher/kept_statistics.hpp>
#include <vpkl/teacher/row_store.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace vpkl {

/// What a cache keeps.
enum class CacheMode : std::int32_t {
  all = 0,       ///< every row of `[B, T]`
  response = 1,  ///< the rows listed at store time (those the loss will ask for)
  hidden = 2,    ///< last hidden states; logits rebuilt a chunk at a time
};

/// \brief "all", "response" or "hidden".
char const* to_string(CacheMode mode);
/// \brief Inverse of to_string. \throws InvalidArgument naming the text
CacheMode cache_mode_from_string(std::string const& text);

/// Statistics of the teacher's rows to keep beside them: with these, the forward KL of several
/// ranks reads the teacher once instead of twice.
struct TeacherStatistics {
  double temperature = 1.0;   ///< of the divergence they are for
  std::int64_t columns = -1;  ///< of this rank that count, from the first; -1: every one, 0: none
};

/// What a cache has moved and holds.
struct CacheCounters {
  std::int64_t stores = 0;           ///< calls that succeeded
  std::int64_t stored_rows = 0;      ///< kept, over all stores
  std::int64_t fetches = 0;          ///< calls, by chunk or by rows
  std::int64_t fetched_rows = 0;     ///< over all fetches
  std::int64_t fetched_bytes = 0;    ///< of them, in the store type
  std::size_t bytes = 0;             ///< held now
  std::size_t high_water_bytes = 0;  ///< most ever held
};

/// Rows of the local shard of the teacher's logits in host memory, each row's pitch a multiple of
/// 128 bytes; pinned where the execution space is a device. Fetches on any instance come after the
/// store, and never wait on the host (engines `pageable` and `staged` do).
///
/// One micro-batch at a time: store, fetch as often as needed, free. A failed store leaves the
/// cache empty.
template <class ExecutionSpace>
class TeacherCache {
 public:
  /// Mode, store type and the statistics' temperature are equal on every rank.
  struct Options {
    CacheMode mode = CacheMode::all;        ///< what is kept
    std::optional<ElementType> store_type;  ///< default: the type of the logits stored
    std::size_t memory_budget = 0;          ///< bytes; 0: what the machine and its limits leave
    TransferEngine engine = TransferEngine::automatic;  ///< how rows come back to a device
    /// What to keep beside the rows, in the execution space's memory: 32 bytes a row, 40 in
    /// `response` mode. It takes one more read of the logits when they are stored.
    std::optional<TeacherStatistics> statistics;
  };

  /// \brief Collective; one exchange of records over more than one rank.
  /// \param[in] comm the tensor-parallel group, whose ranks store together
  /// \param[in] options what to keep, in which type, how much of it
  /// \throws InvalidArgument for modes this build cannot serve, AgreementError
  TeacherCache(Communicator comm, Options options);

  /// \brief Collective; one exchange of records over more than one rank. Replaces what was held.
  ///
  /// Enqueued on `exec`; the logits may be overwritten by later work on it.
  /// \param[in] exec instance that made the logits
  /// \param[in] logits `[batch · length, width]`, row b·T + t
  /// \param[in] batch B
  /// \param[in] length T
  /// \param[in] rows `response` mode: ascending row numbers to keep; otherwise empty
  /// \throws InvalidArgument, OutOfMemory on every rank; the cache is then empty
  void store(ExecutionSpace const& exec, ConstRows const& logits, std::int64_t batch,
             std::int64_t length, std::vector<std::int64_t> const& rows = {});

  /// \brief Enqueues positions [begin, end) of every batch row into `out`, rows in (b, t) order.
  /// In `response` mode rows that were not kept are left as they are in `out`.
  /// \param[in] exec any instance of the cache's device; the rows are there for its later work
  /// \param[in] begin first position
  /// \param[in] end one past the last
  /// \param[out] out `[batch · (end - begin), width]` of any type (converted after the copy)
  /// \throws InvalidArgument for an empty cache, a range outside [0, length), another width of
  /// `out`
  void fetch_chunk(ExecutionSpace const& exec, std::int64_t begin, std::int64_t end,
                   Rows const& out);

  /// \brief Enqueues the listed rows (numbers b·T + t, any order) into `out`.
  /// \throws InvalidArgument, also for a row that is not held
  void fetch_rows(ExecutionSpace const& exec, std::vector<std::int64_t> const& rows,
                  Rows const& out);

  /// \brief Drops the rows. Work already enqueued on them ends first.
  void free() noexcept;

  /// \brief The kept statistics' records, for KnownTeacher; null without Options::statistics.
  /// \param[in] exec instance whose work may read them, until end_statistics()
  /// \throws InvalidArgument for an empty cache
  RowStatistics const* begin_statistics(ExecutionSpace const& exec) const;
  /// \brief What is enqueued on `exec` by now has read the records; a later store waits for it.
  void end_statistics(ExecutionSpace const& exec) { statistics_.end_reading(exec); }
  /// \brief Number of a row's record; -1 for a row that is not held.
  std::int64_t record(std::int64_t row) const { return holds(row) ? slot_of_row_[row] : -1; }

  bool holds_rows() const { return store_ != nullptr; }  ///< between store and free
  /// \brief Whether row b·T + t can be fetched.
  bool holds(std::int64_t row) const;
  std::int64_t batch() const { return batch_; }                ///< B of what is held, or 0
  std::int64_t length() const { return length_; }              ///< T of what is held, or 0
  std::int64_t width() const { return width_; }                ///< columns of a held row, or 0
  ElementType type() const { return type_; }                   ///< that rows are kept in
  Options const& options() const { return options_; }          ///< as given
  CacheCounters const& counters() const { return counters_; }  ///< since construction

 private:
  void check_store(ConstRows const& logits, std::int64_t batch, std::int64_t length,
                   std::vector<std::int64_t> const& rows) const;
  void store_local(ExecutionSpace const& exec, ConstRows const& logits,
                   std::vector<std::int64_t> const& rows);
  void check_holds() const;
  void check_out(Rows const& out, std::int64_t rows) const;
  void fetch(ExecutionSpace const& exec, std::vector<std::int64_t> const& slots, Rows const& out);

  Communicator comm_;
  Options options_;
  std::unique_ptr<RowStore<ExecutionSpace>> store_;
  impl::KeptStatistics<ExecutionSpace> statistics_;
  std::vector<std::int64_t> slot_of_row_;  ///< -1: not held
  std::int64_t batch_ = 0, length_ = 0, width_ = 0;
  ElementType type_ = ElementType::fp32;
  CacheCounters counters_;
};

}  // namespace vpkl
