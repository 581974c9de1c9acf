// SPDX-License-Identifier: Apache-2.0
// Plain CUDA: --all-gpus runs on devices that Kokkos was not started on.
#include "kernels.hpp"

#include "buffers.hpp"

#include <algorithm>
#include <cstring>

namespace vpkl::transfer {

namespace {

constexpr int threads = 256;

__host__ __device__ inline std::uint32_t pattern_word(std::int64_t word) {
  std::uint32_t h = static_cast<std::uint32_t>(word) * 2654435761u +
                    static_cast<std::uint32_t>(word >> 32) * 2246822519u;
  h ^= h >> 15;
  return h * 3266489917u + 1u;
}

__host__ __device__ inline unsigned char pattern_byte(std::int64_t byte) {
  return static_cast<unsigned char>(pattern_word(byte / 4) >> (8 * (byte % 4)));
}

__global__ void fill(unsigned char* data, std::int64_t bytes, std::int64_t first) {
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes;
       i += step)
    data[i] = pattern_byte(first + i);
}

__global__ void count(unsigned char const* data, std::int64_t const* rows, std::int64_t row_count,
                      std::int64_t row_bytes, std::int64_t element_bytes,
                      unsigned long long* wrong) {
  std::int64_t const width = row_bytes / element_bytes;
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < row_count * width; i += step) {
    std::int64_t const row = i / width, first = i % width * element_bytes;
    bool same = true;
    for (std::int64_t b = first; b < first + element_bytes; ++b)
      same = same && data[row * row_bytes + b] == pattern_byte(rows[row] * row_bytes + b);
    if (!same) atomicAdd(wrong, 1ull);
  }
}

__global__ void busy(std::uint32_t* data, std::int64_t words, std::int64_t passes) {
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t pass = 0; pass < passes; ++pass)
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
         i < words; i += step)
      data[i] = data[i] * 1664525u + 1013904223u;
}

int multiprocessors() {
  int device = 0, count = 0;
  VPKL_CHECK_CUDA(cudaGetDevice(&device));
  VPKL_CHECK_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

unsigned blocks_for(std::int64_t work) {
  return static_cast<unsigned>(
      std::clamp<std::int64_t>((work + threads - 1) / threads, 1, 16 * multiprocessors()));
}

}  // namespace

void fill_pattern(cudaStream_t stream, unsigned char* data, std::int64_t bytes,
                  std::int64_t first) {
  fill<<<blocks_for(bytes), threads, 0, stream>>>(data, bytes, first);
  VPKL_CHECK_CUDA(cudaGetLastError());
}

void fill_pattern(unsigned char* data, std::int64_t bytes, std::int64_t first) {
  std::int64_t i = 0;
  for (; i < bytes && (first + i) % 4 != 0; ++i)
    data[i] = pattern_byte(first + i);
  for (; i + 4 <= bytes; i += 4) {
    std::uint32_t const word = pattern_word((first + i) / 4);
    std::memcpy(data + i, &word, 4);
  }
  for (; i < bytes; ++i)
    data[i] = pattern_byte(first + i);
}

std::int64_t wrong_elements(cudaStream_t stream, unsigned char const* data,
                            std::vector<std::int64_t> const& rows, std::int64_t row_bytes,
                            std::int64_t element_bytes) {
  std::size_t const list_bytes = rows.size() * sizeof rows[0];
  DeviceBytes const list(list_bytes + sizeof(unsigned long long));
  auto* const wrong = reinterpret_cast<unsigned long long*>(list.data() + list_bytes);
  VPKL_CHECK_CUDA(
      cudaMemcpyAsync(list.data(), rows.data(), list_bytes, cudaMemcpyHostToDevice, stream));
  VPKL_CHECK_CUDA(cudaMemsetAsync(wrong, 0, sizeof *wrong, stream));
  std::int64_t const row_count = static_cast<std::int64_t>(rows.size());
  count<<<blocks_for(row_count * (row_bytes / element_bytes)), threads, 0, stream>>>(
      data, reinterpret_cast<std::int64_t const*>(list.data()), row_count, row_bytes, element_bytes,
      wrong);
  VPKL_CHECK_CUDA(cudaGetLastError());
  unsigned long long found = 0;
  VPKL_CHECK_CUDA(cudaMemcpyAsync(&found, wrong, sizeof found, cudaMemcpyDeviceToHost, stream));
  VPKL_CHECK_CUDA(cudaStreamSynchronize(stream));
  return static_cast<std::int64_t>(found);
}

void keep_busy(cudaStream_t stream, unsigned char* data, std::int64_t bytes, std::int64_t passes) {
  busy<<<static_cast<unsigned>(2 * multiprocessors()), threads, 0, stream>>>(
      reinterpret_cast<std::uint32_t*>(data), bytes / 4, passes);
  VPKL_CHECK_CUDA(cudaGetLastError());
}

}  // namespace vpkl::transfer
