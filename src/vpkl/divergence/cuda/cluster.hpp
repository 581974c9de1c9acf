// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Hopper's asynchronous copies, barriers and cluster messages.
#pragma once

#include <cstdint>

namespace vpkl::impl::cuda {

/// Address in the shared memory window, of this block or (after `in_block`) of another one.
using SharedAddress = std::uint32_t;

__device__ __forceinline__ SharedAddress shared_address(void const* p) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(p));
}

/// \brief The same place in block `rank` of the cluster.
__device__ __forceinline__ SharedAddress in_block(SharedAddress own, int rank) {
  SharedAddress r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(own), "r"(rank));
  return r;
}

__device__ __forceinline__ int cluster_rank() {
  std::uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return static_cast<int>(r);
}
__device__ __forceinline__ int cluster_size() {
  std::uint32_t r;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return static_cast<int>(r);
}

/// \brief First half of a barrier of the cluster. It orders what fence_barrier_init() covers and no
/// other memory.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
/// \brief Second half.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// \brief Lets the next launch of the stream start now, if it was made to join this one.
__device__ __forceinline__ void allow_next_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// \brief Waits until the launch before, which this one joined, has ended.
__device__ __forceinline__ void wait_previous_launch() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// A barrier in shared memory that counts arrivals and bytes.
struct Barrier {
  std::uint64_t state;

  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
                 "r"(arrivals)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  /// \brief One arrival, and `bytes` that the phase must also see.
  __device__ __forceinline__ void arrive_expecting(std::uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  __device__ __forceinline__ bool passed(std::uint32_t parity) {
    std::uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(this)), "r"(parity)
        : "memory");
    return done != 0;
  }
  /// \brief Waits for the phase of this parity to complete.
  __device__ __forceinline__ void wait(std::uint32_t parity) {
    while (!passed(parity)) {
    }
  }
};

/// \brief Makes barrier initialisation visible to the cluster, from its barrier on.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// \brief Orders this thread's ordinary accesses of shared memory, and barriers it initialised,
/// before later bulk copies.
__device__ __forceinline__ void fence_bulk_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// \brief Copies `bytes` (a multiple of 16; both sides aligned to 16) behind `barrier`.
__device__ __forceinline__ void bulk_copy(void* to, void const* from, std::uint32_t bytes,
                                          Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

/// \brief Asks for `bytes` (a multiple of 16, aligned to 16) to be brought into the L2 cache.
/// Nothing is read: what others still write there may be asked for.
__device__ __forceinline__ void bulk_prefetch(void const* from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
               "r"(bytes)
               : "memory");
}

/// \brief Stores 16 bytes in a block of the cluster and counts them at a barrier there.
__device__ __forceinline__ void send(SharedAddress to, uint4 value, SharedAddress barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
      : "memory");
}

}  // namespace vpkl::impl::cuda
