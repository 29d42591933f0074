// Launchers of backend nccl_lsa's kernels, and what they share with each other and the host.
//
// Called by lsa_ep from the device thread; all work is queued on one stream. Kernels write to other
// ranks' windows and wait for what those write to this one's. Every such wait ends: with what it
// waits for, or because the host, the clock or the other rank says so; then the operation's mark is
// set, the kernel runs to its end without waiting again, and the host finds the report.
#ifndef KERNELS_EP_LSA_KERNELS_H_
#define KERNELS_EP_LSA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "base/window_layout.h"
#include "kernels/ep/lsa_plan.h"
#include "kernels/types.h"

namespace expertd {

// Sequences are marked by their number plus one, so that 0 marks none.
inline constexpr uint64_t LsaMark(uint64_t sequence) {
  return sequence == UINT64_MAX ? sequence : sequence + 1;
}

// Why a kernel stopped waiting.
enum class LsaStop : uint32_t { kNone = 0, kTold, kLate, kPeerLeft };

// Pinned host memory that kernels see.
struct LsaHostWords {
  // Written by the host: sequences whose mark is at most one of these must not wait.
  alignas(16) uint64_t cancelled = 0;
  uint64_t expired = 0;
  // Written by the kernel that stopped first; `mark`, that of its sequence, comes last.
  alignas(16) uint64_t mark = 0;
  uint32_t stop = 0;  // LsaStop
  int32_t peer = 0;   // rank that was waited for
};

// Device memory that outlives an operation; zero at first.
struct LsaDeviceWords {
  unsigned long long stopped = 0;    // largest mark of a sequence that stopped
  unsigned long long last_look = 0;  // when the host's words were read, in the device's nanoseconds
  uint32_t barrier_count = 0;
  uint32_t barrier_turn = 0;
};

// One operation of one rank.
struct LsaOp {
  int32_t rank = 0;
  int32_t world = 1;
  std::byte* windows[kLsaMaxWorld] = {};  // every rank's, as this device sees them
  WindowLayout layout;
  uint64_t tag = 0;
  uint64_t mark = 0;      // of the sequence
  uint64_t gate = 0;      // a rank may be written to once it has begun something later than this
  int64_t budget_ns = 0;  // that a wait may take
  LsaHostWords* host = nullptr;
  LsaDeviceWords* device = nullptr;
};

// Three numbers of a record for the host, which knows by the nonce that they are there.
struct alignas(16) LsaRecordCell {
  int32_t value[3] = {};
  uint32_t nonce = 0;
};
inline constexpr int64_t LsaRecordCells(int64_t numbers) { return (numbers + 2) / 3; }

// Prepare. What all ranks tell each other is their ids; each computes the rest by itself.
struct LsaPrepareParams {
  const void* ids = nullptr;  // [T, K] i64 or i32
  bool wide_ids = true;       // i64
  int32_t tokens = 0;         // T
  int32_t top_k = 0;          // K
  int32_t experts = 0;        // E
  int32_t alignment = 1;
  int32_t reject = 0;  // own input is refused: 1 + its Reason; then tokens is 0
  int32_t limit = 0;   // rows that an expert keeps
  // Results.
  int32_t* slots = nullptr;        // [world, layout.rows, K] slot here of a rank's route, or -1
  int32_t* owner = nullptr;        // [T, K] rank that has the route's slot, or -1
  int32_t* pad_slots = nullptr;    // [pad rows]
  uint8_t* dropped = nullptr;      // [T, K], or null under the policy REFUSE
  LsaRecordCell* cells = nullptr;  // pinned host memory: the record, LsaRecordCells of it
  uint32_t nonce = 0;              // of the cells that this Prepare writes
  int32_t* sources = nullptr;      // [world] tokens of each rank
  // Scratch.
  int32_t* counts = nullptr;  // [E, world * tiles]
  int32_t* bad = nullptr;     // [world * tiles]
  int32_t* record = nullptr;  // [world, kRecordHeader + E]: header, routes to each expert
};
// Tiles of kRouteTile tokens that a source may have.
int64_t LsaTiles(const WindowLayout& layout);
// `blocks` of them must fit the device at once.
cudaError_t LaunchLsaPrepare(const LsaOp& op, const LsaPrepareParams& params, int blocks,
                             cudaStream_t stream);

// What row kernels read of a handle.
struct LsaRoutes {
  int32_t tokens = 0;       // T
  int32_t top_k = 0;        // K
  int32_t most_tokens = 0;  // of any rank
  int32_t pad_rows = 0;
  const int32_t* slots = nullptr;      // [world, layout.rows, K]
  const int32_t* owner = nullptr;      // [T, K]
  const int32_t* sources = nullptr;    // [world]
  const int32_t* pad_slots = nullptr;  // [pad_rows]
};

// slots[slot] = row (times factors[slot], rounded once), slot_values[slot] = its value, pads zero.
struct LsaScatterParams {
  LsaRoutes routes;
  int64_t cols = 0;
  DType dtype = DType::kInvalid;
  const void* rows = nullptr;           // [T] rows
  const float* route_values = nullptr;  // [T, K] or null
  void* slots = nullptr;
  float* slot_values = nullptr;    // or null
  const float* factors = nullptr;  // or null; float dtypes only
  bool values = false;             // values travel
};
cudaError_t LaunchLsaScatter(const LsaOp& op, const LsaScatterParams& params, const LsaShape& shape,
                             cudaStream_t stream);

// rows[t] = round(sum over ranks in order of their sums over k), the own one not rounded before,
// and route_values[t, k] = value of the route's slot, 0 without one.
struct LsaGatherParams {
  LsaRoutes routes;
  int64_t cols = 0;
  DType dtype = DType::kInvalid;  // a float
  const void* slots = nullptr;
  const float* factors = nullptr;      // [slots] or null
  const float* slot_values = nullptr;  // [slots] or null
  void* rows = nullptr;
  float* route_values = nullptr;  // [T, K] or null
  bool values = false;            // values travel
};
cudaError_t LaunchLsaGather(const LsaOp& op, const LsaGatherParams& params, const LsaShape& shape,
                            cudaStream_t stream);

// data[i] = sum over ranks in order; count is at most kLsaSumCount.
inline constexpr int64_t kLsaSumCount =
    WindowLayout::kSumSlices * WindowLayout::kSumSliceBytes / int64_t{sizeof(float)};
cudaError_t LaunchLsaSum(const LsaOp& op, float* data, int64_t count, cudaStream_t stream);

}  // namespace expertd

#endif  // KERNELS_EP_LSA_KERNELS_H_
