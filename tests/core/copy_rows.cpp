// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/copy_rows.hpp>

#include <support/environment.hpp>
#include <support/tensor.hpp>

#include <gtest/gtest.h>

#include <vector>

namespace {

using namespace vpkl;
using namespace vpkl::test;

constexpr ElementType types[] = {ElementType::fp32, ElementType::bf16, ElementType::fp16};

template <class Exec>
class CopyRows : public testing::Test {};
TYPED_TEST_SUITE(CopyRows, ExecutionSpaces, SpaceNames);

TYPED_TEST(CopyRows, copies_and_converts_between_any_rows) {
  using Shape = typename Tensor<TypeParam>::Shape;
  TypeParam const exec;
  Random random(5);
  for (ElementType from_type : types)
    for (ElementType to_type : types)
      for (std::int64_t columns : {0, 1, 7, 8, 64, 333})
        for (RowForm form : {RowForm::strided, RowForm::nested, RowForm::offsets}) {
          constexpr std::int64_t rows = 5;
          Tensor<TypeParam> from(from_type, Shape{rows, columns + 3, 1, 1, form});
          Tensor<TypeParam> to(to_type, Shape{rows, columns + 2, 3, 0, RowForm::strided});
          for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t c = 0; c < from.width(); ++c)
              from.set(r, c, static_cast<float>(normal(random)));
            for (std::int64_t c = 0; c < to.width(); ++c)
              to.set(r, c, 77);
          }
          from.to_device();
          to.to_device();
          vpkl::impl::copy_rows(exec, "vpkl_test::copy", from.rows(0, rows), 2, to.rows(0, rows), 1,
                                columns);
          exec.fence();
          to.to_host();
          ASSERT_TRUE(to.untouched());
          for (std::int64_t r = 0; r < rows; ++r)
            for (std::int64_t c = 0; c < to.width(); ++c) {
              bool const copied = c >= 1 && c < 1 + columns;
              ASSERT_EQ(to.get(r, c), copied ? rounded(to_type, from.get(r, c + 1)) : 77);
            }
        }
}

TYPED_TEST(CopyRows, zeros_selected_rows_alone) {
  using Shape = typename Tensor<TypeParam>::Shape;
  TypeParam const exec;
  for (ElementType type : types)
    for (RowForm form : {RowForm::strided, RowForm::nested, RowForm::offsets}) {
      constexpr std::int64_t rows = 7, width = 131;
      Tensor<TypeParam> tensor(type, Shape{rows, width, 5, 1, form});
      Kokkos::View<std::uint8_t*, typename TypeParam::memory_space> selected("vpkl_test::selected",
                                                                             rows);
      auto const host = Kokkos::create_mirror_view(selected);
      for (std::int64_t r = 0; r < rows; ++r) {
        host(r) = r % 3 == 0 ? 1 : 0;
        for (std::int64_t c = 0; c < width; ++c)
          tensor.set(r, c, 5);
      }
      Kokkos::deep_copy(selected, host);
      tensor.to_device();
      vpkl::impl::zero_rows(exec, "vpkl_test::zero", tensor.rows(0, rows), selected.data());
      exec.fence();
      tensor.to_host();
      ASSERT_TRUE(tensor.untouched());
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t c = 0; c < width; ++c)
          ASSERT_EQ(tensor.get(r, c), host(r) ? 0 : 5);
    }
}

}  // namespace
