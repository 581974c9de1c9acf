// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief JSD's value and gradient in one launch.
///
/// As KL's fused kernel, with JSD's sums as a stage between statistics and gradient that has an
/// exchange of its own. The sums leave log2(ps/m), most of the gradient's arithmetic, in the slot.
/// In every step a warp turns to the statistics of a row, the gradient two rows before it and the
/// sums of the row between, so that merges are hardly waited for.
///
/// Arithmetic limits, not memory. So statistics read their columns past the slots, and so does the
/// gradient where two-byte columns make place for the logarithms: with slots taken from the sums to
/// the gradient alone, two blocks hold a row that KL spreads over four, and every multiprocessor
/// has work.
#pragma once

#include <vpkl/divergence/cuda/fused_parts.hpp>

namespace vpkl::impl::cuda {

/// A slot holds a segment's columns, then its logarithms in the place of all columns (of two bytes)
/// or the teacher's (of four).
template <class S, class T>
struct JsdShape {
  static_assert(sizeof(S) == sizeof(T), "logarithms take the place of columns");
  static constexpr bool two_bytes = sizeof(S) + sizeof(T) == 4;
  static constexpr int warps = two_bytes ? 15 : 12;
  static constexpr int slots = two_bytes ? 3 : 2;
  using Base = FusedShape<S, T, warps, slots>;
  static constexpr int student_bytes = Base::student_bytes;
  static constexpr int threads = Base::threads;

  struct alignas(128) Shared : Base::Shared {
    Barrier sums_full[rows_in_flight], mean_full[rows_in_flight];
    RowStatistics statistics[rows_in_flight];
    float mean[rows_in_flight];

    __device__ __forceinline__ void begin(int warp) {
      if (warp == warps && threadIdx.x % lanes == 0) {
#pragma unroll 1
        for (int r = 0; r < rows_in_flight; ++r) {
          sums_full[r].init(1);
          mean_full[r].init(1);
        }
      }
      Base::Shared::begin(warp);
    }
  };
  static constexpr std::size_t shared_bytes(std::int64_t segments) {
    return sizeof(Shared) + static_cast<std::size_t>(rows_in_flight * segments) *
                                (sizeof(SegmentRecord) + sizeof(JsdSums));
  }
  static constexpr bool fits(std::int64_t segments, int cluster) {
    return segments >= cluster && segments <= std::int64_t(warps) * slots * cluster &&
           shared_bytes(segments) <= block_memory;
  }
};

template <class S, class T>
__global__ void __launch_bounds__(JsdShape<S, T>::threads, 1)
    fused_jsd_kernel(__grid_constant__ FusedJob const in) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using Shape = JsdShape<S, T>;
  using VS = Vector<S>;
  using VT = Vector<T>;
  constexpr int warps = Shape::warps;
  extern __shared__ __align__(128) unsigned char memory[];
  typename Shape::Shared& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  int const segments = in.segments;
  SegmentRecord* const records = reinterpret_cast<SegmentRecord*>(memory + sizeof(shared));
  JsdSums* const sums = reinterpret_cast<JsdSums*>(records + rows_in_flight * segments);

  int const warp = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  Place const place(in);
  int const blocks = place.blocks, block = place.block, own_rows = place.own_rows;
  Share const share = place.share<false>(0);

  shared.begin(warp);
  wait_previous_launch();
  allow_next_launch();
  cluster_wait();

  if (warp == warps) {
    // The merging warp: a row's records, then the sums of the row before it.
    Ring<rows_in_flight> ring, sums_ring;
    RowBatch batch, sums_batch;
#pragma unroll 1
    for (int q = 0; q <= own_rows; ++q) {
      if (q < own_rows) {
        if (q % lanes == 0) batch.fetch(in, place.row(q + lane));
        if (batch.counted(q)) {
          if (lane == 0)
            shared.records_full[ring.at].arrive_expecting(segments * sizeof(SegmentRecord));
          shared.records_full[ring.at].wait(ring.parity);
          RowStatistics const merged =
              merge_segments(records + ring.at * segments, segments, Weighting::none, in.options);
          GradientConstants const constants = gradient_constants<Divergence::jsd>(
              merged, in.job.options, 0, __shfl_sync(all_lanes, batch.weight, q % lanes));
          // The first round finds the places empty.
          shared.constants_empty[ring.at].wait(ring.parity ^ 1);
          if (lane == 0) {
            shared.constants[ring.at] = constants;
            shared.constants_full[ring.at].arrive();
            shared.statistics[ring.at] = merged;
          }
          __syncwarp();
          ring.next();
        } else if (block == 0 && lane == 0) {
          in.value[place.row(q)] = 0;
        }
      }
      if (q == 0) continue;
      int const before = q - 1;
      if (before % lanes == 0) sums_batch.fetch(in, place.row(before + lane));
      if (!sums_batch.counted(before)) continue;
      RowStatistics const merged = shared.statistics[sums_ring.at];
      bool const regular = row_state(merged) == RowState::regular;
      if (lane == 0)
        shared.sums_full[sums_ring.at].arrive_expecting(regular ? segments * sizeof(JsdSums) : 0);
      JsdSums total;
      if (regular) {
        shared.sums_full[sums_ring.at].wait(sums_ring.parity);
        total = merge_sums(sums + sums_ring.at * segments, segments);
      }
      if (lane == 0) {
        shared.mean[sums_ring.at] = mean_in_bits(total.student);
        shared.mean_full[sums_ring.at].arrive();
        // Nobody waits for the value.
        if (block == 0) in.value[place.row(before)] = row_value(in.job, merged, total);
      }
      __syncwarp();
      sums_ring.next();
    }
    // Every message to this block has been waited for: it may end before others of its cluster.
    return;
  }

