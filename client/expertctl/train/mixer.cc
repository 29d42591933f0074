// The per-channel convolution as plain loops, the projection as a matrix product.
#include "client/expertctl/train/mixer.h"

#include <algorithm>
#include <cmath>

#include "client/expertctl/train/ops.h"

namespace expertd::train {

CausalMixer::CausalMixer(const MixerShape& shape, const std::string& name, uint64_t seed,
                         uint64_t init_stream)
    : shape_(shape),
      kernel_(name + ".kernel", shape.taps * shape.hidden, 0.0f),
      project_(name + ".project", shape.hidden * shape.hidden, 0.0f) {
  // Unit variance in, unit variance out: a uniform variable within +-b has variance b^2 / 3.
  Initialize({seed, init_stream, std::sqrt(3.0f / static_cast<float>(shape.taps))}, &kernel_);
  Initialize({seed, init_stream + 1, std::sqrt(3.0f / static_cast<float>(shape.hidden))},
             &project_);
  project_.decayed = true;
}

std::vector<float> CausalMixer::Forward(const std::vector<float>& x, Saved* saved) const {
  const int64_t hidden = shape_.hidden;
  const int64_t tokens = static_cast<int64_t>(x.size()) / hidden;
  saved->mixed.assign(x.size(), 0.0f);
  for (int64_t t = 0; t < tokens; ++t) {
    float* __restrict to = &saved->mixed[t * hidden];
    const int64_t reach = std::min(shape_.taps, t % shape_.length + 1);
    for (int64_t d = 0; d < reach; ++d) {
      const float* from = &x[(t - d) * hidden];
      const float* kernel = &kernel_.value[d * hidden];
      for (int64_t i = 0; i < hidden; ++i) to[i] += from[i] * kernel[i];
    }
  }
  return LinearForward(saved->mixed, hidden, project_);
}

std::vector<float> CausalMixer::Backward(const std::vector<float>& x, const Saved& saved,
                                         const std::vector<float>& output_gradient) {
  const int64_t hidden = shape_.hidden;
  const int64_t tokens = static_cast<int64_t>(x.size()) / hidden;
  const std::vector<float> mixed_gradient =
      LinearBackward(saved.mixed, hidden, output_gradient, &project_);
  std::vector<float> x_gradient(x.size());
  for (int64_t t = 0; t < tokens; ++t) {
    const float* gradient = &mixed_gradient[t * hidden];
    const int64_t reach = std::min(shape_.taps, t % shape_.length + 1);
    for (int64_t d = 0; d < reach; ++d) {
      const float* from = &x[(t - d) * hidden];
      float* __restrict to = &x_gradient[(t - d) * hidden];
      const float* kernel = &kernel_.value[d * hidden];
      float* __restrict kernel_gradient = &kernel_.gradient[d * hidden];
      for (int64_t i = 0; i < hidden; ++i) {
        to[i] += gradient[i] * kernel[i];
        kernel_gradient[i] += gradient[i] * from[i];
      }
    }
  }
  return x_gradient;
}

}  // namespace expertd::train
