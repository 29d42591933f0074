// Float64 reference of the router: expert selection, route weights, auxiliary loss, and gradients.
//
// Functions take the tokens of one rank, or of the whole group concatenated, as the caller likes:
// tokens are independent of each other. Only AuxLoss and AuxLossBackward need the whole group.
//
//   forward:   logits = RouterLogits(x, weights)      choice = ChooseExperts(logits)
//   backward:  dl = ChooseExpertsBackward(d choice.weights) + AuxLossBackward(d loss)
//              {dx, d weights} = RouterLogitsBackward(dl)
//
// Pure functions, any thread.
#ifndef TESTS_REFERENCE_ROUTER_H_
#define TESTS_REFERENCE_ROUTER_H_

#include <cstdint>
#include <vector>

namespace expertd::reference {

// `score` is what groups and experts are selected by; p is the route weight before scaling.
enum class RouterKind {
  kSoftmaxAfterTopK,   // score = logit; p = softmax over the K selected logits
  kSoftmaxBeforeTopK,  // score = softmax over all E; p = score, not renormalised
  kSigmoid,            // s = sigmoid(logit), score = s + bias; p = s / (sum of selected s + 1e-20)
                       // for K > 1, p = s for K = 1
};

// REQUIRES: 1 <= top_k <= num_experts; num_experts divisible by num_groups;
// 1 <= kept_groups <= num_groups; top_k divisible by kept_groups;
// kept_groups * (num_experts / num_groups) >= top_k.
struct RouterConfig {
  RouterKind kind = RouterKind::kSoftmaxAfterTopK;
  int64_t num_experts = 1;
  int64_t top_k = 1;
  int64_t num_groups = 1;   // G equal groups of consecutive experts
  int64_t kept_groups = 1;  // g: experts of the other groups are excluded
  double scaling_factor = 1.0;
};

struct RouterChoice {
  std::vector<int64_t> ids;     // [T, K], ascending within a token
  std::vector<double> weights;  // [T, K], in the order of ids
};

struct RouterGradients {
  std::vector<double> x;        // [T, H]
  std::vector<double> weights;  // [H, E], summed over these tokens only: the caller sums over ranks
};

// x @ weights: [T, E]. x is [T, H], weights is [H, E].
std::vector<double> RouterLogits(const std::vector<double>& x, const std::vector<double>& weights,
                                 int64_t hidden, int64_t num_experts);

RouterGradients RouterLogitsBackward(const std::vector<double>& x,
                                     const std::vector<double>& weights, int64_t hidden,
                                     int64_t num_experts,
                                     const std::vector<double>& logits_gradient);

// A group's score is the sum of its top_k / kept_groups highest scores. Ties between experts, and
// between groups, go to the lower index.
// REQUIRES: logits [T, E], finite; bias [E] or empty, and empty unless kSigmoid.
RouterChoice ChooseExperts(const RouterConfig& config, const std::vector<double>& logits,
                           const std::vector<double>& bias);

// The gradient of logits [T, E] from that of the route weights [T, K]; the selection is constant.
// The bias only selects, so it needs none and has gradient 0.
std::vector<double> ChooseExpertsBackward(const RouterConfig& config,
                                          const std::vector<double>& logits,
                                          const RouterChoice& choice,
                                          const std::vector<double>& weights_gradient);

// n_e: how many routes chose each expert, [E]; -1 is no route.
std::vector<int64_t> CountRoutes(const std::vector<int64_t>& ids, int64_t num_experts);

// coefficient * E / (K * N^2) * sum over e of n_e * sum over t of a_te, for the N tokens in
// `logits`, which are those of the whole group; 0 for N = 0. a is the softmax of the logits over
// all E, or for kSigmoid s / (sum of all s + 1e-20); bias, groups and scaling take no part.
// REQUIRES: logits [N, E]; routes_per_expert [E], counted over the same tokens.
double AuxLoss(const RouterConfig& config, double coefficient, const std::vector<double>& logits,
               const std::vector<int64_t>& routes_per_expert);

// The gradient of logits [N, E] from that of the loss; the counts are constant.
std::vector<double> AuxLossBackward(const RouterConfig& config, double coefficient,
                                    const std::vector<double>& logits,
                                    const std::vector<int64_t>& routes_per_expert,
                                    double loss_gradient);

}  // namespace expertd::reference

#endif  // TESTS_REFERENCE_ROUTER_H_
