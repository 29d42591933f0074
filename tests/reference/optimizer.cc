// Float64 reference of the optimizers: see optimizer.h.
#include "tests/reference/optimizer.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace expertd::reference {

void SgdStep(const SgdConfig& config, const std::vector<double>& gradient,
             std::vector<double>& velocity, std::vector<double>& weights) {
  for (size_t i = 0; i < weights.size(); ++i) {
    velocity[i] = config.momentum * velocity[i] + gradient[i];
    weights[i] -= config.learning_rate * velocity[i];
  }
}

AdamWState NewAdamWState(int64_t size) {
  return {.first = std::vector<double>(static_cast<size_t>(size), 0.0),
          .second = std::vector<double>(static_cast<size_t>(size), 0.0),
          .step = 0};
}

void AdamWStep(const AdamWConfig& config, const std::vector<double>& gradient, AdamWState& state,
               std::vector<double>& weights) {
  ++state.step;
  const double correction1 = 1.0 - std::pow(config.beta1, static_cast<double>(state.step));
  const double correction2 = 1.0 - std::pow(config.beta2, static_cast<double>(state.step));
  for (size_t i = 0; i < weights.size(); ++i) {
    const double g = gradient[i];
    double& m = state.first[i];
    double& v = state.second[i];
    m = config.beta1 * m + (1.0 - config.beta1) * g;
    v = config.beta2 * v + (1.0 - config.beta2) * g * g;
    const double direction = m / correction1 / (std::sqrt(v / correction2) + config.epsilon);
    weights[i] -= config.learning_rate * (direction + config.weight_decay * weights[i]);
  }
}

double GlobalNorm(std::span<const std::vector<double>* const> gradients) {
  double squares = 0.0;
  for (const std::vector<double>* gradient : gradients) {
    for (double value : *gradient) squares += value * value;
  }
  return std::sqrt(squares);
}

double ClipByGlobalNorm(double max_norm, std::span<std::vector<double>* const> gradients) {
  const std::vector<const std::vector<double>*> views(gradients.begin(), gradients.end());
  const double norm = GlobalNorm(views);
  if (norm <= max_norm) return norm;
  for (std::vector<double>* gradient : gradients) {
    for (double& value : *gradient) value *= max_norm / norm;
  }
  return norm;
}

}  // namespace expertd::reference
