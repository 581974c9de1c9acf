// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Teacher rows in host memory.
#pragma once

#include <vpkl/core/kokkos.hpp>
#include <vpkl/teacher/row_store.hpp>

namespace vpkl::impl {

/// One block of host memory, rows at a pitch of a multiple of 128 bytes.
template <class ExecutionSpace>
class HostRowStore final : public RowStore<ExecutionSpace> {
 public:
  static constexpr std::size_t pitch_alignment = 128;

  /// \brief Bytes that `rows` rows take; the largest number where they cannot be counted.
  static std::size_t bytes_for(std::int64_t rows, std::int64_t width, ElementType type);

  /// \throws OutOfMemory
  HostRowStore(ExecutionSpace const& exec, std::int64_t rows, std::int64_t width, ElementType type);
  ~HostRowStore() override;

  void store(ExecutionSpace const& exec, ConstRows const& rows) override;
  void fetch(ExecutionSpace const& exec, std::vector<std::int64_t> const& slots,
             Rows const& out) const override;
  std::size_t bytes() const override { return memory_.size(); }

 private:
  Rows all_rows() const;

  ExecutionSpace exec_;
  std::int64_t rows_, width_;
  ElementType type_;
  std::int64_t pitch_;  ///< elements
  Kokkos::View<unsigned char*, Kokkos::HostSpace> memory_;
};

}  // namespace vpkl::impl
