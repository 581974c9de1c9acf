// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief KL's value and gradient in one launch, each row read once and kept on chip.
///
/// A cluster of blocks holds a row; clusters are persistent. Each warp owns a few slots of shared
/// memory and a fixed sequence of segments, which it brings in itself ahead of use. It writes a
/// segment's record to every block of the cluster; one more warp a block merges a row's records and
/// hands the constants to the others. A row's gradient is computed `lag` rows behind its
/// statistics, so that neither the exchange nor the merge is waited for.
///
/// Code that is run stays short on purpose: everything unusual (ends of rows, rows off 16 bytes,
/// special rows) is a small loop apart. Laid out in line, it cost half the speed in instruction
/// cache misses.
#pragma once

#include <vpkl/divergence/cuda/fused_jsd.hpp>

namespace vpkl::impl::cuda {

/// \tparam few whether clusters have so few rows that how slots are first filled counts, and a
/// segment more or less of a block
template <Divergence divergence, bool few, class S, class T, int warps, int slots>
__global__ void __launch_bounds__(FusedShape<S, T, warps, slots>::threads, 1)
    fused_kernel(__grid_constant__ FusedJob const in) {
// Clusters and bulk copies came with compute capability 9.0; the host starts this nowhere else.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using Shape = FusedShape<S, T, warps, slots>;
  constexpr Weighting weighting =
      divergence == Divergence::forward_kl ? Weighting::teacher : Weighting::student;
  extern __shared__ __align__(128) unsigned char memory[];
  typename Shape::Shared& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  SegmentRecord* const records = reinterpret_cast<SegmentRecord*>(memory + sizeof(shared));

  int const warp = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  Place const place(in);
  int const blocks = place.blocks, block = place.block, own_rows = place.own_rows;
  int const segments = in.segments;

  shared.begin(warp);
  // The launch before may write which rows count and where they lie.
  if (!in.joins && !in.placed()) wait_previous_launch();
  Loader<Shape, few, S, T> loader(in, place, shared, warp);
  if (warp < warps) loader.prefetch();
  if (!in.joins) wait_previous_launch();
  allow_next_launch();
  bool const filled = warp < warps && loader.next();
  cluster_wait();

  if (warp == warps) {
    // The merging warp.
    Ring<rows_in_flight> ring;
    RowBatch batch;
    for (int q = 0; q < own_rows; ++q) {
      if (q % lanes == 0) batch.fetch(in, place.row(q + lane));
      std::int64_t const row = place.row(q);
      if (!batch.counted(q)) {
        if (block == 0 && lane == 0) in.value[row] = 0;
        continue;
      }
      if (lane == 0)
        shared.records_full[ring.at].arrive_expecting(segments * sizeof(SegmentRecord));
      shared.records_full[ring.at].wait(ring.parity);
      RowStatistics const merged =
          merge_segments(records + ring.at * segments, segments, weighting, in.options);
      GradientConstants const constants = gradient_constants<divergence>(
          merged, in.job.options, 0, __shfl_sync(all_lanes, batch.weight, q % lanes));
      // The first round finds the slots empty.
      shared.constants_empty[ring.at].wait(ring.parity ^ 1);
      if (lane == 0) {
        shared.constants[ring.at] = constants;
        shared.constants_full[ring.at].arrive();
      }
      __syncwarp();
      // Nobody waits for the value.
      if (block == 0) {
        float const value = row_value(in.job, merged, JsdSums{});
        if (lane == 0) in.value[row] = value;
      }
      ring.next();
    }
    // Every message to this block has been waited for: it may end before others of its cluster.
    if (in.joins) wait_previous_launch();
    return;
  }

  RecordSender const sender(records, shared.records_full, blocks);
  // Of segments that are asked for at once the first comes as late as the last. Where rows are few,
  // a warp asks for the next one whenever one has come; where they are many, that code would cost
  // each row a little, and the first alone goes ahead.
  int unfilled = few ? Shape::slots - 1 : 0;
  if (!few) {
    if (filled) shared.full[warp][0].wait(0);
#pragma unroll 1
    for (int s = 1; s < Shape::slots; ++s)
      loader.next();
  }

  auto const slot_vector = [&](unsigned char const* slot, int i, Vector<S>& s, Vector<T>& t) {
    int const at = (i * lanes + lane) * vector_columns;
    s.load_shared(slot + at * sizeof(S));
    t.load_shared(slot + Shape::student_bytes + at * sizeof(T));
  };

  Cursor ahead{0, warp}, behind = ahead;
  Ring<Shape::slots> ahead_slot, behind_slot;
  Ring<rows_in_flight> ahead_ring, behind_ring;
  RowBatch ahead_batch, behind_batch;
  std::int64_t behind_gradient = 0;
#pragma unroll 1
  for (int step = 0; step < own_rows + in.lag; ++step) {
    if (step < own_rows) {
      if (ahead.row % lanes == 0) ahead_batch.fetch(in, place.row(ahead.row + lane));
      if (ahead_batch.counted(ahead.row)) {
        Share const share = place.share<few>(ahead.row);
        int k = ahead.segment;
#pragma unroll 1
        for (; k < share.segments; k += warps) {
          int const segment = place.segment(share, k);
          unsigned char const* const slot = shared.slot[warp][ahead_slot.at];
          shared.full[warp][ahead_slot.at].wait(ahead_slot.parity);
          if (few && unfilled > 0) {
            --unfilled;
            loader.next();
          }
          auto const get = [&](int i, Vector<S>& s, Vector<T>& t) { slot_vector(slot, i, s, t); };
          SegmentRecord const r = segment_statistics<weighting, vectors, Vector<S>, Vector<T>>(
              in.options, in.job.columns - std::int64_t(segment) * segment_columns, get, get);
          sender.send(r, ahead_ring.at, ahead_ring.at * segments + segment);
          ahead_slot.next();
        }
        ahead.segment = k - share.segments;
        ahead_ring.next();
      }
      ++ahead.row;
    }
    if (step < in.lag) continue;

    if (behind.row % lanes == 0) {
      std::int64_t const lane_row = place.row(behind.row + lane);
      behind_batch.fetch(in, lane_row);
      if (lane_row < in.end_row && in.gradient.data) behind_gradient = in.gradient.index(lane_row);
    }
    bool const counted = behind_batch.counted(behind.row);
    RowPointer<S> const to =
        RowPointer<S>::make(in.gradient.data, in.gradient.type,
                            __shfl_sync(all_lanes, behind_gradient, behind.row % lanes));
    if (counted) {
      shared.constants_full[behind_ring.at].wait(behind_ring.parity);
      GradientConstants const constants =
          read_by_lane_0<kl_words>(shared.constants[behind_ring.at]);
      Share const share = place.share<few>(behind.row);
      int k = behind.segment;
#pragma unroll 1
      for (; k < share.segments; k += warps) {
        std::int64_t const first = std::int64_t(place.segment(share, k)) * segment_columns;
        unsigned char const* const slot = shared.slot[warp][behind_slot.at];
        if (in.gradient.data) {
          if (to.aligned && ordinary<divergence>(constants) &&
              first + segment_columns <= in.job.columns) {
            S* const p = to.at + first + lane * vector_columns;
#pragma unroll
            for (int i = 0; i < vectors; ++i) {
              Vector<S> s;
              Vector<T> t;
              slot_vector(slot, i, s, t);
              vector_gradient<divergence>(s, t, constants, in.options)
                  .store(p + i * lanes * vector_columns);
            }
          } else {
#pragma unroll 1
            for (int i = 0; i < vectors; ++i) {
              Vector<S> s;
              Vector<T> t;
              slot_vector(slot, i, s, t);
              s = any_gradient<divergence>(s, t, constants, in.options);
              to.store_one(first, in.job.columns, in.gradient.width, lane, i, s);
            }
          }
        }
        __syncwarp();
        loader.next();
        behind_slot.next();
      }
      behind.segment = k - share.segments;
      __syncwarp();
      if (lane == 0) shared.constants_empty[behind_ring.at].arrive();
      behind_ring.next();
    }
    store_zeros<warps>(in, place, to, counted ? segments : 0, warp);
    ++behind.row;
  }
  if (in.joins) wait_previous_launch();
#endif
}

/// The fused kernels of one pair of types.
template <class S, class T>
struct FusedKernels {
  // Fifteen warps and the merging one make four on each scheduler, with 128 registers a thread.
  static constexpr int slots = 3;
  static constexpr int warps = sizeof(S) + sizeof(T) == 4 ? 15 : 8;
  using Shape = FusedShape<S, T, warps, slots>;

