// Plain f32 matrix products with a fixed order of additions, for weights of any float dtype.
//
// REQUIRES for all: dimensions >= 1. `scratch` holds one converted row of the weight.
#ifndef KERNELS_CPU_PLAIN_MATMUL_H_
#define KERNELS_CPU_PLAIN_MATMUL_H_

#include <cstdint>

#include "kernels/cpu/byte_arena.h"
#include "kernels/types.h"

namespace expertd {

// out [rows, n] = in [rows, k] @ weight [k, n]; k ascending.
void PlainMultiply(int64_t rows, const float* in, const ConstMatrix& weight, ByteArena& scratch,
                   float* out);
// out [rows, n] = in [rows, k] @ weight^T, weight [n, k]; Dot over k.
void PlainMultiplyTransposed(int64_t rows, const float* in, const ConstMatrix& weight,
                             ByteArena& scratch, float* out);
// sum [m, n] += left^T @ right, left [rows, m], right [rows, n]; rows ascending.
void PlainAddProduct(int64_t rows, int64_t m, int64_t n, const float* left, const float* right,
                     float* sum);

}  // namespace expertd

#endif  // KERNELS_CPU_PLAIN_MATMUL_H_
