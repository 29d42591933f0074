// The warpgroup matrix instruction on operands in shared memory, and descriptors of those operands.
//
// Called by all 128 threads of a warpgroup. Operands lie in blocks of 64 by 64 elements of 16 bits,
// 8 KiB each, as the copy engine writes boxes of 128 bytes by 64 rows with the 128-byte swizzle.
// In a K-major block a row is one row (or column) of the product; in an MN-major block it is one
// element of the sum. Blocks of one operand follow each other along M (or N).
#ifndef KERNELS_MLP_SM90_WGMMA_CUH_
#define KERNELS_MLP_SM90_WGMMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace expertd::sm90 {

inline constexpr int kBlockBytes = 8192;

// Which index of an operand is contiguous in memory; the value is the instruction's transpose bit.
enum Major : int { kMajorK = 0, kMajorMN = 1 };

// Descriptor of an operand that begins at `address`, a multiple of 1024. In units of 16 bytes: from
// one block to the next, and from 8 rows of a block to the next 8.
__device__ __forceinline__ uint64_t OperandAt(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kNextBlock = uint64_t{kBlockBytes / 16} << 16;
  constexpr uint64_t kNextRows = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kNextRows | kNextBlock | ((address & 0x3FFFF) >> 4);
}

// From 16 elements of the sum to the next 16, in units of 16 bytes.
template <Major major>
inline constexpr uint64_t kNextStep = major == kMajorK ? 32 / 16 : 2048 / 16;

__device__ __forceinline__ void MatrixFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void MatrixCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kOpen>
__device__ __forceinline__ void MatrixWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kOpen) : "memory");
}

// clang-format off
#define EXPERTD_ACC4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define EXPERTD_WGMMA_256(TYPE) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
      "}, %128, %129, p, 1, 1, %130, %131;\n}" \
      : \
      EXPERTD_ACC4(0), EXPERTD_ACC4(4), EXPERTD_ACC4(8), EXPERTD_ACC4(12), \
      EXPERTD_ACC4(16), EXPERTD_ACC4(20), EXPERTD_ACC4(24), EXPERTD_ACC4(28), \
      EXPERTD_ACC4(32), EXPERTD_ACC4(36), EXPERTD_ACC4(40), EXPERTD_ACC4(44), \
      EXPERTD_ACC4(48), EXPERTD_ACC4(52), EXPERTD_ACC4(56), EXPERTD_ACC4(60), \
      EXPERTD_ACC4(64), EXPERTD_ACC4(68), EXPERTD_ACC4(72), EXPERTD_ACC4(76), \
      EXPERTD_ACC4(80), EXPERTD_ACC4(84), EXPERTD_ACC4(88), EXPERTD_ACC4(92), \
      EXPERTD_ACC4(96), EXPERTD_ACC4(100), EXPERTD_ACC4(104), EXPERTD_ACC4(108), \
      EXPERTD_ACC4(112), EXPERTD_ACC4(116), EXPERTD_ACC4(120), EXPERTD_ACC4(124) \
      : "l"(left), "l"(right), "n"(kLeftTransposed), "n"(kRightTransposed))
#define EXPERTD_WGMMA_128(TYPE) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
      "}, %64, %65, p, 1, 1, %66, %67;\n}" \
      : \
      EXPERTD_ACC4(0), EXPERTD_ACC4(4), EXPERTD_ACC4(8), EXPERTD_ACC4(12), \
      EXPERTD_ACC4(16), EXPERTD_ACC4(20), EXPERTD_ACC4(24), EXPERTD_ACC4(28), \
      EXPERTD_ACC4(32), EXPERTD_ACC4(36), EXPERTD_ACC4(40), EXPERTD_ACC4(44), \
      EXPERTD_ACC4(48), EXPERTD_ACC4(52), EXPERTD_ACC4(56), EXPERTD_ACC4(60) \
      : "l"(left), "l"(right), "n"(kLeftTransposed), "n"(kRightTransposed))
// clang-format on

// sum += left @ right for 64 rows, N = 2 * kSums columns and 16 elements of the sum.
template <typename T, int kLeftTransposed, int kRightTransposed, int kSums>
__device__ __forceinline__ void Multiply(float (&sum)[kSums], uint64_t left, uint64_t right) {
  static_assert(kSums == 128 || kSums == 64);
  constexpr bool kBrain = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (kSums == 128) {
    if constexpr (kBrain) {
      EXPERTD_WGMMA_256("bf16");
    } else {
      EXPERTD_WGMMA_256("f16");
    }
  } else {
    if constexpr (kBrain) {
      EXPERTD_WGMMA_128("bf16");
    } else {
      EXPERTD_WGMMA_128("f16");
    }
  }
}

#undef EXPERTD_WGMMA_256
#undef EXPERTD_WGMMA_128
#undef EXPERTD_ACC4

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_WGMMA_CUH_
