// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Greedy token selection over a sharded vocabulary.
#pragma once

#include <vpkl/core/rows.hpp>
#include <vpkl/parallel/communicator.hpp>
#include <vpkl/vocab/shard.hpp>

#include <cstdint>
#include <vector>

namespace vpkl {

/// \brief Collective, one all-gather of 16 bytes a row over more than one rank. The id with the
/// largest logit of each row over the whole vocabulary, the smallest id among equals; columns
/// beyond the shard never win.
/// \param[in] exec instance after whose work the logits are read; the host waits for the ids
/// \param[in] comm the tensor-parallel group
/// \param[in] shard ids of this rank's columns
/// \param[in] logits `[rows, at least shard.width()]`, usually the last position's; all ranks pass
/// the same rows
/// \return the same ids on every rank
/// \throws NumericalError on every rank, naming the row, when a row is all -inf or holds a NaN;
/// InvalidArgument, AgreementError, CommunicationError
template <class ExecutionSpace>
std::vector<std::int64_t> greedy_tokens(ExecutionSpace const& exec, Communicator const& comm,
                                        VocabShard const& shard, ConstRows const& logits);

}  // namespace vpkl
