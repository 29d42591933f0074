// Calls a template with the C++ type of a float dtype; for the .cu files.
#ifndef KERNELS_CUDA_DTYPE_DISPATCH_H_
#define KERNELS_CUDA_DTYPE_DISPATCH_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "kernels/types.h"

namespace expertd {

template <typename T>
struct TypeTag {
  using type = T;
};

// Returns call(TypeTag<T>()), a cudaError_t. cudaErrorInvalidValue for other dtypes.
template <typename Call>
cudaError_t WithFloatType(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::kF32:
      return call(TypeTag<float>());
    case DType::kF16:
      return call(TypeTag<__half>());
    case DType::kBF16:
      return call(TypeTag<__nv_bfloat16>());
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace expertd

#endif  // KERNELS_CUDA_DTYPE_DISPATCH_H_
