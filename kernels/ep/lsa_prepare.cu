// Prepare on windows: all ranks' ids to all ranks, then counts, slots and owners, in one kernel.
//
// Ids travel as 16-bit numbers, four in a 16-byte cell beside the operation's tag, so that a cell
// tells by itself whether it has arrived. From there on a rank needs nothing from the others: it
// counts every rank's routes by tile of kRouteTile tokens, adds the tiles up, and places each route
// by counting bits; the order is source rank, then token, whatever the hardware does first.
#include <algorithm>

#include "kernels/ep/lsa_cells.cuh"
#include "kernels/ep/lsa_device.cuh"
#include "kernels/ep/route_kernels.h"

namespace expertd {
namespace {

constexpr int kThreads = 512;
constexpr int kWarp = 32;
constexpr int kTile = static_cast<int>(kRouteTile);
constexpr int kWords = kTile / 32;
constexpr int kNoId = -1;
constexpr int kBadId = -2;  // anything else that is no expert

// Tokens of a source whose routes can be placed: none when it prepares something else.
__device__ int UsableTokens(const LsaOp& op, const LsaPrepareParams& p, int source) {
  Header header;
  if (!ReadHeader(op, source, &header)) return 0;
  const bool same = header.top_k == p.top_k && header.experts == p.experts &&
                    header.alignment == p.alignment && header.reject == 0;
  return same ? header.tokens : 0;
}

__device__ int ReadId(const LsaPrepareParams& p, int64_t index) {
  const int64_t id = p.wide_ids ? static_cast<const int64_t*>(p.ids)[index]
                                : static_cast<const int32_t*>(p.ids)[index];
  if (id == kNoId) return kNoId;
  return id < 0 || id >= p.experts ? kBadId : static_cast<int>(id);
}

// All own ids to one rank, spread over the grid.
__device__ void SendIds(const LsaOp& op, const LsaPrepareParams& p, int owner) {
  Cell* cells = CellsOf(op, owner, op.rank) + WindowLayout::kHeaderCells;
  const int64_t routes = static_cast<int64_t>(p.tokens) * p.top_k;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t c = blockIdx.x * kThreads + threadIdx.x; 4 * c < routes; c += step) {
    uint64_t payload = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int id = 4 * c + i < routes ? ReadId(p, 4 * c + i) : kNoId;
      payload |= static_cast<uint64_t>(static_cast<uint16_t>(id)) << (16 * i);
    }
    StoreCell(cells + c, payload, op.tag);
  }
}

__device__ void SendAll(const LsaOp& op, const LsaPrepareParams& p) {
  __shared__ int open;
  for (int step = 0; step < op.world; ++step) {
    const int owner = (op.rank + step) % op.world;
    if (owner != op.rank) {
      __syncthreads();
      if (threadIdx.x == 0) open = static_cast<int>(WaitGate(op, owner));
      __syncthreads();
      if (open == 0) return;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) SendHeader(op, p, owner);
    SendIds(op, p, owner);
  }
}

// A block's view of one tile of one source.
struct Tile {
  uint32_t* bits;  // [E, kWords] shared
  int16_t* ids;    // [kTile, K] shared
  int source;
  int first;   // token
  int tokens;  // in the tile
};

