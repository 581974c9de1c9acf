// SPDX-License-Identifier: Apache-2.0
// Distils a teacher into a student's language-model head: teacher cache, streamed loss, gradient of
// the head, gradient descent. Under mpirun each rank holds a part of the vocabulary.
//
//   ./train            or            mpirun -n 2 ./train
//
// The exit status is 1 unless the loss has fallen.
#include <vpkl/training/streamed_loss.hpp>

#include <Kokkos_Core.hpp>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <string>
#include <vector>

namespace {

using Exec = Kokkos::DefaultExecutionSpace;
template <class T>
using View = Kokkos::View<T, Kokkos::LayoutRight, Exec::memory_space>;

constexpr int B = 2, T = 32, H = 16, V = 1009;  // sequences, positions, hidden size, vocabulary
constexpr float learning_rate = 100;

/// `[rows, H]` in [-1, 1): rows [begin, begin + rows) of a matrix that is the same on every rank.
View<float**> random_rows(std::string const& label, unsigned seed, std::int64_t begin,
                          std::int64_t rows) {
  View<float**> matrix(label, rows, H);
  auto const host = Kokkos::create_mirror_view(matrix);
  std::mt19937 random(seed);
  random.discard(begin * H);
  for (std::int64_t i = 0; i < rows * H; ++i)
    host(i / H, i % H) = static_cast<float>(random() / 2147483648.0 - 1);
  Kokkos::deep_copy(matrix, host);
  return matrix;
}

/// logits[b, t, :] = head · hidden[b · T + t, :]
void head_forward(Exec const& exec, View<float**> hidden, View<float**> head,
                  View<float***> logits) {
  std::int64_t const columns = head.extent(0);
  Kokkos::parallel_for(
      "train::head_forward", Kokkos::RangePolicy<Exec>(exec, 0, B * T * columns),
      KOKKOS_LAMBDA(std::int64_t i) {
        std::int64_t const row = i / columns, v = i % columns;
        float sum = 0;
        for (int h = 0; h < H; ++h)
          sum += hidden(row, h) * head(v, h);
        logits(row / T, row % T, v) = sum;
      });
}

/// head -= learning_rate · gradientᵀ · hidden
void descend(Exec const& exec, View<float***> gradient, View<float**> hidden, View<float**> head) {
  Kokkos::parallel_for(
      "train::descend", Kokkos::RangePolicy<Exec>(exec, 0, head.extent(0) * H),
      KOKKOS_LAMBDA(std::int64_t i) {
        std::int64_t const v = i / H, h = i % H;
        float sum = 0;
        for (int row = 0; row < B * T; ++row)
          sum += gradient(row / T, row % T, v) * hidden(row, h);
        head(v, h) -= learning_rate * sum;
      });
}

bool train() {
  Exec const exec;
#ifdef VPKL_ENABLE_MPI
  vpkl::Communicator const tp = vpkl::Communicator::mpi(MPI_COMM_WORLD);
#else
  vpkl::Communicator const tp = vpkl::Communicator::self();
#endif
  auto const [begin, end] = vpkl::even_range(V, tp.size(), tp.rank());
  std::int64_t const columns = end - begin;
  vpkl::VocabShard const shard = vpkl::VocabShard::make(tp, {V, begin, end, columns, columns, {}});

  View<float**> const hidden = random_rows("train::hidden", 1, 0, B * T);
  View<float**> const student_head = random_rows("train::student_head", 2, begin, columns);
  View<float**> const teacher_head = random_rows("train::teacher_head", 3, begin, columns);
  View<float***> const student("train::student", B, T, columns);
  View<float***> const teacher("train::teacher", B, T, columns);
  View<float***> const gradient("train::gradient", B, T, columns);

  // 1 where a token is part of the response; here the second half of each sequence.
  std::vector<std::uint8_t> response(B * T);
  for (int i = 0; i < B * T; ++i)
    response[i] = i % T >= T / 2;
  std::uint8_t const* const mask = response.data();

  vpkl::TeacherCache<Exec> cache(tp, {});
  vpkl::StreamedLoss<Exec>::Options options;
  options.divergence.temperature = 2.0;
  vpkl::StreamedLoss<Exec> loss(tp, shard, options);

  head_forward(exec, hidden, teacher_head, teacher);
  cache.store(exec, vpkl::const_rows(teacher), B, T);

  double first = 0, last = 0;
  for (int update = 0; update < 20; ++update) {
    head_forward(exec, hidden, student_head, student);
    auto const result = loss.compute(exec, vpkl::const_rows(student), cache, {mask, B, T}, {},
                                     vpkl::rows(gradient));
    descend(exec, gradient, hidden, student_head);

    last = result.loss;
    if (update == 0) first = last;
    if (tp.rank() == 0) std::printf("update %2d, loss %.6f\n", update, last);
  }
  exec.fence();
  return last < first / 2;
}

}  // namespace

int main(int argc, char** argv) {
#ifdef VPKL_ENABLE_MPI
  MPI_Init(&argc, &argv);
#endif
  Kokkos::initialize(argc, argv);
  bool fallen = false;
  try {
    fallen = train();
  } catch (std::exception const& error) {
    std::fprintf(stderr, "train: %s\n", error.what());
  }
  Kokkos::finalize();
#ifdef VPKL_ENABLE_MPI
  MPI_Finalize();
#endif
  return fallen ? 0 : 1;
}
