// Launchers that move and sum rows between tokens, wire buffers and slots.
//
// Called by nccl_ep. "Wire" buffers hold the rows that travel, as RouteTables describes them. Rows
// are copied in the widest pieces that their size and addresses allow. Offsets are 64-bit. Sums are
// in f32, in order of k. No allocation, no synchronisation. A launch without rows does nothing.
#ifndef KERNELS_EP_ROW_KERNELS_H_
#define KERNELS_EP_ROW_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace expertd {

// wire[i] = rows[tokens[i]], and wire_values[i, k] = values[tokens[i], k].
struct PackParams {
  int64_t wire_rows = 0;
  int64_t row_bytes = 0;
  int64_t top_k = 0;
  const int32_t* tokens = nullptr;  // [wire_rows]
  const void* rows = nullptr;       // [T] rows
  const float* values = nullptr;    // [T, K] or null
  void* wire = nullptr;
  float* wire_values = nullptr;
};
cudaError_t LaunchPack(const PackParams& params, cudaStream_t stream);

// Where the rows of all sources are: this rank's in place, the others' in the wire buffer, which
// lacks the own ones.
struct SourceRows {
  int64_t rows = 0;       // of all sources
  int64_t own_begin = 0;  // the own ones are [own_begin, own_begin + own_rows)
  int64_t own_rows = 0;
  int64_t top_k = 0;
  const int32_t* slots = nullptr;       // [rows, K]
  const int32_t* own_tokens = nullptr;  // [own_rows]
};

// out[slot] = row (times factors[slot], rounded once), out_values[slot] = its value, pads zero.
struct ScatterParams {
  SourceRows sources;
  int64_t cols = 0;
  DType dtype = DType::kInvalid;
  const void* own = nullptr;  // [T] rows
  const void* wire = nullptr;
  const float* own_values = nullptr;  // [T, K] or null
  const float* wire_values = nullptr;
  const float* factors = nullptr;  // [slots] or null; float dtypes only
  int64_t pad_rows = 0;
  const int32_t* pad_slots = nullptr;
  void* out = nullptr;
  float* out_values = nullptr;  // or null
};
cudaError_t LaunchScatter(const ScatterParams& params, cudaStream_t stream);

// wire[i] = round(sum over k of slot rows (times factors)) for the rows of other ranks, and
// wire_values[i, k] = slot_values[slot], 0 without a slot.
struct PartialParams {
  SourceRows sources;
  int64_t cols = 0;
  DType dtype = DType::kInvalid;
  const void* slots = nullptr;     // slot rows
  const float* factors = nullptr;  // [slots] or null
  const float* slot_values = nullptr;
  void* wire = nullptr;
  float* wire_values = nullptr;
};
cudaError_t LaunchPartials(const PartialParams& params, cudaStream_t stream);

// out[t] = round(sum over ranks in order of their partial sums), the own one unrounded, the others'
// from the wire; out_values[t, k] = value of the route, 0 without a slot.
struct FinalParams {
  int64_t tokens = 0;
  int64_t top_k = 0;
  int64_t cols = 0;
  int64_t world = 1;
  int64_t rank = 0;
  DType dtype = DType::kInvalid;
  const int32_t* row_of = nullptr;       // [T, R]
  const int32_t* route_owner = nullptr;  // [T, K]
  const int32_t* own_slots = nullptr;    // [own rows, K]
  const int32_t* wire_begin = nullptr;   // [R]
  const void* slots = nullptr;
  const float* factors = nullptr;
  const float* slot_values = nullptr;
  const void* wire = nullptr;
  const float* wire_values = nullptr;
  void* out = nullptr;
  float* out_values = nullptr;
};
cudaError_t LaunchFinal(const FinalParams& params, cudaStream_t stream);

// out[i] = gathered[0, i] + gathered[1, i] + ... in that order; gathered: [world, count].
cudaError_t LaunchOrderedSum(const float* gathered, int64_t world, int64_t count, float* out,
                             cudaStream_t stream);

}  // namespace expertd

#endif  // KERNELS_EP_ROW_KERNELS_H_
