// Rows from tokens to slots over windows: some teams push rows out, the others spread what is here.
#include "kernels/cuda/dtype_dispatch.h"
#include "kernels/cuda/numeric.cuh"
#include "kernels/ep/lsa_rows.cuh"
#include "kernels/ep/row_shape.cuh"

namespace expertd {
namespace {

constexpr int kUnroll = 4;

// Copies `pieces` to every place that to(n) names, n < count, all threads of a team together.
template <typename V, typename T, typename To>
__device__ __forceinline__ void CopyRow(const T& team, const V* from, int pieces, int count,
                                        const To& to) {
  for (int c = team.thread; c < pieces; c += kUnroll * T::kThreads) {
    V piece[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = c + u * T::kThreads;
      if (at < pieces) piece[u] = LoadPiece(from + at);
    }
    for (int n = 0; n < count; ++n) {
      V* const begin = to(n);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = c + u * T::kThreads;
        if (at < pieces) begin[at] = piece[u];
      }
    }
  }
}

// Sends the rows of this rank's tokens to the ranks that have their experts.
template <typename V, typename T>
__device__ void PushRows(const LsaOp& op, const LsaScatterParams& p, const T& team, Share share,
                         int pieces) {
  const RowParts parts = ScatterParts(op.layout);
  const LsaRoutes& routes = p.routes;
  RankSet open;
  // No flag may say that this operation goes well when its sequence has stopped before.
  if (team.Agree([&] { return Stopped(op); })) return;
  for (int t = share.first; t < routes.tokens; t += share.step) {
    const RankSet targets =
        OwnersOf(routes.owner + static_cast<int64_t>(t) * routes.top_k, routes.top_k, op.rank);
    bool stopped = false;
    targets.ForEach([&](int rank) {
      if (stopped || open.Has(rank)) return;
      stopped = !team.Agree([&] { return WaitGate(op, rank); });
      open.Add(rank);
    });
    if (stopped) return;
    const V* from = static_cast<const V*>(p.rows) + static_cast<int64_t>(t) * pieces;
    targets.ForEach([&](int rank) {
      const RowPlace place(op, rank, op.rank, t);
      V* const to = place.Row<V>(op, parts);
      CopyRow(team, from, pieces, 1, [&](int) { return to; });
      if (!p.values) return;
      for (int k = team.thread; k < routes.top_k; k += T::kThreads) {
        place.Values(op, parts)[k] = p.route_values[static_cast<int64_t>(t) * routes.top_k + k];
      }
    });
    team.Sync();
    if (team.thread != 0) continue;
    targets.ForEach(
        [&](int rank) { StoreRelease(RowPlace(op, rank, op.rank, t).Flag(op, parts), op.tag); });
  }
}

// How a row gets into its slots: as it is, or times the slot's factor.
template <typename V>
struct PlainSpread {
  template <typename T>
  __device__ static void Row(const LsaScatterParams& p, const T& team, const V* from, int pieces,
                             const int32_t* slots, int count) {
    CopyRow(team, from, pieces, count, [&](int n) {
      return static_cast<V*>(p.slots) + static_cast<int64_t>(slots[n]) * pieces;
    });
  }
};

template <typename E, int N>
struct ScaledSpread {
  using V = Pack<E, N>;
  template <typename T>
  __device__ static void Row(const LsaScatterParams& p, const T& team, const V* from, int pieces,
                             const int32_t* slots, int count) {
    for (int c = team.thread; c < pieces; c += T::kThreads) {
      const V piece = LoadPiece(from + c);
      for (int n = 0; n < count; ++n) {
        const float factor = p.factors[slots[n]];
        V scaled;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          scaled.value[i] = FromFloat<E>(factor * ToFloat(piece.value[i]));
        }
        (static_cast<V*>(p.slots) + static_cast<int64_t>(slots[n]) * pieces)[c] = scaled;
      }
    }
  }
};

