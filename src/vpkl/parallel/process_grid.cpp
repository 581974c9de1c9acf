// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/error.hpp>
#include <vpkl/parallel/agreement.hpp>
#include <vpkl/parallel/process_grid.hpp>

#include <fmt/format.h>

#include <utility>

namespace vpkl {

ProcessGrid::ProcessGrid(Communicator world, int tensor_parallel, int data_parallel)
    : world_(std::move(world)) {
  Agreement("process grid")
      .equal("tensor-parallel sizes", tensor_parallel)
      .equal("data-parallel sizes", data_parallel)
      .check([&] {
        if (tensor_parallel < 1 || data_parallel < 1 ||
            static_cast<std::int64_t>(tensor_parallel) * data_parallel != world_.size())
          throw InvalidArgument(
              fmt::format("process grid is {} tensor-parallel × {} data-parallel ranks, expected a "
                          "product equal to the {} ranks of the communicator",
                          tensor_parallel, data_parallel, world_.size()));
      })
      .exchange(world_);
  int const rank = world_.rank();
  // A group of one must never communicate.
  tensor_ = tensor_parallel == 1 ? Communicator::self()
                                 : world_.split(rank / tensor_parallel, rank % tensor_parallel);
  data_ = data_parallel == 1 ? Communicator::self()
                             : world_.split(rank % tensor_parallel, rank / tensor_parallel);
}

}  // namespace vpkl
