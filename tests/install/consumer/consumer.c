/* SPDX-License-Identifier: Apache-2.0 */
/* A C program that uses vpkl: the divergence of one row, and its gradient. */
#include <vpkl.h>

#include <math.h>
#include <stdio.h>

int main(void) {
  float student[3] = {1, 2, 0}, teacher[3] = {3, 1, 0}, value = 0, gradient[3];
  vpkl_rows const s = {student, VPKL_FP32, 3, 1, 0, 0, 3, NULL};
  vpkl_rows const t = {teacher, VPKL_FP32, 3, 1, 0, 0, 3, NULL};
  vpkl_rows const g = {gradient, VPKL_FP32, 3, 1, 0, 0, 3, NULL};
  vpkl_divergence_options const forward = {VPKL_FORWARD_KL, 0.5, 1.0};
  vpkl_comm* comm = NULL;
  vpkl_vocab* vocab = NULL;
  vpkl_plan* plan = NULL;
  int const right =
      vpkl_comm_self(&comm) == VPKL_SUCCESS && vpkl_vocab_whole(3, 3, 3, &vocab) == VPKL_SUCCESS &&
      vpkl_plan_create(VPKL_HOST, NULL, comm, vocab, &forward, VPKL_DENSE, VPKL_FP32, VPKL_FP32, 1,
                       &plan) == VPKL_SUCCESS &&
      vpkl_plan_execute(plan, NULL, &s, &t, NULL, &value, &g) == VPKL_SUCCESS &&
      fabs(value - 0.811154214466) < 1e-6 && fabs(gradient[0] + 0.599066263427) < 1e-6;
  printf("%.9f, expected 0.811154214; %s\n", value, right ? "right" : vpkl_last_error());
  vpkl_plan_destroy(plan);
  vpkl_vocab_destroy(vocab);
  vpkl_comm_destroy(comm);
  return right && vpkl_finalize() == VPKL_SUCCESS ? 0 : 1;
}
