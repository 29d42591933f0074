// Cells of nccl_lsa: 16 bytes that say by themselves whether they have arrived; a rank's header.
#ifndef KERNELS_EP_LSA_CELLS_CUH_
#define KERNELS_EP_LSA_CELLS_CUH_

#include <cstdint>

#include "kernels/ep/lsa_device.cuh"

namespace expertd {

struct alignas(16) Cell {
  uint64_t payload;
  uint64_t tag;
};

// One access each: payload and tag belong together.
__device__ __forceinline__ Cell LoadCell(const Cell* from) {
  Cell cell;
  asm volatile(
      "{ .reg .b128 both; ld.relaxed.sys.global.b128 both, [%2]; mov.b128 {%0, %1}, both; }"
      : "=l"(cell.payload), "=l"(cell.tag)
      : "l"(from)
      : "memory");
  return cell;
}
__device__ __forceinline__ void StoreCell(Cell* to, uint64_t payload, uint64_t tag) {
  asm volatile(
      "{ .reg .b128 both; mov.b128 both, {%1, %2}; st.relaxed.sys.global.b128 [%0], both; }" ::"l"(
          to),
      "l"(payload), "l"(tag)
      : "memory");
}

// The cells of `source` in the window of `owner`.
__device__ __forceinline__ Cell* CellsOf(const LsaOp& op, int owner, int source) {
  return InWindow<Cell>(op, owner, op.layout.ids) + source * op.layout.cells;
}

// What a rank says about itself in its two header cells.
struct Header {
  int tokens;
  int top_k;
  int alignment;
  int experts;
  int reject;
};

__device__ inline uint64_t Pair(int low, int high) {
  return static_cast<uint32_t>(low) | static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32;
}

__device__ inline void SendHeader(const LsaOp& op, const LsaPrepareParams& p, int owner) {
  Cell* cells = CellsOf(op, owner, op.rank);
  StoreCell(cells, Pair(p.tokens, p.top_k << 8 | p.reject), op.tag);
  StoreCell(cells + 1, Pair(p.experts, p.alignment), op.tag);
}

// False when it is not there.
__device__ inline bool ReadHeader(const LsaOp& op, int source, Header* header) {
  const Cell* cells = CellsOf(op, op.rank, source);
  const Cell first = LoadCell(cells);
  const Cell second = LoadCell(cells + 1);
  if (first.tag != op.tag || second.tag != op.tag) return false;
  const auto high = static_cast<int>(first.payload >> 32);
  *header = {.tokens = static_cast<int>(first.payload),
             .top_k = high >> 8,
             .alignment = static_cast<int>(second.payload >> 32),
             .experts = static_cast<int>(second.payload),
             .reject = high & 255};
  return true;
}

}  // namespace expertd

#endif  // KERNELS_EP_LSA_CELLS_CUH_
