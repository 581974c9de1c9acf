/* SPDX-License-Identifier: Apache-2.0 */
/**
 * \file
 * \brief vpkl communicators from MPI's.
 */
#ifndef VPKL_MPI_H
#define VPKL_MPI_H

#include <vpkl.h>

#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * \brief Collective. Duplicates `mpi_comm`, which stays the caller's and may be freed. MPI must be
 * initialised.
 */
VPKL_C_API vpkl_status vpkl_comm_from_mpi(MPI_Comm mpi_comm, vpkl_comm** comm);

#ifdef __cplusplus
}
#endif

#endif
