// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief A known pattern of bytes, on either side, and a kernel that keeps memory busy.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace vpkl::transfer {

/// \brief Fills device bytes with the pattern from its byte `first` on.
void fill_pattern(cudaStream_t stream, unsigned char* data, std::int64_t bytes, std::int64_t first);
/// \brief The same in host memory.
void fill_pattern(unsigned char* data, std::int64_t bytes, std::int64_t first);

/// \brief Elements of device rows that are not those of a tensor filled with the pattern; waits.
/// \param[in] data   `rows.size()` contiguous rows of `row_bytes`
/// \param[in] rows   row of the tensor that each should hold
std::int64_t wrong_elements(cudaStream_t stream, unsigned char const* data,
                            std::vector<std::int64_t> const& rows, std::int64_t row_bytes,
                            std::int64_t element_bytes);

/// \brief Reads and writes device memory `passes` times, from two thread blocks a multiprocessor:
/// there is room for other kernels beside it.
void keep_busy(cudaStream_t stream, unsigned char* data, std::int64_t bytes, std::int64_t passes);

}  // namespace vpkl::transfer
