// Launchers of expert selection and its gradients: one warp for each token, f64 inside.
//
// Called by router_cuda; formulas in router_kernels.h, the CPU's form of them in selection.cc.
// Results are the CPU's up to the last place of f64 before rounding to f32, and the same in every
// run. No synchronisation. A launch without tokens does nothing.
#ifndef KERNELS_ROUTER_SELECT_KERNELS_H_
#define KERNELS_ROUTER_SELECT_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/router/router_kernels.h"
#include "kernels/types.h"

namespace expertd {

struct SelectParams {
  RouterConfig config;
  int64_t tokens = 0;
  const float* logits = nullptr;        // [T, E]
  const float* bias = nullptr;          // [E] or null
  int64_t* ids = nullptr;               // [T, K]
  float* weights = nullptr;             // [T, K]
  const float* grad_weights = nullptr;  // [T, K]; backward
  float* grad_logits = nullptr;         // [T, E]; backward
};
cudaError_t LaunchSelect(const SelectParams& params, cudaStream_t stream);
// Reads ids, overwrites grad_logits.
cudaError_t LaunchSelectBackward(const SelectParams& params, cudaStream_t stream);

struct AffinityParams {
  RouterConfig config;
  int64_t tokens = 0;
  const float* logits = nullptr;  // [T, E]
  const int64_t* ids = nullptr;   // [T, K]
  void* scratch = nullptr;        // AffinityScratchBytes
  float* routed = nullptr;        // [E]
  float* affinity = nullptr;      // [E]
  const float* scale = nullptr;   // [E]; backward
  float* grad_logits = nullptr;   // [T, E]; backward adds to it
};
int64_t AffinityScratchBytes(int64_t experts);
cudaError_t LaunchAffinity(const AffinityParams& params, cudaStream_t stream);
cudaError_t LaunchAffinityBackward(const AffinityParams& params, cudaStream_t stream);

// grad [count] (token dtype) = round(grad + extra).
cudaError_t LaunchAddTo(DType dtype, const float* extra, int64_t count, void* grad,
                        cudaStream_t stream);
// to [count] f32 = from.
cudaError_t LaunchTokensToF32(DType dtype, const void* from, int64_t count, float* to,
                              cudaStream_t stream);

}  // namespace expertd

#endif  // KERNELS_ROUTER_SELECT_KERNELS_H_