// Waits for the ids of tile `item` and sets their bits. Returns this thread's first bad route.
__device__ int32_t LoadTile(const LsaOp& op, const LsaPrepareParams& p, int tiles, int item,
                            Tile* tile) {
  __shared__ int tokens;
  __syncthreads();  // the shared arrays may still be in use
  tile->source = item / tiles;
  tile->first = item % tiles * kTile;
  if (threadIdx.x == 0) {
    Header header;
    const bool here =
        WaitFor(op, tile->source, [&] { return ReadHeader(op, tile->source, &header); });
    tokens = here ? UsableTokens(op, p, tile->source) : 0;
  }
  for (int i = threadIdx.x; i < p.experts * kWords; i += kThreads) tile->bits[i] = 0;
  __syncthreads();
  tile->tokens = min(max(tokens - tile->first, 0), kTile);
  // kTile routes are whole cells, for every K.
  const int routes = tile->tokens * p.top_k;
  const Cell* cells = CellsOf(op, op.rank, tile->source) + WindowLayout::kHeaderCells +
                      static_cast<int64_t>(tile->first) * p.top_k / 4;
  for (int c = threadIdx.x; 4 * c < routes; c += kThreads) {
    Cell cell = {};
    const bool here = WaitFor(op, tile->source, [&] {
      cell = LoadCell(cells + c);
      return cell.tag == op.tag;
    });
    reinterpret_cast<uint64_t*>(tile->ids)[c] = here ? cell.payload : ~uint64_t{0};
  }
  __syncthreads();
  int32_t bad = kNoBadRoute;
  for (int i = threadIdx.x; i < routes; i += kThreads) {
    const int id = tile->ids[i];
    if (id == kNoId) continue;
    const int token = i / p.top_k;
    const int index = tile->first * p.top_k + i;
    if (id == kBadId) {
      bad = min(bad, 2 * index);
      continue;
    }
    const uint32_t bit = 1u << (token % 32);
    if ((atomicOr(&tile->bits[id * kWords + token / 32], bit) & bit) == 0) continue;
    int seen = 0;
    for (int k = 0; k < p.top_k; ++k) {
      if (tile->ids[token * p.top_k + k] != id || ++seen != 2) continue;
      bad = min(bad, 2 * (tile->first * p.top_k + token * p.top_k + k) + 1);
    }
  }
  __syncthreads();
  return bad;
}

__device__ void CountTile(const LsaPrepareParams& p, const Tile& tile, int item, int items,
                          int32_t bad) {
  __shared__ int32_t first_bad;
  if (threadIdx.x == 0) first_bad = kNoBadRoute;
  __syncthreads();
  if (bad != kNoBadRoute) atomicMin(&first_bad, bad);
  for (int e = threadIdx.x; e < p.experts; e += kThreads) {
    int sum = 0;
    for (int word = 0; word < kWords; ++word) sum += __popc(tile.bits[e * kWords + word]);
    p.counts[static_cast<int64_t>(e) * items + item] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) p.bad[item] = first_bad;
}

// All blocks come here, also those of a stopped operation, so it needs no way out.
__device__ void GridBarrier(LsaDeviceWords* words) {
  __syncthreads();
  if (threadIdx.x == 0) {
    volatile uint32_t* turn = &words->barrier_turn;
    const uint32_t before = *turn;
    __threadfence();
    if (atomicAdd(&words->barrier_count, 1u) == gridDim.x - 1) {
      words->barrier_count = 0;
      __threadfence();
      atomicAdd(&words->barrier_turn, 1u);
    } else {
      while (*turn == before) {
      }
    }
    __threadfence();
  }
  __syncthreads();
}

// Where a source's routes to the experts are counted.
__device__ __forceinline__ int32_t* TotalsOf(const LsaPrepareParams& p, int source) {
  return p.record + source * (kRecordHeader + p.experts) + kRecordHeader;
}

// Makes each source's counts of an expert exclusive sums over its tiles; a warp for each pair.
__device__ void AddTiles(const LsaOp& op, const LsaPrepareParams& p, int tiles) {
  const int lane = threadIdx.x % kWarp;
  const int warps = static_cast<int>(gridDim.x) * kThreads / kWarp;
  const int pairs = p.experts * op.world;
  for (int i = (blockIdx.x * kThreads + threadIdx.x) / kWarp; i < pairs; i += warps) {
    const int e = i / op.world;
    const int source = i % op.world;
    int32_t* counts = p.counts + static_cast<int64_t>(i) * tiles;
    int sum = 0;
    for (int first = 0; first < tiles; first += kWarp) {
      const bool inside = first + lane < tiles;
      const int value = inside ? __ldcg(counts + first + lane) : 0;
      int upto = value;
      for (int step = 1; step < kWarp; step *= 2) {
        const int other = __shfl_up_sync(kAllLanes, upto, step);
        if (lane >= step) upto += other;
      }
      if (inside) counts[first + lane] = sum + upto - value;
      sum += __shfl_sync(kAllLanes, upto, kWarp - 1);
    }
    if (lane == 0) TotalsOf(p, source)[e] = sum;
  }
}

