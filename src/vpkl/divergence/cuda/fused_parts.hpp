// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief What the fused kernels share: their shape, how warps walk over rows, load them, send
/// records and write zeros.
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

    /// \brief Initialises the barriers and arrives at the cluster's. A slot's serves its own warp
    /// and the copy engine at once, the others the cluster once it has met.
    __device__ __forceinline__ void begin(int warp) {
      if (threadIdx.x % lanes == 0) {
        if (warp < warps) {
          for (int s = 0; s < slots; ++s)
            full[warp][s].init(1);
          fence_bulk_copies();
        } else {
#pragma unroll 1
          for (int r = 0; r < rows_in_flight; ++r) {
            records_full[r].init(1);
            constants_full[r].init(1);
            constants_empty[r].init(warps);
          }
          fence_barrier_init();
        }
      }
      __syncwarp();
      cluster_arrive();
    }
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
  int width_segments;  ///< of the gradient's rows; 0 without gradient
  bool joins;          ///< runs beside the launch before it and ends after it

  /// \brief Whether parameters alone say which rows count and where they are read: nothing that a
  /// launch before may write.
  __device__ __forceinline__ bool placed() const {
    return !job.weight && !job.student.index.offsets && !job.teacher.index.offsets;
  }
};

/// The block's share of a row: of every `blocks` segments one.
struct Share {
  int first, segments;
};

/// The block's place in the launch.
struct Place {
  int blocks, block;       ///< of the cluster
  int segments;            ///< of a row
  int block_segments;      ///< of a row that the block takes, if not in turn
  int own_rows;            ///< of the cluster
  std::int64_t first_row;  ///< of them
  std::int64_t clusters;   ///< and the distance of one to the next

  __device__ __forceinline__ explicit Place(FusedJob const& in)
      : blocks(cluster_size()),
        block(cluster_rank()),
        segments(in.segments),
        block_segments((in.segments - block + blocks - 1) / blocks),
        first_row(in.first_row + blockIdx.x / blocks),
        clusters(gridDim.x / blocks) {
    own_rows = static_cast<int>((in.end_row - first_row + clusters - 1) / clusters);
  }
  __device__ __forceinline__ std::int64_t row(int own) const { return first_row + own * clusters; }
  /// \tparam in_turn whether blocks take segments in turn through all rows of the cluster, so that
  /// none has the larger share of each. Where rows are many, that costs as much as it gains.
  template <bool in_turn>
  __device__ __forceinline__ Share share(int own) const {
    if (!in_turn) return {block, block_segments};
    int const first = (block - own * segments) & (blocks - 1);  // a power of two
    return {first, (segments - first + blocks - 1) >> (31 - __clz(blocks))};
  }
  __device__ __forceinline__ int segment(Share const& share, int k) const {
    return k * blocks + share.first;
  }
};

/// Where a warp has come to: every block numbers its segments through all rows that count, and its
/// warps take them in turn.
struct Cursor {
  int row = 0;  ///< counted in the cluster's rows
  int segment;  ///< the warp's next one, counted from the block's first in this row, maybe beyond
                ///< it
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
  __device__ __forceinline__ void fetch(FusedJob const& in, std::int64_t row) {
    weight = row < in.end_row ? weight_of(in.job, row) : 0;
    counts = __ballot_sync(all_lanes, weight != 0);
  }
};

/// The same, with where the student's and another tensor's rows lie.
struct PlacedRows {
  RowBatch batch;
  std::int64_t student = 0, other = 0;  ///< of row l in lane l

  /// \param[in] row of this lane
  /// \param[in] other_index `other_index(row)` gives the other tensor's element
  template <class Index>
  __device__ __forceinline__ void fetch(FusedJob const& in, std::int64_t row,
                                        Index const& other_index) {
    batch.fetch(in, row);
    if (row >= in.end_row) return;
    student = in.job.student.index(row);
    other = other_index(row);
  }
  __device__ __forceinline__ std::int64_t student_of(int row) const {
    return __shfl_sync(all_lanes, student, row % lanes);
  }
  __device__ __forceinline__ std::int64_t other_of(int row) const {
    return __shfl_sync(all_lanes, other, row % lanes);
  }
};

