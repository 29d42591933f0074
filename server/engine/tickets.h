// Tickets and handles: what a forward or a Prepare keeps for the operations that follow it.
//
// Both belong to one epoch. Device thread only, except that counts may be read through the engine's
// counters.
#ifndef SERVER_ENGINE_TICKETS_H_
#define SERVER_ENGINE_TICKETS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "kernels/ep_backend.h"
#include "server/engine/operations.h"

namespace expertd::engine {

// State of one Prepare, for the primitives.
struct HandleState {
  std::string layer_id;
  uint64_t prepare_sequence = 0;
  std::unique_ptr<EpHandle> handle;
};

// State of one Forward, for its Backward. Buffers are device memory.
struct TicketState {
  std::string layer_id;
  uint64_t forward_sequence = 0;
  uint64_t weights_version = 0;
  std::unique_ptr<EpHandle> handle;
  RoutingSource routing = RoutingSource::kTopk;
  DeviceBuffer recv_x;  // [total, H] token dtype
  DeviceBuffer recv_w;  // [total] f32
  DeviceBuffer h;       // [total, 2I] token dtype
  // With a router: what its backward needs.
  DeviceBuffer tokens;        // [T, H] token dtype, when the router's weights are here
  DeviceBuffer logits;        // [T, E] f32
  DeviceBuffer ids;           // [T, K] i64
  std::vector<float> routed;  // [E] routes of the whole group, when there is an auxiliary loss
  int64_t group_tokens = 0;   // N
  int64_t bytes = 0;          // of the buffers above
};

// Ids carry the low bits of their epoch, so that one used in another epoch is told apart.
template <typename State>
class EpochStore {
 public:
  void Begin(uint64_t epoch) {
    states_.clear();
    epoch_ = epoch;
    next_ = 1;
  }

  uint64_t Put(State state) {
    const uint64_t id = Tag(epoch_) | next_++;
    states_.emplace(id, std::move(state));
    return id;
  }

  State* Find(uint64_t id) {
    auto found = states_.find(id);
    return found == states_.end() ? nullptr : &found->second;
  }
  bool Erase(uint64_t id) { return states_.erase(id) != 0; }
  bool OfOtherEpoch(uint64_t id) const { return (id & kTagMask) != Tag(epoch_); }
  std::map<uint64_t, State>& states() { return states_; }
  void Clear() { states_.clear(); }

 private:
  static constexpr int kCounterBits = 40;
  static constexpr uint64_t kTagMask = ~((uint64_t{1} << kCounterBits) - 1);
  static uint64_t Tag(uint64_t epoch) { return epoch << kCounterBits; }

  uint64_t epoch_ = 0;
  uint64_t next_ = 1;
  std::map<uint64_t, State> states_;
};

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_TICKETS_H_