// base[j]: first slot of local expert j; pads[j]: pad rows before its. Called by one warp.
__device__ void PlaceExperts(const LsaOp& op, const LsaPrepareParams& p, int32_t* base,
                             int32_t* kept, int32_t* pads) {
  const int lane = threadIdx.x % kWarp;
  const int local = p.experts / op.world;
  int rows = 0;
  int pad_rows = 0;
  for (int first = 0; first < local; first += kWarp) {
    const int j = first + lane;
    int total = 0;
    for (int source = 0; j < local && source < op.world; ++source) {
      total += __ldcg(TotalsOf(p, source) + op.rank * local + j);
    }
    const int fit = min(total, p.limit);
    const int padded = (fit + p.alignment - 1) & ~(p.alignment - 1);
    int rows_upto = padded;
    int pads_upto = padded - fit;
    for (int step = 1; step < kWarp; step *= 2) {
      const int other_rows = __shfl_up_sync(kAllLanes, rows_upto, step);
      const int other_pads = __shfl_up_sync(kAllLanes, pads_upto, step);
      if (lane >= step) {
        rows_upto += other_rows;
        pads_upto += other_pads;
      }
    }
    if (j < local) {
      base[j] = rows + rows_upto - padded;
      kept[j] = fit;
      pads[j] = pad_rows + pads_upto - (padded - fit);
    }
    rows += __shfl_sync(kAllLanes, rows_upto, kWarp - 1);
    pad_rows += __shfl_sync(kAllLanes, pads_upto, kWarp - 1);
  }
}

// Set bits of a column before `token`.
__device__ int Before(const uint32_t* column, int token) {
  int sum = 0;
  for (int word = 0; word < token / 32; ++word) sum += __popc(column[word]);
  return sum + __popc(column[token / 32] & ((1u << (token % 32)) - 1));
}

__device__ void AssignTile(const LsaOp& op, const LsaPrepareParams& p, const Tile& tile, int item,
                           int items, int32_t* before, const int32_t* base) {
  const int local = p.experts / op.world;
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += kThreads) {
    int sum = __ldcg(p.counts + static_cast<int64_t>(e) * items + item);
    for (int source = 0; source < tile.source; ++source) {
      sum += __ldcg(TotalsOf(p, source) + e);
    }
    before[e] = sum;
  }
  __syncthreads();
  int32_t* slots =
      p.slots + (tile.source * op.layout.rows + tile.first) * static_cast<int64_t>(p.top_k);
  for (int i = threadIdx.x; i < tile.tokens * p.top_k; i += kThreads) {
    const int id = tile.ids[i];
    int rank = -1;
    int slot = -1;
    bool lost = false;
    if (id >= 0) {
      const int position = before[id] + Before(tile.bits + id * kWords, i / p.top_k);
      lost = position >= p.limit;
      if (!lost) rank = id / local;
      if (rank == op.rank) slot = base[id % local] + position;
    }
    slots[i] = slot;
    if (tile.source != op.rank) continue;
    const int64_t own = static_cast<int64_t>(tile.first) * p.top_k + i;
    p.owner[own] = rank;
    if (p.dropped != nullptr) p.dropped[own] = lost ? 1 : 0;
  }
}

// By one block: what each rank said about itself, for the record and the kernels that follow.
__device__ void WriteHeaders(const LsaOp& op, const LsaPrepareParams& p, int tiles) {
  const int lane = threadIdx.x % kWarp;
  for (int source = threadIdx.x / kWarp; source < op.world; source += kThreads / kWarp) {
    int32_t bad = kNoBadRoute;
    for (int tile = lane; tile < tiles; tile += kWarp) {
      bad = min(bad, __ldcg(p.bad + source * tiles + tile));
    }
    bad = __reduce_min_sync(kAllLanes, bad);
    Header header = {};
    if (lane != 0 || !ReadHeader(op, source, &header)) continue;
    p.sources[source] = UsableTokens(op, p, source);
    int32_t* record = TotalsOf(p, source) - kRecordHeader;
    record[kRecordBadRoute] = bad;
    record[kRecordReject] = header.reject;
    record[kRecordExperts] = header.experts;
    record[kRecordTopK] = header.top_k;
    record[kRecordAlignment] = header.alignment;
    record[kRecordTokens] = header.tokens;
    for (int spare = kRecordTokens + 1; spare < kRecordHeader; ++spare) record[spare] = 0;
  }
}

