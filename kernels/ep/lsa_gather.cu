// Rows from slots to tokens over windows: some teams sum and push partials, the others add all up.
#include "kernels/cuda/dtype_dispatch.h"
#include "kernels/ep/lsa_row_sum.cuh"
#include "kernels/ep/lsa_rows.cuh"
#include "kernels/ep/row_shape.cuh"

namespace expertd {
namespace {

// Sums this rank's slot rows for the other ranks' tokens and sends them.
template <typename E, int N, bool kScaled, typename T>
__device__ void PushPartials(const LsaOp& op, const LsaGatherParams& p, const T& team, Share share,
                             int pieces, Chosen* chosen) {
  const RowParts parts = GatherParts(op.layout);
  const LsaRoutes& routes = p.routes;
  RankSet open;
  // No flag may say that this operation goes well when its sequence has stopped before.
  if (team.Agree([&] { return Stopped(op); })) return;
  for (int t = share.first; t < routes.most_tokens; t += share.step) {
    for (int step = 1; step < op.world; ++step) {
      const int target = (op.rank + step) % op.world;
      if (t >= routes.sources[target]) continue;
      const int32_t* slots =
          routes.slots + (target * op.layout.rows + t) * static_cast<int64_t>(routes.top_k);
      const int count = Choose(p, team, slots, chosen);
      if (count == 0) continue;
      if (!open.Has(target)) {
        if (!team.Agree([&] { return WaitGate(op, target); })) return;
        open.Add(target);
      }
      const RowPlace place(op, target, op.rank, t);
      auto* to = place.Row<Pack<E, N>>(op, parts);
      using Row = RowSum<E, N, T::kThreads>;
      for (int c = team.thread; c < pieces; c += Row::kStep) {
        Row sum;
        sum.template SumSlots<kScaled>(p, *chosen, count, pieces, c);
        sum.Store(to, pieces, c);
      }
      for (int k = team.thread; p.values && k < routes.top_k; k += T::kThreads) {
        place.Values(op, parts)[k] = slots[k] >= 0 ? p.slot_values[slots[k]] : 0.0f;
      }
      team.Sync();
      if (team.thread == 0) StoreRelease(place.Flag(op, parts), op.tag);
    }
  }
}

// Values of the routes of token t, once all partials are there.
template <typename T>
__device__ void ReturnValues(const LsaOp& op, const LsaGatherParams& p, const T& team,
                             const RowParts& parts, int t, const int32_t* slots) {
  const LsaRoutes& routes = p.routes;
  for (int k = team.thread; k < routes.top_k; k += T::kThreads) {
    const int64_t route = static_cast<int64_t>(t) * routes.top_k + k;
    const int owner = routes.owner[route];
    float value = 0.0f;
    if (owner == op.rank) {
      value = p.slot_values[slots[k]];
    } else if (owner >= 0) {
      value = __ldcg(RowPlace(op, op.rank, owner, t).Values(op, parts) + k);
    }
    p.route_values[route] = value;
  }
}

// Piece c of token t: own slots and the others' partials, in rank order.
template <typename E, int N, bool kScaled, int kStride>
__device__ __forceinline__ RowSum<E, N, kStride> AddRanks(const LsaOp& op, const LsaGatherParams& p,
                                                          const RankSet& ranks, int t,
                                                          const Chosen& chosen, int count,
                                                          int pieces, int c) {
  using V = Pack<E, N>;
  const RowParts parts = GatherParts(op.layout);
  RowSum<E, N, kStride> sum;
  sum.SetZero();
  bool any = false;
  ranks.ForEach([&](int rank) {
    if (rank == op.rank) {
      RowSum<E, N, kStride> own;
      own.template SumSlots<kScaled>(p, chosen, count, pieces, c);
      if (any) {
        sum.AddSum(own);
      } else {
        sum = own;
      }
    } else {
      V row[kPieces];
      sum.LoadRow(RowPlace(op, op.rank, rank, t).Row<V>(op, parts), pieces, c, row);
      if (any) {
        sum.template Take<false, false>(row, 1.0f);
      } else {
        sum.template Take<true, false>(row, 1.0f);
      }
    }
    any = true;
  });
  return sum;
}

// The same for a token with slots here and a partial of one other rank, both in flight at once.
template <typename E, int N, bool kScaled, int kStride>
__device__ __forceinline__ RowSum<E, N, kStride> AddPair(const LsaGatherParams& p,
                                                         const Pack<E, N>* partial, bool own_first,
                                                         const Chosen& chosen, int count,
                                                         int pieces, int c) {
  Pack<E, N> row[kPieces];
  RowSum<E, N, kStride> own;
  own.LoadRow(partial, pieces, c, row);
  own.template SumSlots<kScaled>(p, chosen, count, pieces, c);
  if (own_first) {
    own.template Take<false, false>(row, 1.0f);
    return own;
  }
  RowSum<E, N, kStride> sum;
  sum.template Take<true, false>(row, 1.0f);
  sum.AddSum(own);
  return sum;
}

// Adds up this rank's tokens.
template <typename E, int N, bool kScaled, typename T>
__device__ void AddTokens(const LsaOp& op, const LsaGatherParams& p, const T& team, Share share,
                          int pieces, Chosen* chosen) {
  using V = Pack<E, N>;
  const RowParts parts = GatherParts(op.layout);
  const LsaRoutes& routes = p.routes;
  for (int t = share.first; t < routes.tokens; t += share.step) {
    const int32_t* slots =
        routes.slots + (op.rank * op.layout.rows + t) * static_cast<int64_t>(routes.top_k);
    const RankSet ranks =
        OwnersOf(routes.owner + static_cast<int64_t>(t) * routes.top_k, routes.top_k, -1);
    const int count = Choose(p, team, slots, chosen);
    bool stopped = false;
    int others = 0;
    int other = 0;
    ranks.ForEach([&](int rank) {
      if (stopped || rank == op.rank) return;
      ++others;
      other = rank;
      const uint64_t* flag = RowPlace(op, op.rank, rank, t).Flag(op, parts);
      stopped = !team.Agree([&] { return WaitFlag(op, rank, flag); });
    });
    if (stopped) return;
    const bool pair = count > 0 && others == 1;
    const V* partial = pair ? RowPlace(op, op.rank, other, t).Row<V>(op, parts) : nullptr;
    V* const to = static_cast<V*>(p.rows) + static_cast<int64_t>(t) * pieces;
    using Row = RowSum<E, N, T::kThreads>;
    for (int c = team.thread; c < pieces; c += Row::kStep) {
      const Row sum =
          pair ? AddPair<E, N, kScaled, T::kThreads>(p, partial, op.rank < other, *chosen, count,
                                                     pieces, c)
               : AddRanks<E, N, kScaled, T::kThreads>(op, p, ranks, t, *chosen, count, pieces, c);
      sum.Store(to, pieces, c);
    }
    if (p.values) ReturnValues(op, p, team, parts, t, slots);
    team.Sync();
  }
}

template <typename E, int N, bool kScaled, int kWarps>
__global__ void __launch_bounds__(kGatherThreads, 1)
    GatherKernel(__grid_constant__ const LsaOp op, __grid_constant__ const LsaGatherParams p,
                 int pieces, int push_blocks, int rest_begin) {
  constexpr int kTeams = kGatherThreads / 32 / kWarps;
  __shared__ Chosen all_chosen[kTeams];
  const Team<kWarps> team;
  const int block = static_cast<int>(blockIdx.x);
  if (block == 0) Arrive(op);
  Chosen* chosen = &all_chosen[team.index];
  if (block < push_blocks) {
    PushPartials<E, N, kScaled>(op, p, team, Share(team.index, kTeams, 0, push_blocks), pieces,
                                chosen);
  }
  if (block >= rest_begin) {
    AddTokens<E, N, kScaled>(op, p, team, Share(team.index, kTeams, rest_begin, gridDim.x), pieces,
                             chosen);
  }
}

template <typename E, int N, bool kScaled>
cudaError_t Launch(const LsaOp& op, const LsaGatherParams& p, const LsaShape& shape,
                   cudaStream_t stream) {
  // Rows of odd widths are rare: one kernel is enough for each.
  auto kernel = &GatherKernel<E, N, kScaled, 1>;
  if constexpr (N > 1) {
    if (shape.team_warps == 4) kernel = &GatherKernel<E, N, kScaled, 4>;
    if (shape.team_warps == 8) kernel = &GatherKernel<E, N, kScaled, 8>;
  }
  kernel<<<static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.threads), 0, stream>>>(
      op, p, static_cast<int>(p.cols / N), shape.push_blocks, shape.rest_begin());
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchLsaGather(const LsaOp& op, const LsaGatherParams& p, const LsaShape& shape,
                            cudaStream_t stream) {
  return WithFloatType(p.dtype, [&](auto tag) {
    using E = typename decltype(tag)::type;
    constexpr int kWide = 16 / sizeof(E);
    const bool wide = p.cols % kWide == 0 && (Address(p.slots) | Address(p.rows)) % 16 == 0;
    if (p.factors != nullptr) {
      return wide ? Launch<E, kWide, true>(op, p, shape, stream)
                  : Launch<E, 1, true>(op, p, shape, stream);
    }
    return wide ? Launch<E, kWide, false>(op, p, shape, stream)
                : Launch<E, 1, false>(op, p, shape, stream);
  });
}

}  // namespace expertd
