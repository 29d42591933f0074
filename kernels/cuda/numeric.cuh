// Device-side conversions between f32 and the token dtypes, and rows in wide pieces.
#ifndef KERNELS_CUDA_NUMERIC_CUH_
#define KERNELS_CUDA_NUMERIC_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace expertd {

__device__ __forceinline__ float ToFloat(float value) { return value; }
__device__ __forceinline__ float ToFloat(__half value) { return __half2float(value); }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }

// Round to nearest even.
template <typename T>
__device__ __forceinline__ T FromFloat(float value);
template <>
__device__ __forceinline__ float FromFloat<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// N elements that are loaded and stored as one access.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T value[N];
};

}  // namespace expertd

#endif  // KERNELS_CUDA_NUMERIC_CUH_
