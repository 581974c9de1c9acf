// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief The arithmetic of one block of columns on a CPU.
///
/// Every host kernel calls these three functions, and nothing else touches a logit: a row's bits
/// cannot depend on how rows and blocks were spread over threads. Column c of a block belongs to
/// lane c % lanes; lanes are combined in a fixed tree.
#pragma once

#include <vpkl/divergence/row_constants.hpp>

#include <cstdint>

namespace vpkl::impl::host {

constexpr int lanes = 64;
constexpr int block_columns = 2048;

/// Columns of one block as floats, filled up with -inf to a multiple of `lanes`.
struct alignas(64) Block {
  float student[block_columns];
  float teacher[block_columns];
  int padded = 0;  ///< columns in use, a multiple of lanes

  /// \brief Reads `columns` elements of either model.
  void load(ElementType student_type, void const* student_row, ElementType teacher_type,
            void const* teacher_row, std::int64_t first, int columns);
  /// \brief Reads one model, rounded to `as`, and no teacher.
  void load_one(ElementType type, void const* row, ElementType as, std::int64_t first, int columns);
};

/// \brief Statistics of a block.
RowStatistics statistics(Block const& block, KernelOptions const& options);

/// \brief The block's part of a row's forward_kl_share, with the row's maxima.
double weighted_difference(Block const& block, RowConstants const& row,
                           KernelOptions const& options);

/// \brief JSD's two sums over a block of a regular row.
JsdSums jsd_sums(Block const& block, RowConstants const& row, KernelOptions const& options);

/// \brief Gradient of `weight · T² · divergence` for the columns of a block.
/// \param[out] gradient `block.padded` floats
void gradient(Block const& block, RowConstants const& row, KernelOptions const& options,
              float weight, float* gradient);

/// \brief Rounds `columns` floats to `type` and writes them from element `first` of `row`.
void store(ElementType type, void* row, std::int64_t first, int columns, float const* values);

/// \brief Writes zeros to elements `[first, last)` of `row`.
void store_zeros(ElementType type, void* row, std::int64_t first, std::int64_t last);

}  // namespace vpkl::impl::host
