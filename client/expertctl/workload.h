// Random tokens, routing and logits for forward and bench: never zeros, the same for the same seed.
#ifndef CLIENT_EXPERTCTL_WORKLOAD_H_
#define CLIENT_EXPERTCTL_WORKLOAD_H_

#include <cstdint>
#include <vector>

#include "expertd/v1/step_service.pb.h"

namespace expertd::expertctl {

// Who routes to which layer; one per rank.
struct Workload {
  v1::LayerConfig config;
  int64_t tokens = 0;
  uint64_t seed = 0;
  int64_t rank = 0;
};

// [tokens, hidden] in the layer's token dtype, uniform in [-1, 1).
v1::Tensor RandomTokens(const Workload& workload);
// [tokens, top_k]: different experts per token, each equally likely.
v1::Tensor RandomIds(const Workload& workload);
// [tokens, top_k] F32, positive, each token's sum is 1.
v1::Tensor RandomWeights(const Workload& workload);
// Tokens, and ids with weights or logits, whichever the layer's router wants.
v1::ForwardRequest RandomForward(const Workload& workload, const std::string& layer_id);

}  // namespace expertd::expertctl

#endif  // CLIENT_EXPERTCTL_WORKLOAD_H_
