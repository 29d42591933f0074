// Float64 reference of the optimizers: SGD with momentum, AdamW, clipping by global norm.
#ifndef TESTS_REFERENCE_OPTIMIZER_H_
#define TESTS_REFERENCE_OPTIMIZER_H_

#include <cstdint>
#include <span>
#include <vector>

namespace expertd::reference {

struct SgdConfig {
  double learning_rate = 0.0;
  double momentum = 0.0;
};

// velocity = momentum * velocity + gradient; weights -= learning_rate * velocity. No dampening, no
// Nesterov, no weight decay.
// REQUIRES: equal sizes; velocity is zero before the first step.
void SgdStep(const SgdConfig& config, const std::vector<double>& gradient,
             std::vector<double>& velocity, std::vector<double>& weights);

struct AdamWConfig {
  double learning_rate = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.0;
};

struct AdamWState {
  std::vector<double> first;   // m
  std::vector<double> second;  // v
  int64_t step = 0;            // steps taken
};

AdamWState NewAdamWState(int64_t size);

// Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2, with the
// decay scaled by the learning rate; t is the step being taken, from 1:
//   m = beta1 m + (1 - beta1) g
//   v = beta2 v + (1 - beta2) g^2
//   direction = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)
//   w -= learning_rate * (direction + weight_decay * w)
// REQUIRES: equal sizes.
void AdamWStep(const AdamWConfig& config, const std::vector<double>& gradient, AdamWState& state,
               std::vector<double>& weights);

// The Euclidean norm of all gradients taken together.
double GlobalNorm(std::span<const std::vector<double>* const> gradients);

// Multiplies all gradients by max_norm / norm if the global norm is above max_norm, and leaves them
// alone otherwise. Returns the norm before clipping. REQUIRES: max_norm > 0; finite gradients.
double ClipByGlobalNorm(double max_norm, std::span<std::vector<double>* const> gradients);

}  // namespace expertd::reference

#endif  // TESTS_REFERENCE_OPTIMIZER_H_
