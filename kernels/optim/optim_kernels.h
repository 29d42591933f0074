// Parameter arithmetic: initialisation, gradient norms and finiteness, SGD and AdamW updates.
//
// Memory of the Device the kernels were made for; all f32 unless said. Device thread only.
#ifndef KERNELS_OPTIM_OPTIM_KERNELS_H_
#define KERNELS_OPTIM_OPTIM_KERNELS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/types.h"

namespace expertd {

// Uniform in [-bound, bound) from counter-based Philox4x32-10: element i of a parameter depends
// only on (seed, layer_key, parameter_key, first_index + i), so any sharding and any device give
// the same bits. The integer is mapped to f32 without library calls.
struct InitArgs {
  uint64_t seed = 0;
  uint64_t layer_key = 0;      // fingerprint of the layer id
  uint32_t parameter_key = 0;  // which parameter of the layer
  int64_t first_index = 0;     // global flat index of element 0
  int64_t count = 0;
  float bound = 0;
};

struct SgdArgs {
  double learning_rate = 0;
  double momentum = 0;
  double weight_decay = 0;
  double gradient_scale = 1;  // clipping and loss scale, applied to the gradient first
};

struct AdamWArgs {
  double learning_rate = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;  // decoupled
  double gradient_scale = 1;
  int64_t step = 1;  // 1 for the first update
};

struct GradientFacts {
  double sum_of_squares = 0;  // accumulated in f64, element order fixed
  bool finite = true;
};

class OptimKernels {
 public:
  virtual ~OptimKernels() = default;
  virtual absl::Status InitUniform(const InitArgs& args, float* out) = 0;
  virtual absl::StatusOr<GradientFacts> Inspect(const float* gradient, int64_t count) = 0;
  // m = momentum * m + g + weight_decay * w; w -= lr * m. momentum_buffer may be null when momentum
  // is 0.
  virtual absl::Status Sgd(const SgdArgs& args, const float* gradient, int64_t count,
                           float* momentum_buffer, float* weight) = 0;
  // first, second: moment buffers. w -= lr * (mhat / (sqrt(vhat) + eps) + weight_decay * w).
  virtual absl::Status AdamW(const AdamWArgs& args, const float* gradient, int64_t count,
                             float* first, float* second, float* weight) = 0;
  // to (kBF16 or kF16) = round to nearest even of from (f32).
  virtual absl::Status Round(const float* from, int64_t count, DType dtype, void* to) = 0;
};

}  // namespace expertd

#endif  // KERNELS_OPTIM_OPTIM_KERNELS_H_
