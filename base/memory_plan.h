// The one formula for buffer and message sizes, shared by the daemon and by clients.
//
// All arithmetic is 64-bit and checked: an overflow is reported, never wrapped. T tokens per rank,
// K top_k, R ranks, E experts, L = E / R local experts, H hidden, I intermediate, A alignment, b
// bytes of a token element.
#ifndef BASE_MEMORY_PLAN_H_
#define BASE_MEMORY_PLAN_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"

namespace expertd {

// Largest expert segment alignment a layer may ask for.
inline constexpr int64_t kMaxAlignment = 128;

// A group's maxima.
struct GroupSizes {
  int64_t ranks = 1;                // R, of the expert-parallel mesh axis
  int64_t max_tokens_per_rank = 0;  // T
  int64_t max_recv_rows = 0;        // 0: worst case
  int64_t max_hidden = 0;           // H
  int64_t max_top_k = 0;            // K
  int64_t max_experts = 0;          // E
  int64_t token_bytes = 4;          // b of the widest token dtype
  bool device_window = false;       // the backend is nccl_lsa: ranks write to each other's memory
};

// A layer's actual values.
struct LayerSizes {
  int64_t expert_count = 0;  // E
  int64_t hidden = 0;        // H
  int64_t intermediate = 0;  // I
  int64_t top_k = 0;         // K
  int64_t alignment = 1;     // A
  int64_t token_bytes = 4;
  int64_t weight_bytes = 4;
  bool gate_up_bias = false;
  bool down_bias = false;
  bool server_router = false;
  bool router = false;           // tokens may be routed here: by logits, or by the server's router
  int64_t optimizer_states = 0;  // f32 buffers beside the master weights: SGD 0 or 1, AdamW 2
  bool frozen = false;
};

// Rows a rank may receive: the configured capacity, or R*T*min(K, L) + L*(kMaxAlignment - 1).
// Errors: CONFIG_INVALID on overflow.
absl::StatusOr<int64_t> RecvRows(const GroupSizes& group);

// Largest payload of one message in bytes: the larger of a forward and of a primitive's receive
// layout, plus 64 KiB for everything else. Capped at what one gRPC message can hold.
absl::StatusOr<int64_t> MaxMessageBytes(const GroupSizes& group);

// Named sizes in bytes of one rank: "recv_rows", "recv_tokens", "recv_weights", "expert_output",
// "tokens_in", "tokens_out", "message"; with a window "device_window", that of window_layout.h.
absl::StatusOr<std::map<std::string, int64_t>> PlanGroup(const GroupSizes& group);

// Named sizes in bytes of one rank: "master_weights", "compute_weights", "gradients",
// "optimizer_state", "ticket_worst_case", "total_weights".
absl::StatusOr<std::map<std::string, int64_t>> PlanLayer(const GroupSizes& group,
                                                         const LayerSizes& layer);

}  // namespace expertd

#endif  // BASE_MEMORY_PLAN_H_