  static auto kernel(Divergence divergence, bool few) {
    if (divergence == Divergence::forward_kl)
      return few ? fused_kernel<Divergence::forward_kl, true, S, T, warps, slots>
                 : fused_kernel<Divergence::forward_kl, false, S, T, warps, slots>;
    return few ? fused_kernel<Divergence::reverse_kl, true, S, T, warps, slots>
               : fused_kernel<Divergence::reverse_kl, false, S, T, warps, slots>;
  }
  static void load() {
    for (Divergence divergence : {Divergence::forward_kl, Divergence::reverse_kl})
      for (bool few : {false, true})
        VPKL_CHECK_CUDA(cudaFuncSetAttribute(kernel(divergence, few),
                                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(block_memory)));
    FusedJsd<S, T>::load();
  }

  /// \brief Clusters of so many blocks that the device holds at once.
  static int resident_clusters(int cluster) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(cluster));
    config.blockDim = dim3(Shape::threads);
    config.dynamicSmemBytes = block_memory;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    VPKL_CHECK_CUDA(
        cudaOccupancyMaxActiveClusters(&clusters, kernel(Divergence::forward_kl, false), &config));
    return clusters;
  }

  /// \brief Blocks a row should be held by, or 0 where reading it twice is as good.
  static int choose(ResidentClusters const& resident, std::int64_t rows, std::int64_t segments) {
    // One row a cluster at most: the more blocks a row the better. Else the fewest that let
    // statistics run ahead.
    for (int i = ResidentClusters::sizes - 1; i >= 0; --i)
      if (rows <= resident.count[i] && Shape::lag(segments, ResidentClusters::blocks(i)) >= 0)
        return ResidentClusters::blocks(i);
    for (int i = 0; i < ResidentClusters::sizes; ++i)
      if (resident.count[i] > 0 && Shape::lag(segments, ResidentClusters::blocks(i)) == 1)
        return ResidentClusters::blocks(i);
    return 0;
  }

  static int cluster(ResidentClusters const& resident, RowJob const& job) {
    if (job.columns == 0) return 0;
    return job.options.divergence == Divergence::jsd
               ? FusedJsd<S, T>::choose(resident, job.rows(), segments_of(job.columns))
               : choose(resident, job.rows(), segments_of(job.columns));
  }

  static void start(cudaStream_t stream, int cluster, int clusters, FusedJob job, bool early) {
    job.lag = Shape::lag(job.segments, cluster);
    // As measured: with 2 or 5 rows a cluster it gains 3 %, with 8 nothing.
    bool const few = job.end_row - job.first_row <= 5 * clusters;
    launch_fused<Shape>(stream, kernel(job.job.options.divergence, few), job, cluster, clusters,
                        early);
  }

  /// \return number of launches
  static int launch(cudaStream_t stream, int cluster, ResidentClusters const& resident,
                    RowJob const& job, float* value, Rows const& gradient) {
    std::int64_t const rows = job.rows();
    FusedJob fused{job,
                   SegmentOptions::make(job),
                   gradient,
                   value,
                   static_cast<int>(segments_of(job.columns)),
                   0,
                   0,
                   rows,
                   gradient.data ? static_cast<int>(segments_of(gradient.width)) : 0,
                   false};
    int const held = resident.of(cluster);
    if (job.options.divergence == Divergence::jsd) {
      launch_fused<typename FusedJsd<S, T>::Shape>(stream, fused_jsd_kernel<S, T>, fused, cluster,
                                                   static_cast<int>(rows < held ? rows : held),
                                                   true);
      return 1;
    }
    // Clusters of 4 leave some multiprocessors over. Pairs of them take a share of the rows at the
    // same time; not running ahead, a pair is slower (0.8 as measured).
    int const pairs = cluster == 4 ? resident.of(2) - 2 * held : 0;
    std::int64_t share = 0;
    if (pairs > 0 && rows >= 8 * held && Shape::lag(fused.segments, 2) == 0)
      share = rows * (8 * pairs) / (20 * held + 8 * pairs);
    fused.end_row = rows - share;
    // The second of a pair does not wait for what came before both: the first begins after it.
    start(stream, cluster, static_cast<int>(rows < held ? rows : held), fused, share == 0);
    if (share == 0) return 1;
    fused.first_row = fused.end_row;
    fused.end_row = rows;
    fused.joins = true;
    start(stream, 2, static_cast<int>(share < pairs ? share : pairs), fused, true);
    return 2;
  }
};

/// Types that are loaded through float are read twice.
template <>
struct FusedKernels<AnyType, AnyType> {
  static void load() {}
  static int cluster(ResidentClusters const&, RowJob const&) { return 0; }
  static int launch(cudaStream_t, int, ResidentClusters const&, RowJob const&, float*,
                    Rows const&) {
    return 0;
  }
};

template <class S, class T>
class AllKernels : public TwoPhase<S, T> {
 public:
  void load(bool clusters) const override {
    TwoPhase<S, T>::load(clusters);
    if (clusters) FusedKernels<S, T>::load();
  }
  int fused_cluster(ResidentClusters const& resident, RowJob const& job) const override {
    return FusedKernels<S, T>::cluster(resident, job);
  }
  int fused(cudaStream_t stream, int cluster, ResidentClusters const& resident, RowJob const& job,
            float* value, Rows const& gradient) const override {
    return FusedKernels<S, T>::launch(stream, cluster, resident, job, value, gradient);
  }
};

}  // namespace vpkl::impl::cuda
