/* SPDX-License-Identifier: Apache-2.0 */
/**
 * \file
 * \brief vpkl communicators from NCCL's.
 *
 * In VPKL_CUDA their collectives are enqueued on the call's stream, without a detour through the
 * host. The current CUDA device must be Kokkos'. A process that has loaded two shared libraries of
 * NCCL is refused. What one rank gets wrong here is an error of that rank alone.
 */
#ifndef VPKL_NCCL_H
#define VPKL_NCCL_H

#include <vpkl.h>

#include <nccl.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * \brief Over a communicator of the caller's, able to work. It stays the caller's: keep it as long
 * as `comm` and what was made from it; after VPKL_COMMUNICATION_ERROR call ncclCommAbort, or work
 * on the device may wait for ever.
 * \param[in] nccl_comm of the ranks
 * \param[out] comm to be freed by vpkl_comm_destroy()
 * \return VPKL_SUCCESS, VPKL_INVALID_ARGUMENT, VPKL_OTHER_ERROR for two libraries of NCCL
 */
VPKL_C_API vpkl_status vpkl_comm_from_nccl(ncclComm_t nccl_comm, vpkl_comm** comm);

/**
 * \brief Collective over the `size` ranks that hold the same `id`, each with a GPU of its own. vpkl
 * makes the NCCL communicator, without blocking, and aborts it after a failure. Where one rank
 * fails on its own, the others wait until the time-out; ranks that share a GPU are left to NCCL.
 * \param[in] id from ncclGetUniqueId on one rank, brought to the others by the caller
 * \param[in] rank, size of this process and of the group
 * \param[in] timeout_ms for the making, and later as of vpkl_comm_set_timeout()
 * \param[out] comm to be freed by vpkl_comm_destroy()
 * \return as vpkl_comm_from_nccl(), or VPKL_COMMUNICATION_ERROR
 */
VPKL_C_API vpkl_status vpkl_comm_from_nccl_id(const ncclUniqueId* id, int rank, int size,
                                              int64_t timeout_ms, vpkl_comm** comm);

#ifdef __cplusplus
}
#endif

#endif
