// Tensor maps: what the copy engine knows about a matrix and the boxes it moves.
#ifndef KERNELS_MLP_SM90_TENSOR_MAP_H_
#define KERNELS_MLP_SM90_TENSOR_MAP_H_

#include <cuda.h>

#include <array>
#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/types.h"

namespace expertd::sm90 {

// A dense matrix of up to four dimensions, fastest first, and the box of one copy. Boxes are
// swizzled by 128 bytes, so that their rows have exactly that many.
struct MapSpec {
  DType dtype = DType::kInvalid;  // kBF16, kF16 or kF32
  const void* matrix = nullptr;   // at a multiple of 16 bytes
  std::array<int64_t, 4> sizes = {1, 1, 1, 1};
  std::array<int64_t, 4> box = {1, 1, 1, 1};
};

// Elements outside the matrix are loaded as zeros and not stored.
absl::StatusOr<CUtensorMap> MakeTensorMap(const MapSpec& spec);

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_TENSOR_MAP_H_