/// \brief The first `words` words of what lane 0 reads, on all lanes, and zeros: the lane that
/// tells the writer of the next value that it may write is then the only reader, which racecheck
/// can follow.
template <int words, class T>
__device__ __forceinline__ T read_by_lane_0(T const& from) {
  static_assert(sizeof(T) % sizeof(std::uint32_t) == 0, "T travels as words");
  struct Words {
    std::uint32_t word[sizeof(T) / sizeof(std::uint32_t)];
  } copy{};
  if (threadIdx.x % lanes == 0) copy = bit_cast<Words>(from);
#pragma unroll
  for (int i = 0; i < words; ++i)
    copy.word[i] = __shfl_sync(all_lanes, copy.word[i], 0);
#pragma unroll
  for (int i = words; i < static_cast<int>(sizeof(T) / sizeof(std::uint32_t)); ++i)
    copy.word[i] = 0;
  return bit_cast<T>(copy);
}

/// Sends a warp's records to every block of its cluster: lanes 2 b and 2 b + 1 serve block b with a
/// half each.
class RecordSender {
 public:
  __device__ __forceinline__ RecordSender(SegmentRecord* records, Barrier const* full, int blocks)
      : sends_(static_cast<int>(threadIdx.x % lanes) < 2 * blocks) {
    int const lane = threadIdx.x % lanes, target = sends_ ? lane / 2 : 0;
    records_ = in_block(shared_address(records), target) + lane % 2 * 16;
    full_ = in_block(shared_address(full), target);
  }
  /// \param[in] ring the row's place among those in flight
  /// \param[in] at the record's place among those of all of these rows
  __device__ __forceinline__ void send(SegmentRecord const& r, int ring, int at) const {
    if (!sends_) return;
    cuda::send(records_ + at * static_cast<int>(sizeof(SegmentRecord)),
               threadIdx.x % 2 == 0
                   ? make_uint4(__float_as_uint(r.max_student), __float_as_uint(r.max_teacher),
                                __float_as_uint(r.sum_student), __float_as_uint(r.sum_teacher))
                   : make_uint4(__float_as_uint(r.weighted), r.flags,
                                __float_as_uint(r.rest_student), __float_as_uint(r.rest_teacher)),
               full_ + ring * static_cast<int>(sizeof(Barrier)));
  }

 private:
  bool const sends_;
  SharedAddress records_, full_;
};

/// \brief Zeros in a gradient's row from segment `from` on: all of a row of weight 0, and columns
/// beyond the last segment.
template <int warps, class S>
__device__ __forceinline__ void store_zeros(FusedJob const& in, Place const& place,
                                            RowPointer<S> const& to, int from, int warp) {
  Vector<S> const zero{};
  for (int k = from + place.block + warp * place.blocks; k < in.width_segments;
       k += warps * place.blocks)
#pragma unroll 1
    for (int i = 0; i < vectors; ++i)
      to.store_one(std::int64_t(k) * segment_columns, 0, in.gradient.width, threadIdx.x % lanes, i,
                   zero);
}

/// Brings a warp's segments into its slots, in the order in which it will work on them.
template <class Shape, bool in_turn, class S, class T>
class Loader {
 public:
  __device__ __forceinline__ Loader(FusedJob const& in, Place const& place,
                                    typename Shape::Shared& shared, int warp)
      : in_(in),
        place_(place),
        shared_(shared),
        warp_(warp),
        cursor_{0, warp},
        share_(place.share<in_turn>(0)) {
    fetch();
    open_row();
  }

  /// \brief Has the first segment brought nearer. It is not read, and may still be written.
  __device__ __forceinline__ void prefetch() const {
    if (threadIdx.x % lanes != 0 || !aligned_ || !at_segment()) return;
    int const first = first_column();
    if (columns_from(first) < segment_columns) return;
    bulk_prefetch(student_ + first, segment_columns * sizeof(S));
    bulk_prefetch(teacher_ + first, segment_columns * sizeof(T));
  }

