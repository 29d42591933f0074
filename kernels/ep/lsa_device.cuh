// Device side of nccl_lsa's windows: addresses, flags, bounded waits, teams of warps.
#ifndef KERNELS_EP_LSA_DEVICE_CUH_
#define KERNELS_EP_LSA_DEVICE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/ep/lsa_kernels.h"

namespace expertd {

inline constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ uint64_t LoadAcquire(const uint64_t* cell) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(cell) : "memory");
  return value;
}
// For polling: an acquire empties the first-level cache of the multiprocessor each time.
__device__ __forceinline__ uint64_t LoadRelaxed(const uint64_t* cell) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(cell) : "memory");
  return value;
}
__device__ __forceinline__ void StoreRelease(uint64_t* cell, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(cell), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t GlobalNanos() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

template <typename T>
__device__ __forceinline__ T* InWindow(const LsaOp& op, int rank, int64_t offset) {
  return reinterpret_cast<T*>(op.windows[rank] + offset);
}
// Cell of `source` in the window of `owner`.
__device__ __forceinline__ uint64_t* ArrivalCell(const LsaOp& op, int owner, int source) {
  return InWindow<uint64_t>(op, owner, op.layout.arrivals) + source;
}

__device__ __forceinline__ bool Stopped(const LsaOp& op) {
  return *reinterpret_cast<volatile unsigned long long*>(&op.device->stopped) >= op.mark;
}

// What a rank says about itself in another's arrival cell only grows, so nothing orders its stores.
__device__ __forceinline__ void RaiseArrival(const LsaOp& op, int owner, uint64_t tag) {
  asm volatile("red.relaxed.sys.global.max.u64 [%0], %1;" ::"l"(ArrivalCell(op, owner, op.rank)),
               "l"(tag)
               : "memory");
}

// The sequence stops here; the host learns why from the first who says so, the ranks from all.
static __device__ __noinline__ void Stop(const LsaOp& op, LsaStop why, int peer) {
  if (atomicMax(&op.device->stopped, static_cast<unsigned long long>(op.mark)) >= op.mark) return;
  volatile LsaHostWords* host = op.host;
  host->stop = static_cast<uint32_t>(why);
  host->peer = peer;
  __threadfence_system();
  host->mark = op.mark;
  for (int rank = 0; rank < op.world; ++rank) {
    if (rank != op.rank) RaiseArrival(op, rank, op.tag | kLsaLeft);
  }
}

// The host's words lie behind the bus: reading them takes long and slows all that crosses it. So
// only waits that are long already look, one thread of the device at a time, which stops the
// others.
inline constexpr uint64_t kHostLookNanos = 200000;
static __device__ __noinline__ bool HostSaysStop(const LsaOp& op, uint64_t now) {
  unsigned long long* last = &op.device->last_look;
  const uint64_t before = LoadRelaxed(reinterpret_cast<const uint64_t*>(last));
  if (now - before < kHostLookNanos || atomicCAS(last, before, now) != before) return false;
  const volatile LsaHostWords* host = op.host;
  return host->cancelled >= op.mark || host->expired >= op.mark;
}

// Whether waiting for `peer` since `since` must end.
static __device__ __noinline__ bool MustStop(const LsaOp& op, int peer, uint64_t* since) {
  if (Stopped(op)) return true;
  const uint64_t now = GlobalNanos();
  if (*since == 0) *since = now;
  if (static_cast<int64_t>(now - *since) > op.budget_ns) {
    Stop(op, LsaStop::kLate, peer);
    return true;
  }
  if (now - *since < kHostLookNanos || !HostSaysStop(op, now)) return false;
  Stop(op, LsaStop::kTold, peer);
  return true;
}

// Short waits are not slept through; long ones leave the memory to those who work.
inline constexpr unsigned kPollsAtOnce = 16;
inline constexpr unsigned kPollNanos = 200;

// Polls until ready() holds; false when the operation has stopped. For one thread.
template <typename Ready>
__device__ bool WaitFor(const LsaOp& op, int peer, const Ready& ready) {
  uint64_t since = 0;
  for (unsigned turn = 0; !ready(); ++turn) {
    if (turn >= kPollsAtOnce) __nanosleep(kPollNanos);
    if (turn % 32 != 31) continue;
    if (MustStop(op, peer, &since)) return false;
    // A rank that left this operation, or is in a later one, sends nothing more for it.
    if (LoadRelaxed(ArrivalCell(op, op.rank, peer)) <= op.tag) continue;
    LoadAcquire(ArrivalCell(op, op.rank, peer));
    if (ready()) return true;
    Stop(op, LsaStop::kPeerLeft, peer);
    return false;
  }
  return true;
}

// Waits for the flag of something that `peer` writes for this operation; what `peer` wrote before
// the flag can be read from then on.
__device__ __forceinline__ bool WaitFlag(const LsaOp& op, int peer, const uint64_t* flag) {
  if (!WaitFor(op, peer, [&] { return LoadRelaxed(flag) == op.tag; })) return false;
  LoadAcquire(flag);
  return true;
}

// Waits until `peer` no longer reads what earlier operations left in its window. Nothing is read
// from there, and stores never run ahead of the branch before them.
__device__ __forceinline__ bool WaitGate(const LsaOp& op, int peer) {
  const uint64_t* cell = ArrivalCell(op, op.rank, peer);
  return WaitFor(op, peer, [&] { return (LoadRelaxed(cell) & ~kLsaLeft) > op.gate; });
}

// Tells all ranks that this one has begun the operation: its earlier kernels have ended. Called by
// all threads of block 0.
__device__ __forceinline__ void Arrive(const LsaOp& op) {
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= op.world || rank == op.rank) return;
  RaiseArrival(op, rank, Stopped(op) ? op.tag | kLsaLeft : op.tag);
}

// kWarps consecutive warps of a block that share one row at a time.
template <int kWarps>
struct Team {
  static constexpr int kThreads = kWarps * 32;
  int index;  // in the block
  int thread;

  __device__ Team() : index(threadIdx.x / kThreads), thread(threadIdx.x % kThreads) {}
  __device__ void Sync() const {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "n"(kThreads) : "memory");
    }
  }
  // What the first thread's `ask` says, to all; orders what it saw before what they do next.
  template <typename Ask>
  __device__ bool Agree(const Ask& ask) const {
    if constexpr (kWarps == 1) {
      const int mine = thread == 0 ? static_cast<int>(ask()) : 0;
      const int agreed = __shfl_sync(kAllLanes, mine, 0);
      __syncwarp();
      return agreed != 0;
    } else {
      __shared__ int answers[32];
      if (thread == 0) answers[index] = static_cast<int>(ask());
      Sync();
      const int agreed = answers[index];
      Sync();
      return agreed != 0;
    }
  }
};

}  // namespace expertd

#endif  // KERNELS_EP_LSA_DEVICE_CUH_
