// AdamW as in the paper: bias-corrected moments, decay apart from the gradient.
#include "client/expertctl/train/adam.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace expertd::train {

Adam::Adam(const AdamOptions& options, std::vector<Parameter*> parameters)
    : options_(options), parameters_(std::move(parameters)) {
  for (const Parameter* parameter : parameters_) {
    const size_t size = parameter->value.size();
    moments_.push_back({std::vector<float>(size, 0.0f), std::vector<float>(size, 0.0f)});
  }
}

double Adam::Step(double learning_rate) {
  ++steps_;
  double square_sum = 0;
  for (const Parameter* parameter : parameters_) {
    for (const float g : parameter->gradient) square_sum += static_cast<double>(g) * g;
  }
  const double norm = std::sqrt(square_sum);
  const bool clip = options_.max_norm > 0 && norm > options_.max_norm;
  const float scale = clip ? static_cast<float>(options_.max_norm / norm) : 1.0f;

  const float beta1 = static_cast<float>(options_.beta1);
  const float beta2 = static_cast<float>(options_.beta2);
  const double correction1 = 1 - std::pow(options_.beta1, static_cast<double>(steps_));
  const double correction2 = 1 - std::pow(options_.beta2, static_cast<double>(steps_));
  const float step = static_cast<float>(learning_rate / correction1);
  const float root = static_cast<float>(1 / std::sqrt(correction2));
  const float epsilon = static_cast<float>(options_.epsilon);
  for (size_t p = 0; p < parameters_.size(); ++p) {
    Parameter& parameter = *parameters_[p];
    Moments& moments = moments_[p];
    const float keep =
        parameter.decayed ? static_cast<float>(1 - learning_rate * options_.weight_decay) : 1.0f;
    for (size_t i = 0; i < parameter.value.size(); ++i) {
      const float g = scale * parameter.gradient[i];
      moments.first[i] = beta1 * moments.first[i] + (1 - beta1) * g;
      moments.second[i] = beta2 * moments.second[i] + (1 - beta2) * g * g;
      const float denominator = std::sqrt(moments.second[i]) * root + epsilon;
      parameter.value[i] = keep * parameter.value[i] - step * moments.first[i] / denominator;
    }
    std::fill(parameter.gradient.begin(), parameter.gradient.end(), 0.0f);
  }
  return norm;
}

}  // namespace expertd::train
