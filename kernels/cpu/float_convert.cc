// The row loops of float_convert.h, one body per dtype, vectorised.
// The vector loops need these, and every function inlined into them too, so ahead of all headers.
#pragma GCC optimize("O3", "no-trapping-math", "no-math-errno", "fp-contract=off")

#include "kernels/cpu/float_convert.h"

#include <cstring>

namespace expertd {
namespace {

struct F32 {
  using Storage = float;
  static EXPERTD_INLINE float Load(float value) { return value; }
  static EXPERTD_INLINE float Store(float value) { return value; }
};
struct F16 {
  using Storage = uint16_t;
  static EXPERTD_INLINE float Load(uint16_t value) { return F16ToF32(value); }
  static EXPERTD_INLINE uint16_t Store(float value) { return F32ToF16(value); }
};
struct Bf16 {
  using Storage = uint16_t;
  static EXPERTD_INLINE float Load(uint16_t value) { return Bf16ToF32(value); }
  static EXPERTD_INLINE uint16_t Store(float value) { return F32ToBf16(value); }
};

template <typename Format>
EXPERTD_INLINE void Widen(const void* from, int64_t count, float* __restrict to) {
  const auto* row = static_cast<const typename Format::Storage*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = Format::Load(row[i]);
}

template <typename Format>
EXPERTD_INLINE void Narrow(const float* __restrict from, int64_t count, void* to) {
  auto* row = static_cast<typename Format::Storage*>(to);
  for (int64_t i = 0; i < count; ++i) row[i] = Format::Store(from[i]);
}

template <typename Format>
EXPERTD_INLINE void Add(const void* from, int64_t count, float* __restrict sum) {
  const auto* row = static_cast<const typename Format::Storage*>(from);
  for (int64_t i = 0; i < count; ++i) sum[i] += Format::Load(row[i]);
}

template <typename Format>
EXPERTD_INLINE void AddScaled(const void* from, float factor, int64_t count,
                              float* __restrict sum) {
  const auto* row = static_cast<const typename Format::Storage*>(from);
  for (int64_t i = 0; i < count; ++i) sum[i] += factor * Format::Load(row[i]);
}

template <typename Format>
EXPERTD_INLINE void Scale(const void* from, float factor, int64_t count, void* to) {
  const auto* row = static_cast<const typename Format::Storage*>(from);
  auto* __restrict out = static_cast<typename Format::Storage*>(to);
  for (int64_t i = 0; i < count; ++i) out[i] = Format::Store(factor * Format::Load(row[i]));
}

// Calls Function<Format>(arguments) for the dtype's format.
#define EXPERTD_FOR_FORMAT(dtype, Function, ...) \
  switch (dtype) {                               \
    case DType::kF32:                            \
      return Function<F32>(__VA_ARGS__);         \
    case DType::kF16:                            \
      return Function<F16>(__VA_ARGS__);         \
    case DType::kBF16:                           \
      return Function<Bf16>(__VA_ARGS__);        \
    default:                                     \
      return;                                    \
  }

EXPERTD_INLINE void RowToF32Body(DType dtype, const void* from, int64_t count, float* to){
    EXPERTD_FOR_FORMAT(dtype, Widen, from, count, to)} EXPERTD_INLINE
    void RowFromF32Body(DType dtype, const float* from, int64_t count,
                        void* to){EXPERTD_FOR_FORMAT(dtype, Narrow, from, count, to)} EXPERTD_INLINE
    void AddRowBody(DType dtype, const void* row, int64_t count,
                    float* sum){EXPERTD_FOR_FORMAT(dtype, Add, row, count, sum)} EXPERTD_INLINE
    void AddScaledRowBody(DType dtype, const void* row, float factor, int64_t count, float* sum){
        EXPERTD_FOR_FORMAT(dtype, AddScaled, row, factor, count, sum)} EXPERTD_INLINE
    void ScaleRowBody(DType dtype, const void* row, float factor, int64_t count, void* to) {
  EXPERTD_FOR_FORMAT(dtype, Scale, row, factor, count, to)
}

}  // namespace

EXPERTD_VECTORIZED(RowToF32, (DType dtype, const void* from, int64_t count, float* to),
                   (dtype, from, count, to))
EXPERTD_VECTORIZED(RowFromF32, (DType dtype, const float* from, int64_t count, void* to),
                   (dtype, from, count, to))
EXPERTD_VECTORIZED(AddRow, (DType dtype, const void* row, int64_t count, float* sum),
                   (dtype, row, count, sum))
EXPERTD_VECTORIZED(AddScaledRow,
                   (DType dtype, const void* row, float factor, int64_t count, float* sum),
                   (dtype, row, factor, count, sum))
EXPERTD_VECTORIZED(ScaleRow, (DType dtype, const void* row, float factor, int64_t count, void* to),
                   (dtype, row, factor, count, to))

}  // namespace expertd
