// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/rows.hpp>

#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace {

using namespace vpkl;

template <class T, class Layout = Kokkos::LayoutRight>
using Matrix = Kokkos::View<T**, Layout, Kokkos::HostSpace>;
template <class T>
using Cube = Kokkos::View<T***, Kokkos::LayoutRight, Kokkos::HostSpace>;

TEST(Rows, of_a_matrix) {
  Matrix<bfloat16> const view("vpkl_test::view", 3, 5);
  Rows const r = rows(view);
  EXPECT_EQ(r.data, view.data());
  EXPECT_EQ(r.type, ElementType::bf16);
  EXPECT_EQ(r.width, 5);
  EXPECT_EQ(r.index.count, 3);
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(r.index(i), 5 * i);
}

TEST(Rows, of_a_cube_and_its_slices) {
  Cube<float> const view("vpkl_test::view", 2, 4, 6);
  auto const positions = Kokkos::subview(view, Kokkos::ALL, std::make_pair(1, 4), Kokkos::ALL);
  auto const columns = Kokkos::subview(view, Kokkos::ALL, Kokkos::ALL, std::make_pair(2, 5));
  ConstRows const a = const_rows(view), b = const_rows(positions), c = const_rows(columns);
  EXPECT_EQ(a.index.count, 8);
  EXPECT_EQ(b.index.count, 6);
  EXPECT_EQ(c.width, 3);
  for (int s = 0; s < 2; ++s)
    for (int t = 0; t < 4; ++t) {
      EXPECT_EQ(static_cast<float const*>(a.data) + a.index(4 * s + t), &view(s, t, 0));
      EXPECT_EQ(static_cast<float const*>(c.data) + c.index(4 * s + t), &view(s, t, 2));
      if (t < 3) {
        EXPECT_EQ(static_cast<float const*>(b.data) + b.index(3 * s + t), &view(s, t + 1, 0));
      }
    }
}

TEST(Rows, a_transposed_view_is_refused_by_name) {
  Matrix<float, Kokkos::LayoutLeft> const view("vpkl_test::view", 3, 5);
  try {
    const_rows(view);
    FAIL();
  } catch (InvalidArgument const& error) {
    EXPECT_NE(std::string(error.what()).find("stride 3, expected 1"), std::string::npos)
        << error.what();
  }
  // One column is contiguous whatever the layout.
  EXPECT_NO_THROW(const_rows(Matrix<float, Kokkos::LayoutLeft>("vpkl_test::view", 3, 1)));
}

TEST(Rows, of_empty_views) {
  EXPECT_EQ(const_rows(Matrix<float>("vpkl_test::view", 0, 5)).index.count, 0);
  EXPECT_EQ(const_rows(Cube<vpkl::half>("vpkl_test::view", 2, 0, 5)).index.count, 0);
  EXPECT_EQ(const_rows(Matrix<float>("vpkl_test::view", 4, 0)).width, 0);
}

TEST(RowIndex, offsets_win_over_strides) {
  std::int64_t const offsets[] = {70, 0, 35};
  RowIndex index = RowIndex::strided(3, 10);
  index.offsets = offsets;
  EXPECT_EQ(index(0), 70);
  EXPECT_EQ(index(2), 35);
}

TEST(RowIndex, positions_pass_32_bits) {
  RowIndex const index = RowIndex::strided(std::int64_t(1) << 20, 151936);
  EXPECT_EQ(index((std::int64_t(1) << 20) - 1), ((std::int64_t(1) << 20) - 1) * 151936);
}

TEST(CheckRows, refuses_by_name_and_value) {
  alignas(8) static float memory[64];
  ConstRows const good{memory, ElementType::fp32, 4, RowIndex{6, 3, 20, 5, nullptr}};
  EXPECT_NO_THROW(check_rows(good, "logits"));
  struct Case {
    std::function<void(ConstRows&)> change;
    char const* says;
  };
  for (Case const& c : {
           Case{[](ConstRows& r) { r.index.count = -1; }, "row count is -1"},
           Case{[](ConstRows& r) { r.width = -2; }, "width is -2"},
           Case{[](ConstRows& r) { r.data = nullptr; }, "data is null"},
           Case{[](ConstRows& r) { r.data = reinterpret_cast<char*>(memory) + 2; }, "address"},
           Case{[](ConstRows& r) { r.index.inner = 0; }, "rows per outer step is 0"},
           Case{[](ConstRows& r) { r.index.inner_stride = 3; }, "row stride is 3"},
           Case{[](ConstRows& r) { r.index.outer_stride = 0; }, "batch stride is 0"},
       }) {
    ConstRows bad = good;
    c.change(bad);
    try {
      check_rows(bad, "logits");
      ADD_FAILURE() << "expected: " << c.says;
    } catch (InvalidArgument const& error) {
      EXPECT_NE(std::string(error.what()).find(std::string("logits: ") + c.says), std::string::npos)
          << error.what();
    }
  }
}

TEST(CheckRows, empty_rows_need_no_memory) {
  EXPECT_NO_THROW(check_rows({nullptr, ElementType::bf16, 4, RowIndex{}}, "x"));
  EXPECT_NO_THROW(check_rows({nullptr, ElementType::bf16, 0, RowIndex::strided(3, 0)}, "x"));
}

}  // namespace
