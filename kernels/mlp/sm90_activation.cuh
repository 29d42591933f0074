// Gated activations inside the matrix products: fast exponentials, errors below 1e-6.
#ifndef KERNELS_MLP_SM90_ACTIVATION_CUH_
#define KERNELS_MLP_SM90_ACTIVATION_CUH_

#include "kernels/types.h"

namespace expertd::sm90 {

struct ActValue {
  float value;
  float slope;
};

template <Activation kind>
__device__ __forceinline__ ActValue ActWithSlope(float x) {
  if constexpr (kind == Activation::kSilu) {
    const float s = __fdividef(1.0f, 1.0f + __expf(-x));
    return {x * s, s * (1.0f + x * (1.0f - s))};
  }
  if constexpr (kind == Activation::kGelu) {
    const float half = 0.5f * (1.0f + erff(x * 0.70710678f));
    return {x * half, half + x * 0.39894228f * __expf(-0.5f * x * x)};
  }
  const bool on = x > 0.0f || x != x;
  return {on ? x * x : 0.0f, on ? 2.0f * x : 0.0f};
}

// Calls f(tag) with tag.kind the activation.
template <Activation activation>
struct ActKind {
  static constexpr Activation kind = activation;
};
template <typename F>
__device__ __forceinline__ void WithActivation(Activation activation, const F& f) {
  switch (activation) {
    case Activation::kSilu:
      return f(ActKind<Activation::kSilu>());
    case Activation::kGelu:
      return f(ActKind<Activation::kGelu>());
    case Activation::kRelu2:
      return f(ActKind<Activation::kRelu2>());
  }
}

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_ACTIVATION_CUH_
