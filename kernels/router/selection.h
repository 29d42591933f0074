// Pure: which experts one token goes to, with which weights, and the gradients of both maps.
//
// Formulas in router_kernels.h. One token at a time, in f64; host memory. Vectors are scratch of
// the caller and only grow. NaN logits rank below all others, so that ids stay valid; the weights
// become NaN and whoever checks them reports it.
#ifndef KERNELS_ROUTER_SELECTION_H_
#define KERNELS_ROUTER_SELECTION_H_

#include <cstdint>
#include <vector>

#include "kernels/router/router_kernels.h"

namespace expertd {

class TokenSelector {
 public:
  // REQUIRES: 1 <= top_k <= expert_count; groups divides expert_count; kept_groups divides top_k.
  explicit TokenSelector(const RouterConfig& config);

  // x: [E]; bias: [E] or null -> ids [K] ascending, weights [K].
  void Select(const float* x, const float* bias, int64_t* ids, float* weights);
  // grad_x: [E], overwritten.
  void SelectBackward(const float* x, const int64_t* ids, const float* grad_weights, float* grad_x);
  // affinity [E] += a of this token.
  void AddAffinity(const float* x, double* affinity);
  // grad_x [E] += d (sum over e of scale[e] * a_e) / d x.
  void AddAffinityGradient(const float* x, const float* scale, float* grad_x);

 private:
  // probabilities_ = softmax of x over all E, or sigmoid of each.
  void Softmax(const float* x);
  void Sigmoid(const float* x);
  // Marks in allowed_ the experts of the kept groups.
  void KeepGroups();
  // The index of the largest score among those allowed, lowest first; it is then disallowed.
  int64_t TakeBest(int64_t begin, int64_t end, std::vector<uint8_t>& allowed);
  // The weights of the selected experts, in order, before scaling.
  void SelectedWeights(const float* x, const int64_t* ids);

  const RouterConfig config_;
  std::vector<double> probabilities_;  // [E]
  std::vector<double> scores_;         // [E] what selection compares
  std::vector<double> selected_;       // [K]
  std::vector<uint8_t> allowed_;       // [E]
  std::vector<uint8_t> remaining_;     // [E]
};

}  // namespace expertd

#endif  // KERNELS_ROUTER_SELECTION_H_
