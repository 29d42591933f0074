// Launch shape of the row kernels: threadIdx.x runs along a row, threadIdx.y picks one of a
// block's.
#ifndef KERNELS_EP_ROW_SHAPE_CUH_
#define KERNELS_EP_ROW_SHAPE_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace expertd {

inline constexpr int kRowThreads = 256;

struct RowShape {
  dim3 grid;
  dim3 block;
};

// A row of `pieces` gets the fewest threads, of 1 to kRowThreads, that give each one piece.
inline RowShape RowShapeFor(int64_t rows, int64_t pieces) {
  int width = 1;
  while (width < kRowThreads && width < pieces) width *= 2;
  const int height = kRowThreads / width;
  return {dim3(static_cast<unsigned>((rows + height - 1) / height)),
          dim3(static_cast<unsigned>(width), static_cast<unsigned>(height))};
}

__device__ __forceinline__ int64_t RowOfThread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}

inline uintptr_t Address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace expertd

#endif  // KERNELS_EP_ROW_SHAPE_CUH_
