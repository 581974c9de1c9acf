// SPDX-License-Identifier: Apache-2.0
// Tensors with everything around the rows that must not matter: padding, gaps, odd offsets.
#pragma once

#include <vpkl/core/rows.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace vpkl::test {

inline float read_element(ElementType type, void const* at) {
  return dispatch(type, [&](auto element) {
    using T = decltype(element);
    T value;
    std::memcpy(&value, at, sizeof value);
    return ElementTraits<T>::to_float(value);
  });
}

inline void write_element(ElementType type, void* at, float value) {
  dispatch(type, [&](auto element) {
    using T = decltype(element);
    T const rounded = ElementTraits<T>::from_float(value);
    std::memcpy(at, &rounded, sizeof rounded);
  });
}

inline float rounded(ElementType type, float value) {
  unsigned char bytes[4];
  write_element(type, bytes, value);
  return read_element(type, bytes);
}

inline bool holds_exactly(ElementType type, float value) { return rounded(type, value) == value; }

/// Elements in the memory of an execution space, and back.
template <class Exec, class T>
using DeviceArray = Kokkos::View<T*, typename Exec::memory_space>;

template <class Exec, class T>
DeviceArray<Exec, T> to_device(std::vector<T> const& host) {
  DeviceArray<Exec, T> device(
      Kokkos::view_alloc("vpkl_test::to_device", Kokkos::WithoutInitializing), host.size());
  Kokkos::deep_copy(device, Kokkos::View<T const*, Kokkos::HostSpace, Kokkos::MemoryUnmanaged>(
                                host.data(), host.size()));
  return device;
}

template <class View>
auto to_host(View const& device) {
  auto const mirror = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), device);
  return std::vector<typename View::non_const_value_type>(mirror.data(),
                                                          mirror.data() + mirror.size());
}

/// How the positions of rows are told.
enum class RowForm {
  strided,  ///< one stride
  nested,   ///< batches of two rows with a row left out after each, as in [:, :-1]
  offsets,  ///< one offset a row, in reversed order
};

inline char const* to_string(RowForm form) {
  return form == RowForm::strided ? "strided" : form == RowForm::nested ? "nested" : "offsets";
}

/// `[rows, width]` elements, `gap` elements between rows, `shift` elements before the first.
/// Everything but the rows holds a pattern, whose survival untouched() checks.
template <class Exec>
class Tensor {
 public:
  struct Shape {
    std::int64_t rows = 0, width = 0;
    std::int64_t gap = 0;
    std::int64_t shift = 0;
    RowForm form = RowForm::strided;
  };

  Tensor(ElementType type, Shape const& shape)
      : type_(type),
        shape_(shape),
        offset_(static_cast<std::size_t>(shape.rows)),
        offsets_(Kokkos::view_alloc("vpkl_test::Tensor::offsets", Kokkos::WithoutInitializing),
                 offset_.size()) {
    std::int64_t const stride = shape.width + shape.gap;
    for (std::int64_t r = 0; r < shape.rows; ++r)
      offset_[r] = position(r) * stride;
    std::int64_t const slots =
        shape.rows == 0 ? 0 : 1 + *std::max_element(position_.begin(), position_.end());
    bytes_.assign(static_cast<std::size_t>(shape.shift + slots * stride) * size_of(type), fill);
    device_ = Bytes(Kokkos::view_alloc("vpkl_test::Tensor::device", Kokkos::WithoutInitializing),
                    bytes_.size());
    auto mirror = Kokkos::create_mirror_view(offsets_);
    for (std::size_t r = 0; r < offset_.size(); ++r)
      mirror(r) = offset_[r];
    Kokkos::deep_copy(offsets_, mirror);
    row_.assign(bytes_.size(), false);
    for (std::int64_t r = 0; r < shape.rows; ++r)
      std::fill_n(row_.begin() + byte(r, 0), shape.width * size_of(type), true);
  }

  std::int64_t width() const { return shape_.width; }
  ElementType type() const { return type_; }

  float get(std::int64_t row, std::int64_t column) const {
    return read_element(type_, bytes_.data() + byte(row, column));
  }
  void set(std::int64_t row, std::int64_t column, float value) {
    write_element(type_, bytes_.data() + byte(row, column), value);
  }
  /// Bits of a row, as they are in memory.
  std::vector<unsigned char> bits(std::int64_t row, std::int64_t columns) const {
    auto const begin = bytes_.begin() + byte(row, 0);
    return {begin, begin + columns * static_cast<std::int64_t>(size_of(type_))};
  }

  void to_device() { Kokkos::deep_copy(device_, host()); }
  void to_host() { Kokkos::deep_copy(host(), device_); }

  /// Rows [first, last).
  Rows rows(std::int64_t first, std::int64_t last) const {
    std::int64_t const stride = shape_.width + shape_.gap;
    unsigned char* const base = device_.data() + shape_.shift * size_of(type_);
    Rows out{base, type_, shape_.width, RowIndex::strided(last - first, stride)};
    if (shape_.form == RowForm::offsets || (shape_.form == RowForm::nested && first % 2 != 0)) {
      out.index.offsets = offsets_.data() + first;
    } else if (first < last) {
      out.data = base + offset_[first] * static_cast<std::int64_t>(size_of(type_));
      if (shape_.form == RowForm::nested)
        out.index = RowIndex{last - first, 2, 3 * stride, stride, nullptr};
    }
    return out;
  }

  /// Nothing but the rows has changed since construction.
  bool untouched() const {
    for (std::size_t i = 0; i < bytes_.size(); ++i)
      if (!row_[i] && bytes_[i] != fill) return false;
    return true;
  }

 private:
  using Bytes = Kokkos::View<unsigned char*, typename Exec::memory_space>;
  static constexpr unsigned char fill = 0xa5;

  std::int64_t position(std::int64_t row) {
    std::int64_t const p = shape_.form == RowForm::strided  ? row
                           : shape_.form == RowForm::nested ? row / 2 * 3 + row % 2
                                                            : shape_.rows - 1 - row;
    position_.push_back(p);
    return p;
  }
  std::int64_t byte(std::int64_t row, std::int64_t column) const {
    return (shape_.shift + offset_[row] + column) * static_cast<std::int64_t>(size_of(type_));
  }
  using HostBytes = Kokkos::View<unsigned char*, Kokkos::HostSpace, Kokkos::MemoryUnmanaged>;
  HostBytes host() { return HostBytes(bytes_.data(), bytes_.size()); }

  ElementType type_;
  Shape shape_;
  std::vector<std::int64_t> position_, offset_;
  std::vector<unsigned char> bytes_;
  std::vector<bool> row_;
  Bytes device_;
  Kokkos::View<std::int64_t*, typename Exec::memory_space> offsets_;
};

}  // namespace vpkl::test
