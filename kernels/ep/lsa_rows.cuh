// Rows of nccl_lsa's windows: where they lie, which slots they have, and the sign that they came.
//
// Each row that travels has its flag: the writer's team stores the row, then one thread releases
// the operation's tag; the reader's team acquires it. Nothing else orders the two ranks.
#ifndef KERNELS_EP_LSA_ROWS_CUH_
#define KERNELS_EP_LSA_ROWS_CUH_

#include "kernels/ep/lsa_device.cuh"

namespace expertd {

// The parts of a window that one direction of rows uses.
struct RowParts {
  int64_t flags;
  int64_t values;
  int64_t rows;
};
__host__ __device__ inline RowParts ScatterParts(const WindowLayout& layout) {
  return {layout.scatter_flags, layout.scatter_values, layout.scatter_rows};
}
__host__ __device__ inline RowParts GatherParts(const WindowLayout& layout) {
  return {layout.gather_flags, layout.gather_values, layout.gather_rows};
}

// Row slot `token` of `source` in the window of `owner`.
struct RowPlace {
  int owner;
  int64_t index;

  __device__ RowPlace(const LsaOp& op, int owner, int source, int64_t token)
      : owner(owner), index(WindowPart(owner, source) * op.layout.rows + token) {}
  __device__ uint64_t* Flag(const LsaOp& op, const RowParts& parts) const {
    return InWindow<uint64_t>(op, owner, parts.flags) + index;
  }
  __device__ float* Values(const LsaOp& op, const RowParts& parts) const {
    return InWindow<float>(op, owner, parts.values) + index * op.layout.top_k;
  }
  template <typename V>
  __device__ V* Row(const LsaOp& op, const RowParts& parts) const {
    return InWindow<V>(op, owner, parts.rows + index * op.layout.pitch);
  }
};

// A team's share of work that the blocks [begin, end) have together.
struct Share {
  int first;
  int step;

  __device__ Share(int team, int teams, int begin, int end)
      : first((static_cast<int>(blockIdx.x) - begin) * teams + team), step((end - begin) * teams) {}
};

// A set of ranks, the same in all threads of a team.
struct RankSet {
  static constexpr int kWords = (kLsaMaxWorld + 31) / 32;
  uint32_t words[kWords] = {};

  __device__ bool Has(int rank) const {
    bool has = false;
#pragma unroll
    for (int w = 0; w < kWords; ++w) has |= w == rank / 32 && (words[w] >> (rank % 32) & 1) != 0;
    return has;
  }
  __device__ void Add(int rank) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] |= w == rank / 32 ? 1u << (rank % 32) : 0;
  }
  template <typename Do>
  __device__ void ForEach(const Do& act) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      for (uint32_t left = words[w]; left != 0; left &= left - 1) act(w * 32 + __ffs(left) - 1);
    }
  }
};

// The ranks in owner [K], without `except`. For whole warps.
__device__ inline RankSet OwnersOf(const int32_t* owner, int top_k, int except) {
  RankSet set;
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int first = 0; first < top_k; first += 32) {
    const int rank = first + lane < top_k ? owner[first + lane] : -1;
    const bool counts = rank >= 0 && rank != except;
#pragma unroll
    for (int w = 0; w < RankSet::kWords; ++w) {
      const bool here = counts && rank / 32 == w;
      set.words[w] |= __reduce_or_sync(kAllLanes, here ? 1u << (rank % 32) : 0u);
    }
  }
  return set;
}

// Writes the slots of slots [K] that are any to list, in order of k; returns how many. For a whole
// team, which must Sync before it calls again.
template <typename T>
__device__ int ChooseSlots(const T& team, const int32_t* slots, int top_k, int32_t* list) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int count = 0;
  for (int first = 0; first < top_k; first += 32) {
    const int slot = first + lane < top_k ? slots[first + lane] : -1;
    const unsigned any = __ballot_sync(kAllLanes, slot >= 0);
    if (slot >= 0 && team.thread < 32) list[count + __popc(any & ((1u << lane) - 1))] = slot;
    count += __popc(any);
  }
  team.Sync();
  return count;
}

// Reads through the cache of the device, where other ranks' stores arrive.
template <typename V>
__device__ __forceinline__ V LoadPiece(const V* from) {
  static_assert(sizeof(V) == 16 || sizeof(V) == 4 || sizeof(V) == 2 || sizeof(V) == 1);
  const auto load = [&](auto raw) {
    raw = __ldcg(reinterpret_cast<const decltype(raw)*>(from));
    return *reinterpret_cast<const V*>(&raw);
  };
  if constexpr (sizeof(V) == 16) return load(uint4());
  if constexpr (sizeof(V) == 4) return load(0u);
  if constexpr (sizeof(V) == 2) return load(static_cast<unsigned short>(0));
  if constexpr (sizeof(V) == 1) return load(static_cast<unsigned char>(0));
}

}  // namespace expertd

#endif  // KERNELS_EP_LSA_ROWS_CUH_
