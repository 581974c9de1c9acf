// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/allocate.hpp>
#include <vpkl/core/copy_rows.hpp>
#include <vpkl/core/error.hpp>
#include <vpkl/divergence/gather.hpp>
#include <vpkl/parallel/agreement.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace vpkl {

namespace impl {

namespace {

struct WriteHeader {
  MessageHeader header;
  MessageHeader* to;
  KOKKOS_FUNCTION void operator()(std::int64_t) const { *to = header; }
};

}  // namespace

template <class ExecutionSpace>
int write_header(ExecutionSpace const& exec, MessageHeader const& header, void* to) {
  Kokkos::parallel_for("vpkl::message_header", RangePolicy64<ExecutionSpace>(exec, 0, 1),
                       WriteHeader{header, static_cast<MessageHeader*>(to)});
  return 1;
}

void check_headers(Communicator const& comm, void const* gathered, std::size_t bytes,
                   std::exception_ptr error) {
  if (comm.size() == 1) return;
  auto const header = [&](int rank) {
    MessageHeader h;
    std::memcpy(
        &h, static_cast<unsigned char const*>(gathered) + static_cast<std::size_t>(rank) * bytes,
        sizeof h);
    return h;
  };
  MessageHeader const first = header(0);
  bool bad = false;
  for (int r = 0; r < comm.size(); ++r) {
    MessageHeader const h = header(r);
    bad = bad || h.error != 0 || h.rows != first.rows;
  }
  if (!bad) return;
  // The same headers arrived everywhere, so every rank gets here.
  Agreement agreement("divergence");
  agreement.equal("row counts", header(comm.rank()).rows);
  if (error) agreement.fail(std::move(error));
  agreement.exchange(comm);
}

}  // namespace impl

template <class ExecutionSpace>
VocabularyGather<ExecutionSpace>::VocabularyGather(ExecutionSpace const& exec, Communicator comm,
                                                   VocabShard shard, ElementType type,
                                                   std::int64_t max_rows)
    : comm_(std::move(comm)),
      shard_(std::move(shard)),
      type_(type),
      max_rows_(max_rows),
      log_(comm_, 1) {
  if (shard_.ranks() != comm_.size() || shard_.rank() != comm_.rank())
    throw InvalidArgument(fmt::format(
        "vocabulary gather: the shard is rank {} of {}, the communicator's rank {} of {}",
        shard_.rank(), shard_.ranks(), comm_.rank(), comm_.size()));
  if (max_rows < 0)
    throw InvalidArgument(
        fmt::format("vocabulary gather: max_rows is {}, expected at least 0", max_rows));
  std::size_t const bytes =
      sizeof(impl::MessageHeader) +
      static_cast<std::size_t>(max_rows * shard_.largest_width()) * size_of(type) + 16;
  message_ = impl::allocate_bytes(exec, "vpkl::VocabularyGather::message",
                                  bytes * static_cast<std::size_t>(comm_.size()));
}

template <class ExecutionSpace>
int VocabularyGather<ExecutionSpace>::execute(ExecutionSpace const& exec, ConstRows const& local,
                                              Rows const& whole, std::exception_ptr error,
                                              float const* row_weight,
                                              impl::HeaderLog<ExecutionSpace>* log) {
  std::int64_t const rows = std::min(std::max<std::int64_t>(local.index.count, 0), max_rows_);
  if (!error) {
    try {
      check_rows(local, "vocabulary gather, local rows");
      check_rows(whole, "vocabulary gather, whole rows");
      if (local.index.count > max_rows_)
        throw InvalidArgument(fmt::format("vocabulary gather: {} rows, expected at most {}",
                                          local.index.count, max_rows_));
      if (local.type != type_ || whole.type != type_)
        throw InvalidArgument(fmt::format("vocabulary gather: types are {} and {}, expected {}",
                                          to_string(local.type), to_string(whole.type),
                                          to_string(type_)));
      if (local.width < shard_.width())
        throw InvalidArgument(
            fmt::format("vocabulary gather: local width is {}, expected at least the shard's {}",
                        local.width, shard_.width()));
      if (whole.width < shard_.vocabulary() || whole.index.count != local.index.count)
        throw InvalidArgument(
            fmt::format("vocabulary gather: whole rows are [{}, {}], expected [{}, at least {}]",
                        whole.index.count, whole.width, local.index.count, shard_.vocabulary()));
    } catch (...) {
      error = std::current_exception();
    }
  }
  int const ranks = comm_.size();
  if (ranks == 1 && error) std::rethrow_exception(error);

  std::int64_t const pitch = shard_.largest_width();
  std::size_t const size = size_of(type_);
  std::size_t const bytes =
      (sizeof(impl::MessageHeader) + static_cast<std::size_t>(rows * pitch) * size + 15) / 16 * 16;
  auto const slot = [&](int rank) {
    return message_.data() + static_cast<std::size_t>(rank) * bytes;
  };
  auto const body = [&](int rank) {
    return Rows{slot(rank) + sizeof(impl::MessageHeader), type_, pitch,
                RowIndex::strided(rows, pitch)};
  };
  impl::MessageHeader header;
  header.error = static_cast<std::int32_t>(error_kind(error));
  header.rows = rows;
  int launched = impl::write_header(exec, header, slot(comm_.rank()));
  if (!error)
    launched += impl::copy_rows(exec, "vpkl::VocabularyGather::pack", local, 0, body(comm_.rank()),
                                0, shard_.width(), row_weight);
  void const* const arrived = comm_.all_gather(exec, slot(comm_.rank()), message_.data(), bytes);
  impl::check_message(exec, comm_, arrived, message_.data(), bytes, error, log, log_);
  if (error) return launched;
  for (int r = 0; r < ranks; ++r)
    launched += impl::copy_rows(exec, "vpkl::VocabularyGather::unpack", body(r), 0, whole,
                                shard_.bounds()[r], shard_.bounds()[r + 1] - shard_.bounds()[r],
                                row_weight);
  return launched;
}

#define VPKL_INSTANTIATE(Exec)                                                     \
  template int impl::write_header(Exec const&, impl::MessageHeader const&, void*); \
  template class VocabularyGather<Exec>;
VPKL_FOREACH_EXECUTION_SPACE(VPKL_INSTANTIATE)
#undef VPKL_INSTANTIATE

}  // namespace vpkl