  /// \brief Fills the slot that was freed longest ago, while there are segments.
  /// \return whether there was one
  __device__ __forceinline__ bool next() {
    if (!at_segment()) {
      do {
        if (cursor_.row >= place_.own_rows) return false;
        if (rows_.batch.counted(cursor_.row)) cursor_.segment -= share_.segments;
        if (++cursor_.row % lanes == 0) fetch();
        share_ = place_.share<in_turn>(cursor_.row);
      } while (!at_segment());
      open_row();
    }
    int const lane = threadIdx.x % lanes;
    int const first = first_column();
    int const columns = columns_from(first);
    S const* const student = student_ + first;
    T const* const teacher = teacher_ + first;
    unsigned char* const slot = shared_.slot[warp_][slot_.at];
    Barrier& full = shared_.full[warp_][slot_.at];
    int whole = segment_columns;
    if (!aligned_ || columns < segment_columns) {
      // What cannot be copied in bulk: rows off 16 bytes, and the end of a row, filled with -inf.
      whole = aligned_ ? columns / vector_columns * vector_columns : 0;
#pragma unroll 1
      for (int c = whole + lane * vector_columns; c < segment_columns;
           c += lanes * vector_columns) {
        int const some = min(max(columns - c, 0), vector_columns);
        Vector<S> s;
        Vector<T> t;
        s.load_some(student + c, some);
        t.load_some(teacher + c, some);
        s.store_shared(slot + c * sizeof(S));
        t.store_shared(slot + Shape::student_bytes + c * sizeof(T));
      }
      fence_bulk_copies();
      __syncwarp();
    }
    if (lane == 0) {
      full.arrive_expecting(whole * (sizeof(S) + sizeof(T)));
      if (whole > 0) {
        bulk_copy(slot, student, whole * sizeof(S), full);
        bulk_copy(slot + Shape::student_bytes, teacher, whole * sizeof(T), full);
      }
    }
    slot_.next();
    cursor_.segment += Shape::warps;
    return true;
  }

 private:
  /// \brief Whether the row counts and has the segment. No row beyond the last one counts.
  __device__ __forceinline__ bool at_segment() const {
    return cursor_.segment < share_.segments && rows_.batch.counted(cursor_.row);
  }
  /// \brief The segment's first column, counted from the row's first in this block.
  __device__ __forceinline__ int first_column() const {
    return cursor_.segment * place_.blocks * segment_columns;
  }
  /// \brief Columns of the row from there on, maybe none.
  __device__ __forceinline__ int columns_from(int first) const {
    return static_cast<int>(in_.job.columns) - share_.first * segment_columns - first;
  }
  __device__ __forceinline__ void fetch() {
    rows_.fetch(in_, place_.row(cursor_.row + threadIdx.x % lanes),
                [this](std::int64_t row) { return in_.job.teacher_element(row); });
  }
  __device__ __forceinline__ void open_row() {
    int const first = share_.first * segment_columns;
    student_ = static_cast<S const*>(in_.job.student.data) + rows_.student_of(cursor_.row) + first;
    teacher_ = static_cast<T const*>(in_.job.teacher.data) + rows_.other_of(cursor_.row) + first;
    aligned_ =
        ((reinterpret_cast<std::uintptr_t>(student_) | reinterpret_cast<std::uintptr_t>(teacher_)) &
         15) == 0;
  }

  FusedJob const& in_;
  Place const& place_;
  typename Shape::Shared& shared_;
  int const warp_;
  Cursor cursor_;
  Share share_;  ///< of the cursor's row
  Ring<Shape::slots> slot_;
  PlacedRows rows_;
  S const* student_;  ///< the row's first column in this block
  T const* teacher_;
  bool aligned_;  ///< both, to 16 bytes
};

/// \brief Enqueues a fused kernel on `clusters` clusters of `cluster` blocks.
/// \param[in] early whether it may start while the launch before it ends, for which it waits before
/// it reads or writes memory (at its end, if it `joins`)
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
