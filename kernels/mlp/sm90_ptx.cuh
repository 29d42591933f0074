// Hopper instructions as functions: mbarriers, bulk tensor copies, matrix loads and stores.
//
// Called by single threads unless a name says Warp. Shared memory is named by 32-bit addresses.
#ifndef KERNELS_MLP_SM90_PTX_CUH_
#define KERNELS_MLP_SM90_PTX_CUH_

#include <cuda.h>

#include <cstdint>

namespace expertd::sm90 {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialised barriers known to the cluster and to the copy engine.
__device__ __forceinline__ void PublishBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier at the same address in block `rank` of the cluster. What it orders are
// reads by the tensor cores, which have ended; so that no cluster-wide release is asked for.
__device__ __forceinline__ void ArriveAt(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ bool TryWait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// A barrier that never completes ends the kernel with a trap, which the process reports as a device
// fault, instead of hanging the device for ever.
inline constexpr uint64_t kLongestWait = 20'000'000'000;
__device__ __forceinline__ void Wait(uint32_t barrier, uint32_t parity) {
  if (TryWait(barrier, parity)) return;
  const uint64_t begin = Nanoseconds();
  while (!TryWait(barrier, parity)) {
    if (Nanoseconds() - begin > kLongestWait) __trap();
  }
}

__device__ __forceinline__ void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
template <int kThreads>
__device__ __forceinline__ void NamedSync(int name) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}
template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Orders this thread's ordinary accesses to shared memory before later ones of the copy engine and
// the tensor cores.
__device__ __forceinline__ void FenceAsync() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Coordinates of a box of up to four dimensions, fastest first.
struct Box {
  int32_t c0 = 0;
  int32_t c1 = 0;
  int32_t c2 = 0;
  int32_t c3 = 0;
};

__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads a box into this block's shared memory, counted by `barrier`.
__device__ __forceinline__ void LoadBox(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                        const Box& at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(at.c0), "r"(at.c1), "r"(at.c2), "r"(at.c3)
      : "memory");
}
// The same into both blocks of the pair, counted by the barrier at the same address in each.
__device__ __forceinline__ void LoadBoxForPair(uint32_t to, const CUtensorMap* map,
                                               uint32_t barrier, const Box& at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(at.c0), "r"(at.c1), "r"(at.c2), "r"(at.c3),
      "h"(static_cast<uint16_t>(3))
      : "memory");
}
// Stores a box, or adds it, as part of the thread's open group of copies.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, uint32_t from, const Box& at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(from), "r"(at.c0), "r"(at.c1), "r"(at.c2), "r"(at.c3)
      : "memory");
}
__device__ __forceinline__ void AddBox(const CUtensorMap* map, uint32_t from, const Box& at) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group"
      " [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(from), "r"(at.c0), "r"(at.c1), "r"(at.c2), "r"(at.c3)
      : "memory");
}
__device__ __forceinline__ void CloseGroup() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but the last kOpen groups have read their shared memory.
template <int kOpen>
__device__ __forceinline__ void WaitGroupsRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kOpen) : "memory");
}

// Four 8x8 matrices of 16-bit elements; every lane gives the address of one row.
__device__ __forceinline__ void WarpStoreMatrices(uint32_t row, uint32_t a, uint32_t b, uint32_t c,
                                                  uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void WarpLoadMatrices(uint32_t row, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_PTX_CUH_
