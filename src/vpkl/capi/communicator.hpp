// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Handles of groups and vocabularies.
#pragma once

#include <vpkl/capi/runtime.hpp>
#include <vpkl/parallel/communicator.hpp>
#include <vpkl/vocab/shard.hpp>

struct vpkl_comm : vpkl::capi::Handle {
  explicit vpkl_comm(vpkl::Communicator c) : comm(std::move(c)) {}
  vpkl::Communicator comm;
};

struct vpkl_vocab : vpkl::capi::Handle {
  explicit vpkl_vocab(vpkl::VocabShard s) : shard(std::move(s)) {}
  vpkl::VocabShard shard;
};