// Spreads the rows of all ranks: this rank's from where they are, the others' from the window.
template <typename V, typename Spread, typename T>
__device__ void SpreadRows(const LsaOp& op, const LsaScatterParams& p, const T& team, Share share,
                           int pieces, int32_t* list) {
  const RowParts parts = ScatterParts(op.layout);
  const LsaRoutes& routes = p.routes;
  for (int t = share.first; t < routes.most_tokens; t += share.step) {
    for (int step = 0; step < op.world; ++step) {
      const int source = (op.rank + step) % op.world;
      if (t >= routes.sources[source]) continue;
      const int32_t* slots =
          routes.slots + (source * op.layout.rows + t) * static_cast<int64_t>(routes.top_k);
      const int count = ChooseSlots(team, slots, routes.top_k, list);
      if (count > 0) {
        const V* row = static_cast<const V*>(p.rows) + static_cast<int64_t>(t) * pieces;
        const float* values = p.route_values + static_cast<int64_t>(t) * routes.top_k;
        if (source != op.rank) {
          const RowPlace place(op, op.rank, source, t);
          const uint64_t* flag = place.Flag(op, parts);
          const bool here = team.Agree([&] { return WaitFlag(op, source, flag); });
          if (!here) return;
          row = place.Row<V>(op, parts);
          values = place.Values(op, parts);
        }
        Spread::Row(p, team, row, pieces, list, count);
        for (int k = team.thread; p.values && k < routes.top_k; k += T::kThreads) {
          if (slots[k] >= 0) p.slot_values[slots[k]] = __ldcg(values + k);
        }
      }
      team.Sync();
    }
  }
  for (int i = share.first; i < routes.pad_rows; i += share.step) {
    const int64_t slot = routes.pad_slots[i];
    V* const to = static_cast<V*>(p.slots) + slot * pieces;
    for (int c = team.thread; c < pieces; c += T::kThreads) to[c] = V{};
    if (p.values && team.thread == 0) p.slot_values[slot] = 0.0f;
  }
}

template <typename V, typename Spread, int kWarps>
__global__ void __launch_bounds__(kScatterThreads, 1)
    ScatterKernel(__grid_constant__ const LsaOp op, __grid_constant__ const LsaScatterParams p,
                  int pieces, int push_blocks, int rest_begin) {
  constexpr int kTeams = kScatterThreads / 32 / kWarps;
  __shared__ int32_t lists[kTeams][kLsaMaxTopK];
  const Team<kWarps> team;
  const int block = static_cast<int>(blockIdx.x);
  if (block == 0) Arrive(op);
  if (block < push_blocks) {
    PushRows<V>(op, p, team, Share(team.index, kTeams, 0, push_blocks), pieces);
  }
  if (block >= rest_begin) {
    SpreadRows<V, Spread>(op, p, team, Share(team.index, kTeams, rest_begin, gridDim.x), pieces,
                          lists[team.index]);
  }
}

template <typename V, typename Spread>
cudaError_t Launch(const LsaOp& op, const LsaScatterParams& p, const LsaShape& shape,
                   int64_t pieces, cudaStream_t stream) {
  // Rows of odd widths are rare: one kernel is enough for each.
  auto kernel = &ScatterKernel<V, Spread, 1>;
  if constexpr (sizeof(V) == 16) {
    if (shape.team_warps == 4) kernel = &ScatterKernel<V, Spread, 4>;
    if (shape.team_warps == 8) kernel = &ScatterKernel<V, Spread, 8>;
  }
  kernel<<<static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.threads), 0, stream>>>(
      op, p, static_cast<int>(pieces), shape.push_blocks, shape.rest_begin());
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchLsaScatter(const LsaOp& op, const LsaScatterParams& p, const LsaShape& shape,
                             cudaStream_t stream) {
  const uintptr_t addresses = Address(p.rows) | Address(p.slots);
  if (p.factors != nullptr) {
    return WithFloatType(p.dtype, [&](auto tag) {
      using E = typename decltype(tag)::type;
      constexpr int kWide = 16 / sizeof(E);
      if (p.cols % kWide == 0 && addresses % 16 == 0) {
        using Spread = ScaledSpread<E, kWide>;
        return Launch<Pack<E, kWide>, Spread>(op, p, shape, p.cols / kWide, stream);
      }
      return Launch<Pack<E, 1>, ScaledSpread<E, 1>>(op, p, shape, p.cols, stream);
    });
  }
  const int64_t bytes = p.cols * static_cast<int64_t>(DTypeSize(p.dtype));
  const uintptr_t all = addresses | static_cast<uintptr_t>(bytes);
  if (all % 16 == 0) return Launch<uint4, PlainSpread<uint4>>(op, p, shape, bytes / 16, stream);
  if (all % 4 == 0) return Launch<unsigned, PlainSpread<unsigned>>(op, p, shape, bytes / 4, stream);
  if (all % 2 == 0) {
    return Launch<uint16_t, PlainSpread<uint16_t>>(op, p, shape, bytes / 2, stream);
  }
  return Launch<uint8_t, PlainSpread<uint8_t>>(op, p, shape, bytes, stream);
}

}  // namespace expertd
