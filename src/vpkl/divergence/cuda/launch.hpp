// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief The CUDA kernels of a divergence plan as plain functions of a stream.
#pragma once

#include <vpkl/core/cuda/check.hpp>
#include <vpkl/divergence/kernels.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace vpkl::impl::cuda {

/// Warps of a block of the kernels that read a row once each.
constexpr int block_warps = 8;

/// Clusters of the fused kernel that the device holds at once, by blocks a cluster.
struct ResidentClusters {
  static constexpr int sizes = 3;
  static constexpr int blocks(int i) { return 2 << i; }
  int count[sizes] = {};

  int of(int cluster) const { return count[cluster == 2 ? 0 : cluster == 4 ? 1 : 2]; }
  /// \brief Asks the device, after the kernels are loaded.
  static ResidentClusters query();
};

/// The kernels for one pair of element types.
class TypedKernels {
 public:
  virtual ~TypedKernels() = default;
  /// \brief Loads every kernel, so that none is loaded while a collective runs.
  /// \param[in] clusters whether the device has thread block clusters
  virtual void load(bool clusters) const = 0;
  /// \brief Statistics of each row; rows are split in `parts`, whose records go to `partial`.
  virtual void statistics(cudaStream_t stream, RowJob const& job, int parts, void* partial,
                          RowStatistics* out) const = 0;
  virtual void jsd_sums(cudaStream_t stream, RowJob const& job, int parts, void* partial,
                        RowStatistics const* merged, JsdSums* out) const = 0;
  virtual void finish_known(cudaStream_t stream, RowJob const& job, int parts, void* partial,
                            RowStatistics const* merged, bool first_rank, double* share,
                            Rows const& gradient) const = 0;
  virtual void finish(cudaStream_t stream, RowJob const& job, int parts,
                      RowStatistics const* merged, JsdSums const* sums, int ranks,
                      std::int64_t stride, float* value, Rows const& gradient) const = 0;
  /// \brief Blocks of the fused kernel that should hold a row of this job; 0: it does not fit on
  /// chip, or reading it twice is as fast.
  virtual int fused_cluster(ResidentClusters const& resident, RowJob const& job) const = 0;
  /// \brief Value and gradient of whole rows, held by `cluster` blocks each.
  /// \return number of launches
  virtual int fused(cudaStream_t stream, int cluster, ResidentClusters const& resident,
                    RowJob const& job, float* value, Rows const& gradient) const = 0;
};

/// \brief The kernels for these types. Bits depend on the pair of types, so that a pair always
/// gets the same kernels.
TypedKernels const& typed_kernels(ElementType student, ElementType teacher);

extern TypedKernels const& fp32_kernels;
extern TypedKernels const& bf16_kernels;
extern TypedKernels const& fp16_kernels;
extern TypedKernels const& mixed_kernels;

/// \brief Merges the records of `ranks` ranks in rank order.
void combine(cudaStream_t stream, RowJob const& job, RowStatistics const* gathered, int ranks,
             std::int64_t stride, RowStatistics* merged);
/// \brief Loads the kernels that depend on no element type.
void load_common();

/// \brief Merges the segment records of split rows.
void fold_statistics(cudaStream_t stream, RowJob const& job, void const* partial,
                     RowStatistics* out);
void fold_sums(cudaStream_t stream, RowJob const& job, void const* partial, JsdSums* out);
/// \brief Shares from the segments' weighted sums of split rows.
void fold_shares(cudaStream_t stream, RowJob const& job, void const* partial,
                 RowStatistics const* merged, bool first_rank, double* share);
/// \brief Values from the shares of `ranks` ranks, `rows` apart.
void add_shares(cudaStream_t stream, std::int64_t rows, double const* shares, int ranks,
                double temperature, float* value);

}  // namespace vpkl::impl::cuda
