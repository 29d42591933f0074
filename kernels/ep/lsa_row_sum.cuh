// A team's sum of slot rows: which slots, and the pieces of the sum that one thread has.
#ifndef KERNELS_EP_LSA_ROW_SUM_CUH_
#define KERNELS_EP_LSA_ROW_SUM_CUH_

#include "kernels/cuda/numeric.cuh"
#include "kernels/ep/lsa_rows.cuh"

namespace expertd {

// A thread adds this many pieces of a row beside each other, from this many slot rows at once: what
// it has in flight.
inline constexpr int kPieces = 2;
inline constexpr int kAtOnce = 4;

// The slots of one token here, and their factors; a team's, in shared memory.
struct Chosen {
  int32_t slots[kLsaMaxTopK];
  float factors[kLsaMaxTopK];
};

// Returns how many. For a whole team, which must Sync before it calls again.
template <typename T>
__device__ int Choose(const LsaGatherParams& p, const T& team, const int32_t* slots,
                      Chosen* chosen) {
  const int count = ChooseSlots(team, slots, p.routes.top_k, chosen->slots);
  if (p.factors == nullptr) return count;
  for (int i = team.thread; i < count; i += T::kThreads) {
    chosen->factors[i] = p.factors[chosen->slots[i]];
  }
  team.Sync();
  return count;
}

// A thread's pieces of one row: c, c + kStride, ... below `pieces`. Products and sums are rounded
// each by itself, as on the CPU: no fused operations. The first addend is taken as it is: adding it
// to zero would turn -0 into 0.
template <typename E, int N, int kStride>
struct RowSum {
  using V = Pack<E, N>;
  static constexpr int kStep = kPieces * kStride;
  float value[kPieces][N];

  static __device__ __forceinline__ int At(int c, int i) { return c + i * kStride; }
  static __device__ __forceinline__ void LoadRow(const V* row, int pieces, int c, V* to) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      to[i] = V{};
      if (At(c, i) < pieces) to[i] = LoadPiece(row + At(c, i));
    }
  }
  __device__ __forceinline__ void SetZero() {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int n = 0; n < N; ++n) value[i][n] = 0.0f;
    }
  }
  template <bool kFirst, bool kScaled>
  __device__ __forceinline__ void Take(const V* row, float factor) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float wide = ToFloat(row[i].value[n]);
        if constexpr (kScaled) wide = __fmul_rn(wide, factor);
        value[i][n] = kFirst ? wide : __fadd_rn(value[i][n], wide);
      }
    }
  }
  __device__ __forceinline__ void AddSum(const RowSum& other) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int n = 0; n < N; ++n) value[i][n] = __fadd_rn(value[i][n], other.value[i][n]);
    }
  }

  // The sum of the chosen slots, in order. REQUIRES: count > 0.
  template <bool kScaled>
  __device__ __forceinline__ void SumSlots(const LsaGatherParams& p, const Chosen& chosen,
                                           int count, int pieces, int c) {
    const V* rows = static_cast<const V*>(p.slots);
    V row[kAtOnce][kPieces];
    const auto load = [&](int n, int at) {
      LoadRow(rows + static_cast<int64_t>(chosen.slots[at]) * pieces, pieces, c, row[n]);
    };
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (n < count) load(n, n);
    }
    Take<true, kScaled>(row[0], kScaled ? chosen.factors[0] : 1.0f);
#pragma unroll
    for (int n = 1; n < kAtOnce; ++n) {
      if (n < count) Take<false, kScaled>(row[n], kScaled ? chosen.factors[n] : 1.0f);
    }
    for (int first = kAtOnce; first < count; first += kAtOnce) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n < count) load(n, first + n);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n >= count) continue;
        Take<false, kScaled>(row[n], kScaled ? chosen.factors[first + n] : 1.0f);
      }
    }
  }
  __device__ __forceinline__ void Store(V* row, int pieces, int c) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      V piece;
#pragma unroll
      for (int n = 0; n < N; ++n) piece.value[n] = FromFloat<E>(value[i][n]);
      if (At(c, i) < pieces) row[At(c, i)] = piece;
    }
  }
};

}  // namespace expertd

#endif  // KERNELS_EP_LSA_ROW_SUM_CUH_
