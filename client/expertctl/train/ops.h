// The small differentiable operations of the model, each with its exact backward.
//
// All arrays are f32, row-major and dense. Backward functions add to parameter gradients and write
// (not add) input gradients, unless they say otherwise.
#ifndef CLIENT_EXPERTCTL_TRAIN_OPS_H_
#define CLIENT_EXPERTCTL_TRAIN_OPS_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "client/expertctl/train/parameter.h"

namespace expertd::train {

// Targets with this value are not scored.
inline constexpr int kIgnoredTarget = -1;

inline float Sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// rows [n] of table [256, width], one per byte.
std::vector<float> EmbeddingForward(const std::vector<uint8_t>& bytes, const Parameter& table);
void EmbeddingBackward(const std::vector<uint8_t>& bytes, const std::vector<float>& output_gradient,
                       Parameter* table);

// y = x * gain / sqrt(mean(x^2) + 1e-5) per row; gain: [width].
std::vector<float> RmsNormForward(const std::vector<float>& x, const Parameter& gain);
std::vector<float> RmsNormBackward(const std::vector<float>& x,
                                   const std::vector<float>& output_gradient, Parameter* gain);

// y = x @ weight, weight: [inputs, outputs].
std::vector<float> LinearForward(const std::vector<float>& x, int64_t inputs,
                                 const Parameter& weight);
std::vector<float> LinearBackward(const std::vector<float>& x, int64_t inputs,
                                  const std::vector<float>& output_gradient, Parameter* weight);

// x += y, same sizes.
void AddInPlace(const std::vector<float>& y, std::vector<float>* x);

struct CrossEntropy {
  double sum = 0;               // Nats over the scored rows.
  int64_t scored = 0;           // Rows whose target is not kIgnoredTarget.
  std::vector<float> gradient;  // Of sum / scored: [rows, classes]; ignored rows are zero.
};

// logits: [targets.size(), classes].
CrossEntropy SoftmaxCrossEntropy(const std::vector<float>& logits, const std::vector<int>& targets);

}  // namespace expertd::train

#endif  // CLIENT_EXPERTCTL_TRAIN_OPS_H_
