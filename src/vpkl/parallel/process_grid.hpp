// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Tensor-parallel × data-parallel arrangement of ranks.
#pragma once

#include <vpkl/parallel/communicator.hpp>

namespace vpkl {

/// Ranks of a communicator as a grid: rank = data_parallel_index · tensor_parallel + tensor index.
/// Members of a tensor-parallel group hold shards of one vocabulary and the same samples; members
/// of a data-parallel group hold the same shard and different samples.
class ProcessGrid {
 public:
  /// \brief Collective over `world`.
  /// \throws InvalidArgument on every rank when the product is not the size of `world`;
  /// AgreementError when ranks ask for different grids
  ProcessGrid(Communicator world, int tensor_parallel, int data_parallel);

  Communicator const& world() const { return world_; }             ///< all ranks
  Communicator const& tensor_parallel() const { return tensor_; }  ///< this rank's group
  Communicator const& data_parallel() const { return data_; }      ///< this rank's group
  int data_parallel_index() const { return data_.rank(); }         ///< rank in data_parallel()
  int tensor_parallel_index() const { return tensor_.rank(); }     ///< rank in tensor_parallel()

 private:
  Communicator world_, tensor_, data_;
};

}  // namespace vpkl
