// SPDX-License-Identifier: Apache-2.0
// The operator at sizes that only a device has memory for.
#include "cuda/device.hpp"

#include <vpkl/core/cuda/check.hpp>
#include <vpkl/divergence/plan.hpp>

#include <cmath>
#include <vector>

using namespace vpkl;
using namespace vpkl::test;

namespace {

// Case 16: more than 2^31 elements, all 0 but one of the teacher's last row.
TEST(DivergenceOnDevice, more_elements_than_32_bits_count) {
  constexpr std::int64_t rows = 16384, vocabulary = 151936, last = (rows - 1) * vocabulary;
  std::size_t available = 0, total = 0;
  VPKL_CHECK_CUDA(cudaMemGetInfo(&available, &total));
  std::size_t const needed =
      3 * sizeof(std::uint16_t) * static_cast<std::size_t>(rows * vocabulary);
  if (available < needed + (std::size_t(1) << 30))
    GTEST_SKIP() << available << " bytes of device memory are free, " << needed << " are needed";

  Kokkos::Cuda const exec;
  DeviceWords const student("student", rows * vocabulary), teacher("teacher", rows * vocabulary),
      gradient("gradient", rows * vocabulary);  // zeros: Kokkos initialises them
  std::uint16_t const ten = bfloat16::from_float(10).bits;
  VPKL_CHECK_CUDA(cudaMemcpy(teacher.data() + last, &ten, sizeof ten, cudaMemcpyHostToDevice));
  Kokkos::View<float*, Kokkos::CudaSpace> const value("value", rows);

  DivergencePlan<Kokkos::Cuda>::Options options;
  options.student_type = options.teacher_type = ElementType::bf16;
  options.max_rows = rows;
  DivergencePlan<Kokkos::Cuda> plan(exec, Communicator::self(), VocabShard::whole(vocabulary),
                                    options);
  auto const at = [](DeviceWords const& words) {
    return Rows{words.data(), ElementType::bf16, vocabulary, RowIndex::strided(rows, vocabulary)};
  };
  plan.execute(exec, at(student), at(teacher), nullptr, value.data(), at(gradient));
  exec.fence();

  auto const values = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), value);
  for (std::int64_t row = 0; row + 1 < rows; ++row)
    ASSERT_EQ(values(row), 0.0f) << "row " << row;
  EXPECT_NEAR(values(rows - 1), 1.130794811630, 1.5e-6);
  for (std::int64_t row : {std::int64_t(0), rows / 2, rows - 2, rows - 1}) {
    std::vector<std::uint16_t> bits(2);
    VPKL_CHECK_CUDA(
        cudaMemcpy(bits.data(), gradient.data() + row * vocabulary, 4, cudaMemcpyDeviceToHost));
    // ps - pt, of id 0 and of the others.
    bool const marked = row == rows - 1;
    double const even = 1.0 / vocabulary, ten_up = std::exp(10.0);
    double const expected[] = {marked ? even - ten_up / (ten_up + vocabulary - 1) : 0,
                               marked ? even - 1 / (ten_up + vocabulary - 1) : 0};
    for (int id : {0, 1})
      EXPECT_NEAR(bfloat16{bits[id]}.to_float(), expected[id], std::fabs(expected[id]) / 200)
          << "row " << row << " id " << id;
  }
}

}  // namespace
