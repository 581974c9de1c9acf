// SPDX-License-Identifier: Apache-2.0
#include <gemm.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace {

using namespace vpkl;
using Exec = Kokkos::DefaultExecutionSpace;

/// A matrix of random values that its type holds exactly.
struct TestMatrix {
  Kokkos::View<unsigned char*, Exec::memory_space> device;
  std::vector<double> values;
  apps::Matrix matrix;

  TestMatrix(ElementType type, std::int64_t rows, std::int64_t columns, unsigned seed)
      : device("vpkl_test::matrix", static_cast<std::size_t>(rows * columns) * size_of(type)) {
    std::mt19937 random(seed);
    std::uniform_int_distribution<int> eighths(-16, 16);
    auto const host = Kokkos::create_mirror_view(device);
    dispatch(type, [&](auto element) {
      using T = decltype(element);
      for (std::int64_t i = 0; i < rows * columns; ++i) {
        float const value = static_cast<float>(eighths(random)) / 8.0f;
        values.push_back(value);
        reinterpret_cast<T*>(host.data())[i] = ElementTraits<T>::from_float(value);
      }
    });
    Kokkos::deep_copy(device, host);
    matrix = {device.data(), type, rows, columns};
  }

  double get(std::int64_t i) {
    auto const host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), device);
    return dispatch(matrix.type, [&](auto element) {
      using T = decltype(element);
      return static_cast<double>(
          ElementTraits<T>::to_float(reinterpret_cast<T const*>(host.data())[i]));
    });
  }
};

struct Shape {
  std::int64_t rows, vocabulary, hidden;
};
// Around and beyond the tile sizes.
Shape const shapes[] = {{1, 1, 1}, {3, 5, 7}, {256, 17, 8}, {257, 2049, 3}, {0, 4, 4}, {4, 0, 4}};

TEST(Gemm, forward_is_hidden_times_head_transposed) {
  for (Shape const& s : shapes)
    for (ElementType type : {ElementType::fp32, ElementType::bf16, ElementType::fp16}) {
      TestMatrix hidden(type, s.rows, s.hidden, 1), head(type, s.vocabulary, s.hidden, 2);
      TestMatrix logits(ElementType::fp32, s.rows, s.vocabulary, 3);
      apps::head_forward(Exec(), hidden.matrix, head.matrix, logits.matrix);
      auto const host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), logits.device);
      for (std::int64_t r = 0; r < s.rows; ++r)
        for (std::int64_t v = 0; v < s.vocabulary; ++v) {
          double sum = 0;
          for (std::int64_t h = 0; h < s.hidden; ++h)
            sum += hidden.values[r * s.hidden + h] * head.values[v * s.hidden + h];
          // Products of eighths are exact in fp32.
          ASSERT_EQ(reinterpret_cast<float const*>(host.data())[r * s.vocabulary + v], sum);
        }
    }
}

TEST(Gemm, backward_adds_gradient_transposed_times_hidden) {
  for (Shape const& s : shapes) {
    TestMatrix gradient(ElementType::bf16, s.rows, s.vocabulary, 4);
    TestMatrix hidden(ElementType::fp16, s.rows, s.hidden, 5);
    TestMatrix head(ElementType::fp32, s.vocabulary, s.hidden, 6);
    apps::head_backward(Exec(), gradient.matrix, hidden.matrix, head.matrix);
    auto const host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), head.device);
    for (std::int64_t v = 0; v < s.vocabulary; ++v)
      for (std::int64_t h = 0; h < s.hidden; ++h) {
        double sum = head.values[v * s.hidden + h];
        for (std::int64_t r = 0; r < s.rows; ++r)
          sum += gradient.values[r * s.vocabulary + v] * hidden.values[r * s.hidden + h];
        ASSERT_EQ(reinterpret_cast<float const*>(host.data())[v * s.hidden + h], sum);
      }
  }
}

TEST(Gemm, rounds_once_to_the_type_of_the_logits) {
  TestMatrix hidden(ElementType::fp32, 2, 33, 7), head(ElementType::fp32, 3, 33, 8);
  TestMatrix wide(ElementType::fp32, 2, 3, 9), narrow(ElementType::bf16, 2, 3, 9);
  apps::head_forward(Exec(), hidden.matrix, head.matrix, wide.matrix);
  apps::head_forward(Exec(), hidden.matrix, head.matrix, narrow.matrix);
  for (std::int64_t i = 0; i < 6; ++i)
    EXPECT_EQ(narrow.get(i), bfloat16::from_float(static_cast<float>(wide.get(i))).to_float());
}

}  // namespace
