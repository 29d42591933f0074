// Encoding through the driver, whose function is looked up at run time: nothing links the driver.
#include <cuda_runtime_api.h>

#include "base/error.h"
#include "base/status_macros.h"
#include "kernels/cuda/status.h"
#include "kernels/mlp/sm90_tensor_map.h"

namespace expertd::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

absl::StatusOr<Encode> FindEncode() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      return Encode{nullptr};
    }
    return reinterpret_cast<Encode>(function);
  }();
  if (found != nullptr) return found;
  return Error(Reason::kBackendUnsupported)
      .Text("the NVIDIA driver has no cuTensorMapEncodeTiled; need CUDA 12.0 or newer");
}

CUtensorMapDataType TypeOf(DType dtype) {
  if (dtype == DType::kBF16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (dtype == DType::kF16) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

}  // namespace

absl::StatusOr<CUtensorMap> MakeTensorMap(const MapSpec& spec) {
  ASSIGN_OR_RETURN(const Encode encode, FindEncode());
  constexpr size_t kRank = 4;
  cuuint64_t sizes[kRank];
  cuuint64_t strides[kRank - 1];
  cuuint32_t box[kRank];
  const cuuint32_t steps[kRank] = {1, 1, 1, 1};
  cuuint64_t bytes = DTypeSize(spec.dtype);
  for (size_t i = 0; i < kRank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(spec.sizes[i]);
    box[i] = static_cast<cuuint32_t>(spec.box[i]);
    bytes *= sizes[i];
    if (i + 1 < kRank) strides[i] = bytes;
  }
  CUtensorMap map;
  const CUresult result =
      encode(&map, TypeOf(spec.dtype), kRank, const_cast<void*>(spec.matrix), sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return map;
  return Error(Reason::kInternal)
      .Text("tensor map of [", spec.sizes[3], ", ", spec.sizes[2], ", ", spec.sizes[1], ", ",
            spec.sizes[0], "] ", DTypeName(spec.dtype), ": driver error ",
            static_cast<int>(result));
}

}  // namespace expertd::sm90
