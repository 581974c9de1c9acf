// SPDX-License-Identifier: Apache-2.0
// A project that uses vpkl: the distillation loss of one token, and its gradient.
#include <vpkl/training/streamed_loss.hpp>

#include <Kokkos_Core.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

using Exec = Kokkos::DefaultExecutionSpace;
using Logits = Kokkos::View<float***, Kokkos::LayoutRight, Exec::memory_space>;

namespace {

Logits logits(std::string const& label, float a, float b, float c) {
  Logits view(label, 1, 2, 3);  // [B, T, V]; position 0 predicts token 1
  auto const host = Kokkos::create_mirror_view(view);
  host(0, 0, 0) = a;
  host(0, 0, 1) = b;
  host(0, 0, 2) = c;
  Kokkos::deep_copy(view, host);
  return view;
}

bool near(double value, double expected) {
  std::printf("%.12f, expected %.12f\n", value, expected);
  return std::fabs(value - expected) < 1e-6;
}

bool distil() {
  Exec const exec;
  Logits const student = logits("student", 1, 2, 0);
  Logits const teacher = logits("teacher", 3, 1, 0);
  Logits const gradient("gradient", 1, 2, 3);
  std::uint8_t const response[] = {0, 1};

  vpkl::Communicator const comm = vpkl::Communicator::self();
  vpkl::TeacherCache<Exec> cache(comm, {});
  vpkl::StreamedLoss<Exec> loss(comm, vpkl::VocabShard::whole(3), {});
  cache.store(exec, vpkl::const_rows(teacher), 1, 2);
  vpkl::LossResult const result = loss.compute(exec, vpkl::const_rows(student), cache,
                                               {response, 1, 2}, {}, vpkl::rows(gradient));

  auto const host = Kokkos::create_mirror_view(gradient);
  Kokkos::deep_copy(host, gradient);
  bool right = near(result.loss, 0.811154214466);
  right = near(host(0, 0, 0), -0.599066263427) && right;
  right = near(host(0, 0, 1), 0.551045756390) && right;
  right = near(host(0, 0, 2), 0.048020507036) && right;
  return right && host(0, 1, 0) == 0;
}

}  // namespace

int main(int argc, char** argv) {
  Kokkos::initialize(argc, argv);
  bool const right = distil();
  Kokkos::finalize();
  return right ? 0 : 1;
}
