// Forward and backward of embedding, RMSNorm, linear and cross entropy.
#include "client/expertctl/train/ops.h"

#include <algorithm>
#include <cmath>

#include "client/expertctl/train/gemm.h"

namespace expertd::train {
namespace {

constexpr float kNormEpsilon = 1e-5f;

float InverseRms(const float* x, int64_t width) {
  float square_sum = 0;
  for (int64_t i = 0; i < width; ++i) square_sum += x[i] * x[i];
  return 1.0f / std::sqrt(square_sum / static_cast<float>(width) + kNormEpsilon);
}

}  // namespace

std::vector<float> EmbeddingForward(const std::vector<uint8_t>& bytes, const Parameter& table) {
  const size_t width = table.value.size() / 256;
  std::vector<float> output(bytes.size() * width);
  for (size_t t = 0; t < bytes.size(); ++t) {
    std::copy_n(table.value.data() + bytes[t] * width, width, output.data() + t * width);
  }
  return output;
}

void EmbeddingBackward(const std::vector<uint8_t>& bytes, const std::vector<float>& output_gradient,
                       Parameter* table) {
  const size_t width = table->value.size() / 256;
  for (size_t t = 0; t < bytes.size(); ++t) {
    float* to = table->gradient.data() + bytes[t] * width;
    const float* from = output_gradient.data() + t * width;
    for (size_t i = 0; i < width; ++i) to[i] += from[i];
  }
}

std::vector<float> RmsNormForward(const std::vector<float>& x, const Parameter& gain) {
  const int64_t width = static_cast<int64_t>(gain.value.size());
  std::vector<float> output(x.size());
  for (size_t row = 0; row < x.size(); row += width) {
    const float inverse = InverseRms(&x[row], width);
    for (int64_t i = 0; i < width; ++i) output[row + i] = x[row + i] * inverse * gain.value[i];
  }
  return output;
}

// With r = 1 / rms: dx = r * (g * gain) - x * r^3 / width * sum(g * gain * x).
std::vector<float> RmsNormBackward(const std::vector<float>& x,
                                   const std::vector<float>& output_gradient, Parameter* gain) {
  const int64_t width = static_cast<int64_t>(gain->value.size());
  std::vector<float> input_gradient(x.size());
  for (size_t row = 0; row < x.size(); row += width) {
    const float* in = &x[row];
    const float* g = &output_gradient[row];
    const float inverse = InverseRms(in, width);
    float dot = 0;
    for (int64_t i = 0; i < width; ++i) {
      dot += g[i] * gain->value[i] * in[i];
      gain->gradient[i] += g[i] * in[i] * inverse;
    }
    const float shrink = dot * inverse * inverse * inverse / static_cast<float>(width);
    for (int64_t i = 0; i < width; ++i) {
      input_gradient[row + i] = g[i] * gain->value[i] * inverse - in[i] * shrink;
    }
  }
  return input_gradient;
}

std::vector<float> LinearForward(const std::vector<float>& x, int64_t inputs,
                                 const Parameter& weight) {
  const int64_t rows = static_cast<int64_t>(x.size()) / inputs;
  const int64_t outputs = static_cast<int64_t>(weight.value.size()) / inputs;
  std::vector<float> output(rows * outputs);
  Gemm(RowMajor(x.data(), rows, inputs), RowMajor(weight.value.data(), inputs, outputs),
       output.data(), Store::kOverwrite);
  return output;
}

std::vector<float> LinearBackward(const std::vector<float>& x, int64_t inputs,
                                  const std::vector<float>& output_gradient, Parameter* weight) {
  const int64_t rows = static_cast<int64_t>(x.size()) / inputs;
  const int64_t outputs = static_cast<int64_t>(weight->value.size()) / inputs;
  const MatrixView gradient = RowMajor(output_gradient.data(), rows, outputs);
  Gemm(Transposed(RowMajor(x.data(), rows, inputs)), gradient, weight->gradient.data(),
       Store::kAdd);
  std::vector<float> input_gradient(x.size());
  Gemm(gradient, Transposed(RowMajor(weight->value.data(), inputs, outputs)), input_gradient.data(),
       Store::kOverwrite);
  return input_gradient;
}

void AddInPlace(const std::vector<float>& y, std::vector<float>* x) {
  for (size_t i = 0; i < y.size(); ++i) (*x)[i] += y[i];
}

CrossEntropy SoftmaxCrossEntropy(const std::vector<float>& logits,
                                 const std::vector<int>& targets) {
  CrossEntropy result;
  result.gradient.assign(logits.size(), 0.0f);
  result.scored = static_cast<int64_t>(targets.size()) -
                  std::count(targets.begin(), targets.end(), kIgnoredTarget);
  if (result.scored == 0) return result;
  const size_t classes = logits.size() / targets.size();
  const float mean = 1.0f / static_cast<float>(result.scored);
  for (size_t row = 0; row < targets.size(); ++row) {
    if (targets[row] == kIgnoredTarget) continue;
    const float* in = &logits[row * classes];
    float* gradient = &result.gradient[row * classes];
    const float top = *std::max_element(in, in + classes);
    float sum = 0;
    for (size_t c = 0; c < classes; ++c) sum += gradient[c] = std::exp(in[c] - top);
    result.sum += std::log(sum) - (in[targets[row]] - top);
    const float scale = mean / sum;
    for (size_t c = 0; c < classes; ++c) gradient[c] *= scale;
    gradient[targets[row]] -= mean;
  }
  return result;
}

}  // namespace expertd::train
