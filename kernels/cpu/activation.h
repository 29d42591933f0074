// Gated activations of one row, forward and backward, and dot products: f32, vectorised.
//
// The exponential and error functions are polynomials of our own (relative error below 4e-7 and
// absolute error below 4e-7): no library call, the same bits on every instruction set.
#ifndef KERNELS_CPU_ACTIVATION_H_
#define KERNELS_CPU_ACTIVATION_H_

#include <cstdint>

#include "kernels/types.h"

namespace expertd {

// u[i] = factor * (act(gate[i]) * up[i]).
void ActivateRow(Activation activation, const float* gate, const float* up, float factor,
                 int64_t count, float* u);

// With s = factor * grad_u[i]: grad_gate[i] = s * up[i] * act'(gate[i]), grad_up[i] = s *
// act(gate[i]), and u[i] = act(gate[i]) * up[i], for the caller's <u, grad_u>.
struct ActivationGradArgs {
  const float* gate = nullptr;
  const float* up = nullptr;
  const float* grad_u = nullptr;
  float factor = 1;
  int64_t count = 0;
  float* u = nullptr;
  float* grad_gate = nullptr;
  float* grad_up = nullptr;
};
void ActivateRowBackward(Activation activation, const ActivationGradArgs& args);

// sum of left[i] * right[i]: 16 running sums by i mod 16, added pairwise at the end.
float Dot(const float* left, const float* right, int64_t count);

}  // namespace expertd

#endif  // KERNELS_CPU_ACTIVATION_H_
