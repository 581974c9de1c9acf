/* SPDX-License-Identifier: Apache-2.0 */
/* Carries the name of NCCL's library: what a second copy looks like to the loader. */
int vpkl_test_second_nccl(void) { return 0; }
