// The router's arithmetic: logits, selection of top_k experts, auxiliary loss, and their gradients.
//
// Formulas, for one token with logits x[E] (SEMANTICS in ARCHITECTURE.md):
//   softmax after top-k: select by x; p = softmax over the K selected.
//   softmax before top-k: p = softmax over E, the K largest, not renormalised.
//   sigmoid: s = sigmoid(x); select by s + bias; p = s / (sum of selected s + 1e-20) for K > 1, s
//   for 1. groups: with G groups and g kept, a group's score is the sum of its top K/g scores (+
//   bias); experts of other groups are not selected. p is multiplied by scaling_factor. Ties go to
//   the lower id. Selected ids are reported in ascending order.
// Memory of the Device the kernels were made for. Device thread only.
#ifndef KERNELS_ROUTER_ROUTER_KERNELS_H_
#define KERNELS_ROUTER_ROUTER_KERNELS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/types.h"

namespace expertd {

enum class RouterKind : uint8_t { kNone = 0, kSoftmax, kSigmoid };

struct RouterConfig {
  RouterKind kind = RouterKind::kNone;
  bool softmax_before_topk = false;
  int64_t groups = 1;       // G, divides expert_count
  int64_t kept_groups = 1;  // g <= G, divides top_k
  double scaling_factor = 1.0;
  bool selection_bias = false;  // sigmoid only
  int64_t expert_count = 0;     // E
  int64_t top_k = 0;            // K
};

class RouterKernels {
 public:
  virtual ~RouterKernels() = default;

  // logits [T, E] f32 = x [T, H] (any float dtype) @ weight [H, E] f32, f32 accumulation.
  virtual absl::Status Logits(ConstMatrix x, const float* weight, int64_t experts,
                              float* logits) = 0;
  // grad_x [T, H] f32 += grad_logits [T, E] @ weight^T; grad_weight [H, E] f32 += x^T @
  // grad_logits.
  virtual absl::Status LogitsBackward(ConstMatrix x, const float* weight, int64_t experts,
                                      const float* grad_logits, float* grad_x,
                                      float* grad_weight) = 0;

  // logits [T, E], bias [E] or null -> ids [T, K] i64 ascending, weights [T, K] f32.
  virtual absl::Status Select(const RouterConfig& config, const float* logits, const float* bias,
                              int64_t tokens, int64_t* ids, float* weights) = 0;
  // grad_logits [T, E] is overwritten with d loss / d logits through the weights (ids are
  // constant).
  virtual absl::Status SelectBackward(const RouterConfig& config, const float* logits,
                                      const int64_t* ids, const float* grad_weights, int64_t tokens,
                                      float* grad_logits) = 0;

  // This rank's share of the auxiliary loss: routed[e] = routes to e, affinity[e] = sum over tokens
  // of a_te, where a = softmax over all E (or sigmoid normalised over E). Both [E] f32,
  // overwritten.
  virtual absl::Status AuxSums(const RouterConfig& config, const float* logits, const int64_t* ids,
                               int64_t tokens, float* routed, float* affinity) = 0;
  // grad_logits [T, E] += sum over e of scale[e] * d a_te / d logits (scale [E] holds
  // grad * c * E / (K N^2) * n_e; n_e constant).
  virtual absl::Status AuxBackward(const RouterConfig& config, const float* logits,
                                   const float* scale, int64_t tokens, float* grad_logits) = 0;

  // grad [T, H] (token dtype) = round(grad + extra [T, H] f32), added in f32.
  virtual absl::Status AddTo(const float* extra, Matrix grad) = 0;
};

}  // namespace expertd

#endif  // KERNELS_ROUTER_ROUTER_KERNELS_H_
