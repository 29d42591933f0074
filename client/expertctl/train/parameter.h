// One trainable tensor that lives on the client: value and gradient side by side.
#ifndef CLIENT_EXPERTCTL_TRAIN_PARAMETER_H_
#define CLIENT_EXPERTCTL_TRAIN_PARAMETER_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "client/expertctl/train/random.h"

namespace expertd::train {

struct Parameter {
  std::string name;
  std::vector<float> value;
  std::vector<float> gradient;  // Added to by every backward; Adam clears it.
  bool decayed = false;         // Whether weight decay applies: matrices yes, gains and biases no.

  Parameter(std::string parameter_name, int64_t size, float fill)
      : name(std::move(parameter_name)), value(size, fill), gradient(size, 0.0f) {}
};

struct UniformInit {
  uint64_t seed;
  uint64_t stream;  // One number per parameter of a model.
  float bound;      // Values are uniform in [-bound, bound).
};

inline void Initialize(const UniformInit& init, Parameter* parameter) {
  for (size_t i = 0; i < parameter->value.size(); ++i) {
    parameter->value[i] = init.bound * RandomUniform(init.seed, init.stream, i);
  }
}

}  // namespace expertd::train

#endif  // CLIENT_EXPERTCTL_TRAIN_PARAMETER_H_
