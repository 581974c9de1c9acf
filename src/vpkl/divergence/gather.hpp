// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Gathers the shards of rows of logits into whole rows.
#pragma once

#include <vpkl/core/rows.hpp>
#include <vpkl/parallel/communicator.hpp>
#include <vpkl/vocab/shard.hpp>

#include <cstdint>
#include <exception>
#include <utility>

#ifdef VPKL_ENABLE_CUDA
#include <vpkl/core/cuda/pinned_pool.hpp>

#include <vector>
#endif

namespace vpkl {

namespace impl {

/// Heads a rank's message; as large as a record of statistics.
struct alignas(16) MessageHeader {
  std::int32_t error = 0;
  std::int32_t reserved = 0;
  std::int64_t rows = 0;
  std::int64_t padding[2] = {0, 0};
};
static_assert(sizeof(MessageHeader) == 32, "a header takes the place of one record");

/// \brief Enqueues a header's copy to `to`, memory of `exec`.
/// \return number of kernels launched
template <class ExecutionSpace>
int write_header(ExecutionSpace const& exec, MessageHeader const& header, void* to);

/// \brief Throws on every rank when a gathered header carries an error or another row count.
/// \param[in] gathered what Communicator::all_gather returned; messages are `bytes` apart
void check_headers(Communicator const& comm, void const* gathered, std::size_t bytes,
                   std::exception_ptr error);

/// Headers of messages that stayed on the device, on their way to the host. On host spaces there
/// are none.
template <class ExecutionSpace>
class HeaderLog {
 public:
  HeaderLog(Communicator, std::int64_t) {}
  void clear() {}
  void add(ExecutionSpace const&, void const*, std::size_t, std::exception_ptr) {}
  void check() const {}
};

#ifdef VPKL_ENABLE_CUDA
template <>
class HeaderLog<Kokkos::Cuda> {
 public:
  /// \brief Takes pinned memory where messages stay on the device: make it before the ranks agree,
  /// so that one that has none does not leave the others to their collectives.
  /// \param[in] messages that add() will be called for, at most
  HeaderLog(Communicator comm, std::int64_t messages);

  /// \brief Forgets all messages. Their copies must have been waited for.
  void clear() { errors_.clear(); }

  /// \brief Enqueues the copy of a message's headers.
  /// \param[in] exec the same for all messages
  /// \param[in] error this rank's
  void add(Kokkos::Cuda const& exec, void const* gathered, std::size_t bytes,
           std::exception_ptr error);

  /// \brief check_headers() of each message, in their order. To be called once the work on the
  /// instance has been waited for.
  void check() const;

 private:
  unsigned char* slot(std::size_t message) const;

  Communicator comm_;
  cuda::PinnedBlock headers_;
  std::vector<std::exception_ptr> errors_;  ///< one a message
};
#endif

/// \brief check_headers() where the headers are on the host, or the call may wait for them;
/// otherwise leaves them to `log`.
/// \param[in] arrived what Communicator::all_gather returned
/// \param[in] own for one message, if there is no `log`
template <class ExecutionSpace>
void check_message(ExecutionSpace const& exec, Communicator const& comm, void const* arrived,
                   void const* gathered, std::size_t bytes, std::exception_ptr error,
                   HeaderLog<ExecutionSpace>* log, HeaderLog<ExecutionSpace>& own) {
  if (arrived || comm.size() == 1) return check_headers(comm, arrived, bytes, std::move(error));
  if (log) return log->add(exec, gathered, bytes, std::move(error));
  own.clear();
  own.add(exec, gathered, bytes, std::move(error));
  comm.wait(exec);
  own.check();
}

}  // namespace impl

/// All-gathers `[rows, shard]` of every rank and reorders to `[rows, vocabulary]`. Used by the
/// gathered route, and to make whole teacher rows for its cache.
template <class ExecutionSpace>
class VocabularyGather {
 public:
  /// \brief Owns the message buffers: ranks · max_rows · (largest shard) elements.
  VocabularyGather(ExecutionSpace const& exec, Communicator comm, VocabShard shard,
                   ElementType type, std::int64_t max_rows);

  /// \brief Collective, one all-gather.
  /// \param[in] exec instance that the work is enqueued on; over more than one rank the host waits
  /// once, for the message
  /// \param[in] local rows at least as wide as the shard
  /// \param[out] whole `[local.index.count, vocabulary]`
  /// \param[in] error this rank's failure, if any: every rank then throws it
  /// \param[in] row_weight one a row, or null; rows of weight 0 are never read, and `whole` holds
  /// nothing there
  /// \param[in] log where the ranks' failures go if the call is not to wait for them: it then
  /// throws none
  /// \return number of kernels launched
  int execute(ExecutionSpace const& exec, ConstRows const& local, Rows const& whole,
              std::exception_ptr error = nullptr, float const* row_weight = nullptr,
              impl::HeaderLog<ExecutionSpace>* log = nullptr);

  /// \brief Bytes of device memory that the message buffers take.
  std::size_t workspace_bytes() const { return message_.size(); }

 private:
  Communicator comm_;
  VocabShard shard_;
  ElementType type_;
  std::int64_t max_rows_;
  ByteView<ExecutionSpace> message_;
  impl::HeaderLog<ExecutionSpace> log_;  ///< of one call that waits
};

}  // namespace vpkl
