// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief What a message layer must do to carry vpkl's collectives.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace vpkl {

/// How an all-reduce combines the ranks' numbers.
enum class Reduction { sum, max };

/// A message layer over host memory. Implement it to let any framework's process group serve as a
/// Communicator (Communicator::from_transport). Calls block until done, or throw
/// CommunicationError when `timeout` passes or the layer reports a failure.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual char const* name() const = 0;  ///< for messages; a string that lives for ever
  virtual int rank() const = 0;          ///< of this process, in [0, size())
  virtual int size() const = 0;          ///< number of ranks

  /// \brief Concatenates `bytes` of every rank in rank order.
  /// \param[in] local `bytes` bytes, or the own slot of `gathered`
  /// \param[out] gathered `size() * bytes` bytes
  /// \param[in] bytes contribution of a rank, equal on all
  /// \param[in] timeout longest time it may take
  virtual void all_gather(void const* local, void* gathered, std::size_t bytes,
                          std::chrono::milliseconds timeout) = 0;

  /// \brief Combines `count` > 0 floats over the ranks, in place; the maximum of NaN and a number
  /// is either. The default gathers, and combines in rank order.
  virtual void all_reduce(float* data, std::int64_t count, Reduction reduction,
                          std::chrono::milliseconds timeout);

  /// \brief Copies `bytes` of rank `root` to every rank. The default gathers.
  virtual void broadcast(void* data, std::size_t bytes, int root,
                         std::chrono::milliseconds timeout);

  /// \brief Groups ranks of equal `color`, ordered by `key`.
  virtual std::unique_ptr<Transport> split(int color, int key) = 0;

  /// \brief Ends what is in flight, where the layer can; called once a collective has failed or
  /// missed its deadline. Nothing but the destructor is called after it.
  virtual void abort() noexcept {}
};

}  // namespace vpkl
