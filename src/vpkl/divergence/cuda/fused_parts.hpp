// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief What the fused kernels share: their shape, and how warps walk over rows.
#pragma once

#include <vpkl/divergence/cuda/cluster.hpp>
#include <vpkl/divergence/cuda/two_phase.hpp>

namespace vpkl::impl::cuda {

/// Rows whose records and constants are in flight. Other blocks write a row's places again. With
/// lag 0 two rows would do; KL with lag 1 and JSD need 4: a block that starts a row's statistics
/// has seen the constants of the second row before it, so that every block has merged the fourth
/// row before.
constexpr int rows_in_flight = 4;
/// Shared memory a block may have on compute capability 9.0.
constexpr std::size_t block_memory = 227 * 1024;

template <class S, class T, int warps_, int slots_>
struct FusedShape {
  static constexpr int student_bytes = segment_columns * static_cast<int>(sizeof(S));
  static constexpr int teacher_bytes = segment_columns * static_cast<int>(sizeof(T));
  static constexpr int slot_bytes = student_bytes + teacher_bytes;
  static constexpr int slots = slots_;  ///< of a warp
  static constexpr int warps = warps_;  ///< that compute
  static constexpr int threads = (warps + 1) * lanes;

  struct alignas(128) Shared {
    unsigned char slot[warps][slots][slot_bytes];
    GradientConstants constants[rows_in_flight];
    Barrier full[warps][slots];
    Barrier records_full[rows_in_flight], constants_full[rows_in_flight],
        constants_empty[rows_in_flight];
  };
  static constexpr std::size_t shared_bytes(std::int64_t segments) {
    return sizeof(Shared) +
           static_cast<std::size_t>(rows_in_flight * segments) * sizeof(SegmentRecord);
  }
  /// \brief Rows that statistics may run ahead of gradients, or -1 if a row does not fit.
  static constexpr int lag(std::int64_t segments, int cluster) {
    std::int64_t const block_segments = (segments + cluster - 1) / cluster;
    if (segments < cluster || shared_bytes(segments) > block_memory) return -1;
    return 2 * block_segments <= warps * slots ? 1 : block_segments <= warps * slots ? 0 : -1;
  }
};

/// Parameters of a launch.
struct FusedJob {
  RowJob job;
  SegmentOptions options;
  Rows gradient;
  float* value;
  int segments;
  int lag;
  std::int64_t first_row, end_row;
  bool joins;  ///< runs beside the launch before it and ends after it
};

/// Walks over the segments that a warp owns, row by row; every block numbers its segments
/// through all rows, and its warps take them in turn.
struct Cursor {
  int row = 0;  ///< counted in the cluster's rows
  int first;    ///< the warp's first segment in this row, counted in the block's
  int per_row, warps;

  __device__ __forceinline__ Cursor(int warp, int block_segments, int warps_)
      : first(warp), per_row(block_segments), warps(warps_) {}
  __device__ __forceinline__ void next_row() {
    ++row;
    first = (first - per_row) % warps;
    if (first < 0) first += warps;
  }
};

/// A place in a ring and the parity its barrier has there.
template <int size>
struct Ring {
  int at = 0;
  std::uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++at == size) {
      at = 0;
      parity ^= 1;
    }
  }
};

/// What lanes remember of 32 consecutive rows of their cluster.
struct RowBatch {
  std::uint32_t counts = 0;  ///< bit l: row l has a weight
  float weight = 0;          ///< of row l in lane l

  __device__ __forceinline__ bool counted(int row) const { return counts >> (row % lanes) & 1; }
  __device__ __forceinline__ void fetch(RowJob const& job, std::int64_t row) {
    weight = row < job.student.index.count ? weight_of(job, row) : 0;
    counts = __ballot_sync(all_lanes, weight != 0);
  }
};

/// \brief What lane 0 reads, on all lanes: the lane that tells the writer of the next value that it
/// may write is then the only reader, which racecheck can follow.
template <class T>
__device__ __forceinline__ T read_by_lane_0(T const& from) {
  static_assert(sizeof(T) % sizeof(std::uint32_t) == 0, "T travels as words");
  constexpr int words = static_cast<int>(sizeof(T) / sizeof(std::uint32_t));
  struct Words {
    std::uint32_t word[words];
  } copy{};
  if (threadIdx.x % lanes == 0) copy = bit_cast<Words>(from);
#pragma unroll
  for (int i = 0; i < words; ++i)
    copy.word[i] = __shfl_sync(all_lanes, copy.word[i], 0);
  return bit_cast<T>(copy);
}

/// \brief Enqueues a fused kernel on `clusters` clusters of `cluster` blocks.
/// \param[in] early whether it may start while the launch before it ends, for which it waits before
/// it touches memory (at its end, if it `joins`)
template <class Shape>
void launch_fused(cudaStream_t stream, void (*kernel)(FusedJob), FusedJob const& job, int cluster,
                  int clusters, bool early) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(cluster * clusters));
  config.blockDim = dim3(Shape::threads);
  config.dynamicSmemBytes = Shape::shared_bytes(job.segments);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = early ? 2 : 1;
  VPKL_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, job));
}

}  // namespace vpkl::impl::cuda
