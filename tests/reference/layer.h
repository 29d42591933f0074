// Float64 reference of one MoE FFN layer, forward and backward, for a whole group at once.
//
// For each slot row r of expert e, with [gate | up] the two halves of h:
//   h = r @ gate_up[e] + gate_up_bias[e]
//   u = act(gate) * up
//   z = u @ down[e] + down_bias[e]
// Weighting LATE multiplies z by the route weight in the combine. Weighting EARLY multiplies u, and
// the down bias, by it and combines without weights; in exact arithmetic the two agree.
// Nothing is rounded to a narrower type. Pure functions, any thread.
#ifndef TESTS_REFERENCE_LAYER_H_
#define TESTS_REFERENCE_LAYER_H_

#include <cstdint>
#include <vector>

#include "tests/reference/ep.h"

namespace expertd::reference {

enum class Activation {
  kSilu,   // x * sigmoid(x)
  kGelu,   // the exact one, x * Phi(x) with Phi(x) = (1 + erf(x / sqrt 2)) / 2; not the tanh form
  kRelu2,  // max(x, 0) squared
};

enum class Weighting { kLate, kEarly };

double Activate(Activation activation, double x);
double ActivateDerivative(Activation activation, double x);

struct LayerConfig {
  EpConfig ep;
  int64_t hidden = 1;
  int64_t intermediate = 1;
  Activation activation = Activation::kSilu;
  Weighting weighting = Weighting::kLate;
};

// Parameters of all E experts, or their gradients. Rank d's [L, ...] blocks are rows [d*L, (d+1)*L)
// of the first dimension. A bias that the layer does not have is an empty vector.
struct ExpertParameters {
  std::vector<double> gate_up;       // [E, H, 2I]: columns [0, I) are gate, [I, 2I) are up
  std::vector<double> down;          // [E, I, H]
  std::vector<double> gate_up_bias;  // [E, 2I], or empty
  std::vector<double> down_bias;     // [E, H], or empty
};

// A forward and everything that its backward needs. Per-rank buffers have `total` rows; pad rows
// are zero everywhere, also where the layer has biases.
struct LayerForwardResult {
  Layout layout;   // if layout.refused, all else is empty
  Received recv;   // r: [total, H], and the route weights [total]
  PerRank h;       // [total, 2I], before the activation
  PerRank u;       // [total, I], before any weighting
  PerRank z;       // [total, H]; with kEarly it contains the route weight
  PerRank output;  // y: [T_r, H]
};

struct LayerGradients {
  PerRank tokens;        // tokens_gradient per rank: [T_r, H]
  PerRank topk_weights;  // topk_weights_gradient per rank: [T_r, K]; 0 for -1 and dropped routes
  ExpertParameters experts;  // exact zeros for experts without rows
};

// REQUIRES: Prepare's requirements; x per rank [T_r, H]; weights per rank [T_r, K], finite except
// that the weight of a -1 route may be anything; parameters of the shapes above.
LayerForwardResult LayerForward(const LayerConfig& config, const ExpertParameters& parameters,
                                const PerRank& x, const Routing& ids, const PerRank& weights);

// REQUIRES: `forward` came from LayerForward with the same config and parameters and was not
// refused; gy per rank [T_r, H].
LayerGradients LayerBackward(const LayerConfig& config, const ExpertParameters& parameters,
                             const LayerForwardResult& forward, const PerRank& gy);

}  // namespace expertd::reference

#endif  // TESTS_REFERENCE_LAYER_H_
