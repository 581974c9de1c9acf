/* SPDX-License-Identifier: Apache-2.0 */
/* The C interface: distils a teacher into a student's language-model head with the operator, whose
 * gradient takes the place of the student's logits. Under mpirun each rank holds a part of the
 * vocabulary. The exit status is 1 unless the loss has fallen. */
#include <vpkl.h>
#ifdef WITH_MPI
#include <vpkl_mpi.h>
#endif

#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 32, H = 16, VOCABULARY = 1009 };
static const float learning_rate = 100;

/* Of this rank; with one rank all columns are used. */
static float hidden[ROWS * H], student_head[VOCABULARY * H], teacher_head[VOCABULARY * H];
static float student[ROWS * VOCABULARY], teacher[ROWS * VOCABULARY];

static void ok(vpkl_status status) {
  if (status == VPKL_SUCCESS) return;
  fprintf(stderr, "train_c: %s\n", vpkl_last_error());
  exit(1);
}

/* Numbers in [-1, 1) from element `begin` of a sequence that is the same on every rank. */
static void fill(float* data, uint32_t seed, int64_t begin, int64_t count) {
  int64_t i;
  for (i = 0; i < begin + count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    if (i >= begin) data[i - begin] = (float)(seed / 2147483648.0 - 1);
  }
}

/* logits [ROWS, columns] = hidden . head^T */
static void forward(const float* head, float* logits, int64_t columns) {
  int64_t row, v, h;
  for (row = 0; row < ROWS; ++row)
    for (v = 0; v < columns; ++v) {
      float sum = 0;
      for (h = 0; h < H; ++h)
        sum += hidden[row * H + h] * head[v * H + h];
      logits[row * columns + v] = sum;
    }
}

/* head -= learning_rate . gradient^T . hidden */
static void descend(const float* gradient, float* head, int64_t columns) {
  int64_t row, v, h;
  for (row = 0; row < ROWS; ++row)
    for (v = 0; v < columns; ++v)
      for (h = 0; h < H; ++h)
        head[v * H + h] -= learning_rate * gradient[row * columns + v] * hidden[row * H + h];
}

int main(int argc, char** argv) {
  int rank = 0, size = 1, update, row;
  float value[ROWS], weight[ROWS];
  double first = 0, loss = 0;
  vpkl_comm* comm = NULL;
  vpkl_vocab* vocab = NULL;
  vpkl_plan* plan = NULL;
#ifdef WITH_MPI
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  ok(vpkl_comm_from_mpi(MPI_COMM_WORLD, &comm));
#else
  (void)argc, (void)argv;
  ok(vpkl_comm_self(&comm));
#endif

  int64_t const begin = (int64_t)VOCABULARY * rank / size;
  int64_t const end = (int64_t)VOCABULARY * (rank + 1) / size, columns = end - begin;
  vpkl_shard const shard = {VOCABULARY, begin, end, columns, columns};
  vpkl_divergence_options const options = {VPKL_FORWARD_KL, 0.5, 2.0};
  vpkl_rows const s = {student, VPKL_FP32, columns, ROWS, 0, 0, columns, NULL};
  vpkl_rows const t = {teacher, VPKL_FP32, columns, ROWS, 0, 0, columns, NULL};
  ok(vpkl_vocab_create(comm, &shard, &vocab));
  ok(vpkl_plan_create(VPKL_HOST, NULL, comm, vocab, &options, VPKL_VOCAB_PARALLEL, VPKL_FP32,
                      VPKL_FP32, ROWS, &plan));

  fill(hidden, 1, 0, ROWS * H);
  fill(student_head, 2, begin * H, columns * H);
  fill(teacher_head, 3, begin * H, columns * H);
  forward(teacher_head, teacher, columns);
  for (row = 0; row < ROWS; ++row)
    weight[row] = 1.0f / ROWS; /* gradient of the mean */

  for (update = 0; update < 20; ++update) {
    forward(student_head, student, columns);
    ok(vpkl_plan_execute(plan, NULL, &s, &t, weight, value, &s));
    descend(student, student_head, columns);

    loss = 0;
    for (row = 0; row < ROWS; ++row)
      loss += value[row] / ROWS;
    if (update == 0) first = loss;
    if (rank == 0) printf("update %2d, loss %.6f\n", update, loss);
  }

  vpkl_plan_destroy(plan);
  vpkl_vocab_destroy(vocab);
  vpkl_comm_destroy(comm);
  ok(vpkl_finalize());
#ifdef WITH_MPI
  MPI_Finalize();
#endif
  return loss < first / 2 ? 0 : 1;
}
