// Polynomials and row loops of activation.h.
// The vector loops need these, and every function inlined into them too, so ahead of all headers.
#pragma GCC optimize("O3", "no-trapping-math", "no-math-errno", "fp-contract=off")

#include "kernels/cpu/activation.h"

#include <bit>

#include "kernels/cpu/vector_dispatch.h"

namespace expertd {
namespace {

constexpr int kLanes = 16;

// condition ? yes : no, without a branch: the compiler does not vectorise loops whose
// floating-point comparisons might trap.
EXPERTD_INLINE float Choose(bool condition, float yes, float no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return std::bit_cast<float>((std::bit_cast<uint32_t>(yes) & mask) |
                              (std::bit_cast<uint32_t>(no) & ~mask));
}

// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2, and a polynomial of degree 7 for e^r.
EXPERTD_INLINE float Exp(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  x = Choose(x < -87.0f, -87.0f, x);
  x = Choose(x > 88.0f, 88.0f, x);
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float e = (p * (r * r) + r) + 1.0f;
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) - 0x4b400000u + 127u) << 23;
  return e * std::bit_cast<float>(exponent);
}

// A polynomial in x near 0; 1 - e^polynomial further out. Both are computed, one is selected.
EXPERTD_INLINE float Erf(float x) {
  const float magnitude = std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7fffffffu);
  const float t = Choose(magnitude > 4.0f, 4.0f, magnitude);
  const float s = t * t;
  float far = -1.72853470e-5f * t + 3.83197126e-4f;
  const float far_low = -3.88396438e-3f * t + 2.42546219e-2f;
  far = far * s + far_low;
  far = far * t - 1.06777877e-1f;
  far = far * t - 6.34846687e-1f;
  far = far * t - 1.28717512e-1f;
  far = far * t - t;
  far = 1.0f - Exp(far);
  float near = -5.96761703e-4f;
  near = near * s + 4.99119423e-3f;
  near = near * s - 2.67681349e-2f;
  near = near * s + 1.12819925e-1f;
  near = near * s - 3.76125336e-1f;
  near = near * s + 1.28379166e-1f;
  near = near * t + t;
  const float value = Choose(t > 0.927734375f, far, near);
  const uint32_t sign = std::bit_cast<uint32_t>(x) & 0x80000000u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

struct Silu {
  static EXPERTD_INLINE float Value(float x) { return x / (1.0f + Exp(-x)); }
  static EXPERTD_INLINE float Slope(float x) {
    const float s = 1.0f / (1.0f + Exp(-x));
    return s * (1.0f + x * (1.0f - s));
  }
};
struct Gelu {
  static EXPERTD_INLINE float Value(float x) { return 0.5f * x * (1.0f + Erf(x * 0.70710678f)); }
  static EXPERTD_INLINE float Slope(float x) {
    return 0.5f * (1.0f + Erf(x * 0.70710678f)) + x * 0.39894228f * Exp(-0.5f * x * x);
  }
};
struct Relu2 {
  static EXPERTD_INLINE float Value(float x) { return Choose(x < 0.0f, 0.0f, x * x); }
  static EXPERTD_INLINE float Slope(float x) { return Choose(x < 0.0f, 0.0f, 2.0f * x); }
};

template <typename Act>
EXPERTD_INLINE void Forward(const float* __restrict gate, const float* __restrict up, float factor,
                            int64_t count, float* __restrict u) {
  for (int64_t i = 0; i < count; ++i) u[i] = factor * (Act::Value(gate[i]) * up[i]);
}

template <typename Act>
EXPERTD_INLINE void BackwardLoop(const float* __restrict gate, const float* __restrict up,
                                 const float* __restrict grad_u, float factor, int64_t count,
                                 float* __restrict u, float* __restrict grad_gate,
                                 float* __restrict grad_up) {
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = factor * grad_u[i];
    const float value = Act::Value(gate[i]);
    u[i] = value * up[i];
    grad_gate[i] = (scaled * up[i]) * Act::Slope(gate[i]);
    grad_up[i] = scaled * value;
  }
}

// Only parameters keep what __restrict promises.
template <typename Act>
EXPERTD_INLINE void Backward(const ActivationGradArgs& args) {
  BackwardLoop<Act>(args.gate, args.up, args.grad_u, args.factor, args.count, args.u,
                    args.grad_gate, args.grad_up);
}

EXPERTD_INLINE void ActivateRowBody(Activation activation, const float* gate, const float* up,
                                    float factor, int64_t count, float* u) {
  switch (activation) {
    case Activation::kSilu:
      return Forward<Silu>(gate, up, factor, count, u);
    case Activation::kGelu:
      return Forward<Gelu>(gate, up, factor, count, u);
    case Activation::kRelu2:
      return Forward<Relu2>(gate, up, factor, count, u);
  }
}

EXPERTD_INLINE void ActivateRowBackwardBody(Activation activation, const ActivationGradArgs& args) {
  switch (activation) {
    case Activation::kSilu:
      return Backward<Silu>(args);
    case Activation::kGelu:
      return Backward<Gelu>(args);
    case Activation::kRelu2:
      return Backward<Relu2>(args);
  }
}

EXPERTD_INLINE void DotLanesBody(const float* __restrict left, const float* __restrict right,
                                 int64_t count, float* __restrict lanes) {
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += left[i + lane] * right[i + lane];
  }
  for (int lane = 0; i + lane < count; ++lane) sums[lane] += left[i + lane] * right[i + lane];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = sums[lane];
}

EXPERTD_VECTORIZED(DotLanes, (const float* left, const float* right, int64_t count, float* lanes),
                   (left, right, count, lanes))

}  // namespace

EXPERTD_VECTORIZED(ActivateRow,
                   (Activation activation, const float* gate, const float* up, float factor,
                    int64_t count, float* u),
                   (activation, gate, up, factor, count, u))
EXPERTD_VECTORIZED(ActivateRowBackward, (Activation activation, const ActivationGradArgs& args),
                   (activation, args))

float Dot(const float* left, const float* right, int64_t count) {
  float lanes[kLanes];
  DotLanes(left, right, count, lanes);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

}  // namespace expertd
