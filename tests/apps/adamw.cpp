// SPDX-License-Identifier: Apache-2.0
#include <adamw.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace {

using namespace vpkl;
using Exec = Kokkos::DefaultExecutionSpace;

TEST(AdamW, follows_the_formula_and_rounds_the_masters) {
  constexpr int count = 100, steps = 7;
  apps::AdamW<Exec>::Options options;
  options.learning_rate = 0.01;
  options.weight_decay = 0.1;
  Kokkos::View<bfloat16*, Exec::memory_space> weights("vpkl_test::weights", count);
  Kokkos::View<float*, Exec::memory_space> gradient("vpkl_test::gradient", count);
  auto const host_weights = Kokkos::create_mirror_view(weights);
  auto const host_gradient = Kokkos::create_mirror_view(gradient);
  std::vector<double> master, first(count, 0), second(count, 0);
  for (int i = 0; i < count; ++i) {
    host_weights(i) = bfloat16::from_float(std::sin(static_cast<float>(i)));
    master.push_back(host_weights(i).to_float());
  }
  Kokkos::deep_copy(weights, host_weights);
  apps::AdamW<Exec> optimizer(Exec(), options, weights.data(), ElementType::bf16, count);
  for (int step = 1; step <= steps; ++step) {
    for (int i = 0; i < count; ++i) {
      double const g = host_gradient(i) = std::cos(static_cast<float>(i * step)) * 1e-3f;
      first[i] = 0.9 * first[i] + 0.1 * g;
      second[i] = 0.999 * second[i] + 0.001 * g * g;
      master[i] -= 0.01 * 0.1 * master[i];
      master[i] -= 0.01 * (first[i] / (1 - std::pow(0.9, step))) /
                   (std::sqrt(second[i] / (1 - std::pow(0.999, step))) + 1e-8);
    }
    Kokkos::deep_copy(gradient, host_gradient);
    optimizer.step(Exec(), gradient.data(), weights.data());
  }
  auto const masters =
      Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), optimizer.masters());
  Kokkos::deep_copy(host_weights, weights);
  for (int i = 0; i < count; ++i) {
    EXPECT_NEAR(masters(i), master[i], 2e-6);
    EXPECT_EQ(host_weights(i).bits, bfloat16::from_float(masters(i)).bits);
  }
}

}  // namespace
