// The trainer's seam to one MoE layer, wherever its experts live.
//
// The trainer keeps the router weights and everything before and after the layer; the experts and
// their optimizer state are behind this interface. One thread at a time calls one layer.
#ifndef CLIENT_EXPERTCTL_TRAIN_MOE_LAYER_H_
#define CLIENT_EXPERTCTL_TRAIN_MOE_LAYER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace expertd::train {

enum class Keep { kNothing, kForBackward };

class MoeLayer {
 public:
  struct ForwardResult {
    std::vector<float> output;               // [tokens, hidden]
    double aux_loss = 0;                     // Coefficient included; 0 when the layer has none.
    std::vector<int64_t> tokens_per_expert;  // [experts], routes of this call over all ranks.
    uint64_t ticket = 0;                     // For Backward; meaningful with kForBackward only.
  };
  struct BackwardResult {
    std::vector<float> tokens_gradient;         // [tokens, hidden]
    std::vector<float> router_logits_gradient;  // [tokens, experts]
  };

  virtual ~MoeLayer() = default;

  // tokens: [tokens, hidden] f32 row-major, the whole batch, a multiple of 4 rows; the layer shards
  // it over its ranks. router_logits: [tokens, experts]. The call ends when the output is complete.
  virtual absl::StatusOr<ForwardResult> Forward(const std::vector<float>& tokens,
                                                const std::vector<float>& router_logits,
                                                Keep keep) = 0;

  // Gradients of (loss + aux_loss_gradient * aux_loss) for the forward that gave `ticket`, where
  // output_gradient [tokens, hidden] is d loss / d output. Adds the expert weight gradients to the
  // layer's accumulators and spends the ticket.
  virtual absl::StatusOr<BackwardResult> Backward(uint64_t ticket,
                                                  const std::vector<float>& output_gradient,
                                                  double aux_loss_gradient) = 0;

  // Updates the expert weights once with the accumulated gradients and clears those.
  virtual absl::Status Apply(double learning_rate) = 0;
};

}  // namespace expertd::train

#endif  // CLIENT_EXPERTCTL_TRAIN_MOE_LAYER_H_