  RecordSender const sender(records, shared.records_full, blocks);

  // The sums' logarithms take the place of the columns: each lane puts them where it alone reads.
  auto const logarithms = [&](unsigned char* slot, int i, auto const& access) {
    int const at = (i * lanes + lane) * vector_columns;
    unsigned char* const second = slot + Shape::student_bytes + at * sizeof(T);
    access(*reinterpret_cast<float4*>(Shape::two_bytes ? slot + at * sizeof(S) : second),
           *reinterpret_cast<float4*>(Shape::two_bytes ? second : second + sizeof(float4)));
  };
  auto const student_row = [&](std::int64_t element) {
    return RowPointer<S>::make(const_cast<void*>(in.job.student.data), in.job.student.type,
                               element);
  };
  auto const teacher_row = [&](std::int64_t element) {
    return RowPointer<T>::make(const_cast<void*>(in.job.teacher.data), in.job.teacher.type,
                               element);
  };

  // Statistics are of row ahead, the gradient of row behind, and the sums of the row after that.
  // Where rows in turn count, a warp with more of the sums' segments than others takes fewer of the
  // next step's statistics'.
  Cursor ahead{0, (warp + share.segments) % warps}, behind{0, warp};
  Ring<rows_in_flight> ahead_ring, behind_ring;
  Ring<Shape::slots> slot;
  PlacedRows ahead_rows, behind_rows;
  auto const teacher_index = [&](std::int64_t row) { return in.job.teacher_element(row); };
  auto const gradient_index = [&](std::int64_t row) {
    return in.gradient.data ? in.gradient.index(row) : 0;
  };
  ahead_rows.fetch(in, place.row(lane), teacher_index);
  behind_rows.fetch(in, place.row(lane), gradient_index);
  Loader<Shape, false, S, T> loader(in, place, shared, warp);
#pragma unroll 1
  for (int s = 0; s < Shape::slots; ++s)
    loader.next();
#pragma unroll 1
  for (int step = 0; step < own_rows + 2; ++step) {
    if (step < own_rows) {
      if (ahead_rows.batch.counted(ahead.row)) {
        RowPointer<S> const student = student_row(ahead_rows.student_of(ahead.row));
        RowPointer<T> const teacher = teacher_row(ahead_rows.other_of(ahead.row));
        int k = ahead.segment;
#pragma unroll 1
        for (; k < share.segments; k += warps) {
          std::int64_t const first = std::int64_t(place.segment(share, k)) * segment_columns;
          auto const load_one = [&](int i, VS& s, VT& t) {
            student.load_one(first, in.job.columns, lane, i, s);
            teacher.load_one(first, in.job.columns, lane, i, t);
          };
          SegmentRecord r;
          if (student.aligned && teacher.aligned && first + segment_columns <= in.job.columns) {
            VS s[vectors];
            VT t[vectors];
#pragma unroll
            for (int i = 0; i < vectors; ++i) {
              s[i].load(student.at + first + (i * lanes + lane) * vector_columns);
              t[i].load(teacher.at + first + (i * lanes + lane) * vector_columns);
            }
            r = segment_statistics<Weighting::none, vectors, VS, VT>(
                in.options, segment_columns,
                [&](int i, VS& to_s, VT& to_t) {
                  to_s = s[i];
                  to_t = t[i];
                },
                load_one);
          } else {
            r = segment_statistics<Weighting::none, 1, VS, VT>(in.options, in.job.columns - first,
                                                               load_one, load_one);
          }
          sender.send(r, ahead_ring.at, ahead_ring.at * segments + place.segment(share, k));
        }
        ahead.segment = k - share.segments;
        ahead_ring.next();
      }
      if (++ahead.row % lanes == 0)
        ahead_rows.fetch(in, place.row(ahead.row + lane), teacher_index);
    }

    if (step >= 2) {
      bool const counted = behind_rows.batch.counted(behind.row);
      RowPointer<S> const to =
          RowPointer<S>::make(in.gradient.data, in.gradient.type, behind_rows.other_of(behind.row));
      if (counted) {
        RowPointer<S> const student = student_row(behind_rows.student_of(behind.row));
        shared.mean_full[behind_ring.at].wait(behind_ring.parity);
        GradientConstants constants = read_by_lane_0<all_words>(shared.constants[behind_ring.at]);
        constants.mean = read_by_lane_0<1>(shared.mean[behind_ring.at]);
        int k = behind.segment;
#pragma unroll 1
        for (; k < share.segments; k += warps) {
          std::int64_t const first = std::int64_t(place.segment(share, k)) * segment_columns;
          unsigned char* const columns = shared.slot[warp][slot.at];
          auto const get = [&](int i, Vector<float>& l) {
            logarithms(columns, i, [&](float4 const& low, float4 const& high) {
              l.low = low;
              l.high = high;
            });
          };
          if (in.gradient.data) {
            if (to.aligned && student.aligned && ordinary<Divergence::jsd>(constants) &&
                first + segment_columns <= in.job.columns) {
              int const at = lane * vector_columns;
              VS s[vectors];
#pragma unroll
              for (int i = 0; i < vectors; ++i)
                if (Shape::two_bytes)
                  s[i].load(student.at + first + at + i * lanes * vector_columns);
                else
                  s[i].load_shared(columns + (at + i * lanes * vector_columns) * sizeof(S));
#pragma unroll
              for (int i = 0; i < vectors; ++i) {
                Vector<float> l;
                get(i, l);
                vector_jsd_gradient<false>(s[i], l, constants, in.options)
                    .store(to.at + first + at + i * lanes * vector_columns);
              }
            } else {
#pragma unroll 1
              for (int i = 0; i < vectors; ++i) {
                VS s;
                Vector<float> l;
                student.load_one(first, in.job.columns, lane, i, s);
                get(i, l);
                s = any_jsd_gradient(s, l, constants, in.options);
                to.store_one(first, in.job.columns, in.gradient.width, lane, i, s);
              }
            }
          }
          // The slot was written, and a bulk copy fills it next.
          fence_bulk_copies();
          __syncwarp();
          loader.next();
          slot.next();
        }
        behind.segment = k - share.segments;
        __syncwarp();
        if (lane == 0) shared.constants_empty[behind_ring.at].arrive();
        behind_ring.next();
      }
      store_zeros<warps>(in, place, to, counted ? segments : 0, warp);
      if (++behind.row % lanes == 0)
        behind_rows.fetch(in, place.row(behind.row + lane), gradient_index);
    }

    if (step < 1 || behind.row >= own_rows || !behind_rows.batch.counted(behind.row)) continue;
    shared.constants_full[behind_ring.at].wait(behind_ring.parity);
    GradientConstants const constants = read_by_lane_0<all_words>(shared.constants[behind_ring.at]);
    Ring<Shape::slots> sums_slot = slot;
#pragma unroll 1
    for (int k = behind.segment; k < share.segments; k += warps) {
      unsigned char* const columns = shared.slot[warp][sums_slot.at];
      shared.full[warp][sums_slot.at].wait(sums_slot.parity);
      sums_slot.next();
      if (constants.state != RowState::regular) continue;
      auto const get = [&](int i, VS& s, VT& t) {
        int const at = (i * lanes + lane) * vector_columns;
        s.load_shared(columns + at * sizeof(S));
        t.load_shared(columns + Shape::student_bytes + at * sizeof(T));
      };
      auto const keep = [&](int i, float const(&l)[vector_columns]) {
        logarithms(columns, i, [&](float4& low, float4& high) {
          low = make_float4(l[0], l[1], l[2], l[3]);
          high = make_float4(l[4], l[5], l[6], l[7]);
        });
      };
      JsdSums const part = any_jsd_sums<1, VS, VT>(constants, in.options, get, keep);
      if (lane < blocks) {
        JsdSums* const at = sums + behind_ring.at * segments + place.segment(share, k);
        send(in_block(shared_address(at), lane), bit_cast<uint4>(part),
             in_block(shared_address(&shared.sums_full[behind_ring.at]), lane));
      }
    }
  }
#endif
}

/// The fused kernel of JSD for one pair of types.
template <class S, class T>
struct FusedJsd {
  using Shape = JsdShape<S, T>;

  static void load() {
    VPKL_CHECK_CUDA(cudaFuncSetAttribute(fused_jsd_kernel<S, T>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(block_memory)));
  }

  /// \brief Blocks a row should be held by, or 0 where three kernels are as good.
  static int choose(ResidentClusters const& resident, std::int64_t rows, std::int64_t segments) {
    // One row a cluster at most: the more blocks a row the better. Else the fewest, if they have
    // work for every warp.
    for (int i = ResidentClusters::sizes - 1; i >= 0; --i)
      if (rows <= resident.count[i] && Shape::fits(segments, ResidentClusters::blocks(i)))
        return ResidentClusters::blocks(i);
    for (int i = 0; i < ResidentClusters::sizes; ++i)
      if (resident.count[i] > 0 && Shape::fits(segments, ResidentClusters::blocks(i)))
        return segments >= Shape::warps * ResidentClusters::blocks(i) ? ResidentClusters::blocks(i)
                                                                      : 0;
    return 0;
  }
};

}  // namespace vpkl::impl::cuda