// By one block: the record to the host, in as few and as wide stores as can be, for each crosses
// the bus by itself. No order among them is needed.
__device__ void TellHost(const LsaOp& op, const LsaPrepareParams& p) {
  if (Stopped(op)) return;
  const int numbers = op.world * (kRecordHeader + p.experts);
  for (int c = threadIdx.x; 3 * c < numbers; c += kThreads) {
    int value[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) value[i] = 3 * c + i < numbers ? __ldcg(p.record + 3 * c + i) : 0;
    StoreCell(reinterpret_cast<Cell*>(p.cells + c), Pair(value[0], value[1]),
              Pair(value[2], static_cast<int>(p.nonce)));
  }
}

__global__ void __launch_bounds__(kThreads)
    PrepareKernel(__grid_constant__ const LsaOp op, __grid_constant__ const LsaPrepareParams p,
                  int tiles) {
  extern __shared__ uint64_t shared[];
  auto* ids = reinterpret_cast<int16_t*>(shared);
  auto* bits = reinterpret_cast<uint32_t*>(ids + kTile * p.top_k);
  auto* before = reinterpret_cast<int32_t*>(bits + p.experts * kWords);
  int32_t* base = before + p.experts;
  int32_t* kept = base + p.experts / op.world;
  int32_t* pads = kept + p.experts / op.world;
  const int items = op.world * tiles;
  Tile tile = {bits, ids, 0, 0, 0};
  int held = -1;
  if (blockIdx.x == 0) Arrive(op);
  // The threads of a block must agree: it may be stopping just now.
  if (__syncthreads_or(static_cast<int>(Stopped(op))) == 0) SendAll(op, p);
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int32_t bad = LoadTile(op, p, tiles, item, &tile);
    CountTile(p, tile, item, items, bad);
    held = item;
  }
  GridBarrier(op.device);
  AddTiles(op, p, tiles);
  if (blockIdx.x == gridDim.x - 1) WriteHeaders(op, p, tiles);
  GridBarrier(op.device);
  if (blockIdx.x == gridDim.x - 1) TellHost(op, p);
  if (threadIdx.x < kWarp) PlaceExperts(op, p, base, kept, pads);
  __syncthreads();
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    if (item != held) LoadTile(op, p, tiles, item, &tile);
    AssignTile(op, p, tile, item, items, before, base);
    held = item;
  }
  for (int j = blockIdx.x; j < p.experts / op.world; j += gridDim.x) {
    const int pad_rows = -kept[j] & (p.alignment - 1);
    for (int i = threadIdx.x; i < pad_rows; i += kThreads) {
      p.pad_slots[pads[j] + i] = base[j] + kept[j] + i;
    }
  }
}

}  // namespace

int64_t LsaTiles(const WindowLayout& layout) {
  return std::max<int64_t>(RouteTiles(layout.rows), 1);
}

cudaError_t LaunchLsaPrepare(const LsaOp& op, const LsaPrepareParams& p, int blocks,
                             cudaStream_t stream) {
  auto tiles = static_cast<int>(LsaTiles(op.layout));
  const size_t shared = static_cast<size_t>(kTile * p.top_k) * sizeof(int16_t) +
                        static_cast<size_t>(p.experts) * (kWords + 1) * sizeof(int32_t) +
                        static_cast<size_t>(3 * (p.experts / op.world)) * sizeof(int32_t);
  if (shared > 48 * 1024) {
    const cudaError_t raised = cudaFuncSetAttribute(
        PrepareKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (raised != cudaSuccess) return raised;
  }
  LsaOp op_copy = op;
  LsaPrepareParams p_copy = p;
  void* arguments[] = {&op_copy, &p_copy, &tiles};
  // A block for each tile, a warp for each pair of expert and source.
  const int64_t pairs = static_cast<int64_t>(p.experts) * op.world * kWarp / kThreads;
  const auto grid = static_cast<unsigned>(
      std::min<int64_t>(blocks, std::max<int64_t>({op.world * int64_t{tiles}, pairs, 1})));
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(&PrepareKernel), dim3(grid),
                                     dim3(kThreads), arguments, shared, stream);
}

}  // namespace expertd
