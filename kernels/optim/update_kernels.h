// Launchers of the parameter kernels; formulas in optim_kernels.h.
//
// Called by optim_cuda. Every operation is rounded on its own (no fused multiply-add), as on the
// CPU. No synchronisation. A launch with count 0 does nothing.
#ifndef KERNELS_OPTIM_UPDATE_KERNELS_H_
#define KERNELS_OPTIM_UPDATE_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace expertd {

struct InitUniformParams {
  uint64_t seed = 0;
  uint64_t layer_key = 0;
  uint32_t parameter_key = 0;
  uint64_t first_index = 0;
  int64_t count = 0;
  float bound = 0;
  float* out = nullptr;
};
cudaError_t LaunchInitUniform(const InitUniformParams& params, cudaStream_t stream);

// Result of Inspect on the device, and the partial results it is made of: InspectBytes() in all,
// the result first.
struct InspectResult {
  double sum_of_squares;
  int32_t special;  // not 0: a NaN or an infinity was seen
  int32_t unused;
};
int64_t InspectBytes();
cudaError_t LaunchInspect(const float* gradient, int64_t count, InspectResult* results,
                          cudaStream_t stream);

struct SgdParams {
  float learning_rate = 0;
  float momentum = 0;
  float weight_decay = 0;
  float gradient_scale = 1;
  int64_t count = 0;
  const float* gradient = nullptr;
  float* buffer = nullptr;  // or null without momentum
  float* weight = nullptr;
};
cudaError_t LaunchSgd(const SgdParams& params, cudaStream_t stream);

struct AdamWParams {
  float beta1 = 0;
  float one_minus_beta1 = 0;
  float beta2 = 0;
  float one_minus_beta2 = 0;
  float first_correction = 0;   // 1 / (1 - beta1^step)
  float second_correction = 0;  // 1 / (1 - beta2^step)
  float epsilon = 0;
  float learning_rate = 0;
  float weight_decay = 0;
  float gradient_scale = 1;
  int64_t count = 0;
  const float* gradient = nullptr;
  float* first = nullptr;
  float* second = nullptr;
  float* weight = nullptr;
};
cudaError_t LaunchAdamW(const AdamWParams& params, cudaStream_t stream);

// to (kBF16 or kF16) = round to nearest even.
cudaError_t LaunchRound(const float* from, int64_t count, DType dtype, void* to,
                        cudaStream_t stream);

}  // namespace expertd

#endif  // KERNELS_OPTIM_UPDATE_KERNELS_H_
