// SPDX-License-Identifier: Apache-2.0
// operator host|device ROWS WIDTH IN OUT: the mean divergences of bf16 logits with the C++
// interface. IN is student and teacher, OUT is for each divergence the gradient and the values.
#include <vpkl/divergence/plan.hpp>

#include <Kokkos_Core.hpp>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace {

using namespace vpkl;

template <class Exec>
void run(std::int64_t rows, std::int64_t width, std::ifstream& in, std::ofstream& out) {
  using Matrix = Kokkos::View<bfloat16**, Kokkos::LayoutRight, typename Exec::memory_space>;
  Exec const exec;
  Matrix student("student", rows, width), teacher("teacher", rows, width),
      gradient("gradient", rows, width);
  Kokkos::View<float*, typename Exec::memory_space> value("value", rows), weight("weight", rows);
  Kokkos::deep_copy(weight, 1.0f / static_cast<float>(rows));
  auto const host = Kokkos::create_mirror_view(gradient);
  auto const host_value = Kokkos::create_mirror_view(value);
  auto const bytes = static_cast<std::streamsize>(host.size() * sizeof(bfloat16));
  for (Matrix const& matrix : {student, teacher}) {
    in.read(reinterpret_cast<char*>(host.data()), bytes);
    Kokkos::deep_copy(matrix, host);
  }
  for (Divergence divergence : {Divergence::forward_kl, Divergence::reverse_kl, Divergence::jsd}) {
    typename DivergencePlan<Exec>::Options options;
    options.divergence.divergence = divergence;
    options.student_type = options.teacher_type = ElementType::bf16;
    options.max_rows = rows;
    DivergencePlan<Exec> plan(exec, Communicator::self(), VocabShard::whole(width, width, width),
                              options);
    plan.execute(exec, const_rows(student), const_rows(teacher), weight.data(), value.data(),
                 vpkl::rows(gradient));
    exec.fence();
    Kokkos::deep_copy(host, gradient);
    Kokkos::deep_copy(host_value, value);
    out.write(reinterpret_cast<char const*>(host.data()), bytes);
    out.write(reinterpret_cast<char const*>(host_value.data()),
              static_cast<std::streamsize>(host_value.size() * sizeof(float)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  std::ifstream in(argv[4], std::ios::binary);
  std::ofstream out(argv[5], std::ios::binary);
  std::int64_t const rows = std::atoll(argv[2]), width = std::atoll(argv[3]);
  Kokkos::ScopeGuard const kokkos;
  if (std::string(argv[1]) == "device")
    run<Kokkos::DefaultExecutionSpace>(rows, width, in, out);
  else
    run<Kokkos::DefaultHostExecutionSpace>(rows, width, in, out);
  return in && out ? 0 : 1;
}
