// SEAM 1: the expert-parallel operations of one rank in one epoch.
//
// An EpBackend is one rank's end of a communicator. All five operations and AllReduceSum are
// collective: every rank of the group calls the same sequence of them with agreeing arguments (the
// engine's arrival exchange has made sure of that before), also ranks with zero tokens and ranks
// that receive none. They are called from the one thread that owns the device; Cancel may come from
// any thread. Numerics: R ranks, E experts, L = E/R experts per rank, rank d owns [d*L, (d+1)*L).
// Slot order: for each local expert, source rank ascending, then token ascending; each expert's
// segment is padded to a multiple of the alignment.
//
// Tensors are memory of the Device the backend was created for. No operation allocates after the
// first step of a given size, and none throws.
#ifndef KERNELS_EP_BACKEND_H_
#define KERNELS_EP_BACKEND_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "kernels/types.h"

namespace expertd {

// What all ranks of an epoch share, as maxima, and this rank's place.
struct EpGroupConfig {
  int64_t rank = 0;
  int64_t world = 1;
  int64_t max_tokens_per_rank = 0;
  int64_t max_recv_rows = 0;  // receive capacity in rows, padding included; already derived, > 0
  int64_t max_hidden = 0;
  int64_t max_top_k = 0;
  int64_t max_experts = 0;
  DType max_token_dtype = DType::kBF16;
  CapacityPolicy capacity_policy = CapacityPolicy::kRefuse;
  int64_t comm_sm_count = 0;  // 0: automatic; ignored on the CPU
};

// All-gather of small blobs between the daemons of a group over the control network, used while a
// communicator forms. Implemented by the server; thread-compatible.
class BootstrapExchange {
 public:
  virtual ~BootstrapExchange() = default;
  // Sends `blob` under `stage` to every rank and returns the blobs of all ranks in rank order.
  // Errors: STEP_TIMEOUT naming the ranks that sent nothing by `deadline`; CANCELLED; PEER_LOST.
  virtual absl::StatusOr<std::vector<std::string>> AllGather(std::string_view stage,
                                                             std::string_view blob,
                                                             SteadyTime deadline) = 0;
};

// What a communicator is made from.
struct EpBootstrap {
  std::string group_id;
  uint64_t epoch = 0;
  std::string bootstrap_id;  // opaque secret bytes from the root daemon; never logged
  std::string listen_host;   // host address that data connections bind to
  BootstrapExchange* exchange = nullptr;
  SteadyTime deadline;
};

// Identifies one collective for cancellation and bounds its waits.
struct OpContext {
  uint64_t sequence = 0;
  SteadyTime deadline;
};

// Facts the engine and GetServerInfo need. `name` is the backend's public name.
struct EpCapabilities {
  std::string_view name;
  // After a cancelled or timed-out operation the same communicator serves the next sequence.
  bool survives_cancel = false;
  bool multi_process = false;
  int64_t max_world = 1;
};

// How many rows this rank receives, per local expert. Host memory.
struct RecvCounts {
  std::vector<int64_t> tokens_per_expert;   // [L] routes received, without padding, after drops
  std::vector<int64_t> padded_per_expert;   // [L] each rounded up to the alignment; 0 stays 0
  std::vector<int64_t> dropped_per_expert;  // [L] routes dropped at this rank's experts
  int64_t total = 0;                        // sum of padded_per_expert
};

// Routing state of one Prepare: which row of which rank goes to which slot, both ways. Immutable
// once made; any number may be alive at once. It must not outlive its backend.
class EpHandle {
 public:
  virtual ~EpHandle() = default;
  virtual const RecvCounts& counts() const = 0;
  virtual int64_t tokens() const = 0;  // T of this rank
  virtual int64_t top_k() const = 0;
  virtual int64_t alignment() const = 0;
  // [T, K] host: 1 where this rank's route (t,k) was dropped for capacity; empty when none was.
  virtual const std::vector<uint8_t>& dropped_routes() const = 0;
};

struct PrepareArgs {
  RoutingView routing;  // device memory; values are validated here, before anything moves
  int64_t expert_count = 0;
  int64_t alignment = 1;  // power of two
};

class EpBackend {
 public:
  virtual ~EpBackend() = default;

  virtual const EpCapabilities& capabilities() const = 0;

  // Exchanges counts and lays out the receive side of all ranks.
  // Errors, on all ranks alike: RECV_CAPACITY (policy REFUSE), EXPERT_ID_RANGE and DUPLICATE_EXPERT
  // with the position (the ranks whose own ids are good answer PEER_REJECTED naming the guilty
  // one).
  virtual absl::StatusOr<std::unique_ptr<EpHandle>> Prepare(const OpContext& context,
                                                            const PrepareArgs& args) = 0;

  // x: [T, H]; topk_weights: [T, K] f32 or null. recv_x: [rows >= total, H] of x's dtype; recv_w:
  // [rows] f32, or null exactly when topk_weights is null on every rank. Bit-exact copies; pad rows
  // zero with weight 0; rows at or past total are left alone.
  virtual absl::Status Dispatch(const OpContext& context, const EpHandle& handle, ConstMatrix x,
                                const float* topk_weights, Matrix recv_x, float* recv_w) = 0;

  // z: [rows >= total, H]; slot_weights: [rows] f32 or null (unweighted). y: [T, H] of z's dtype.
  // f32 accumulation; the partial sum of one rank is rounded to the dtype once before it travels,
  // and the ranks' partials are added in rank order. A token with no valid route gives zeros.
  virtual absl::Status Combine(const OpContext& context, const EpHandle& handle, ConstMatrix z,
                               const float* slot_weights, Matrix y) = 0;

  // grad_recv_x: [rows >= total, H]; grad_recv_w: [rows] f32 or null. grad_x: [T, H], reduced as in
  // Combine without weights; grad_topk_weights: [T, K] f32, exact copies, 0 for -1 and dropped
  // routes (null exactly when grad_recv_w is).
  virtual absl::Status DispatchBackward(const OpContext& context, const EpHandle& handle,
                                        ConstMatrix grad_recv_x, const float* grad_recv_w,
                                        Matrix grad_x, float* grad_topk_weights) = 0;

  // grad_y: [T, H]; slot_weights: [rows] f32 or null. grad_z: [rows >= total, H]; slot row =
  // grad_y row (times its slot weight, rounded once), pad rows zero.
  virtual absl::Status CombineBackward(const OpContext& context, const EpHandle& handle,
                                       ConstMatrix grad_y, const float* slot_weights,
                                       Matrix grad_z) = 0;

  // Element-wise sum over ranks, added in rank order in f32: the same bits on every rank.
  virtual absl::Status AllReduceSum(const OpContext& context, float* data, int64_t count) = 0;

  // Makes every operation of a sequence <= `sequence`, running or yet to come, return CANCELLED
  // soon. Any thread; never blocks.
  virtual void Cancel(uint64_t sequence) = 0;

  // Gives up the communicator: running and later operations fail with GROUP_BROKEN. Local, bounded,
  // not collective; the destructor needs no peer either way.
  virtual void Abort() = 0;
};

}  // namespace expertd

#endif  // KERNELS_EP_BACKEND_H_
