// Routing kernels: one block per tile of tokens, one warp per column of the scan.
#include "kernels/ep/route_kernels.h"

#include <algorithm>

namespace expertd {
namespace {

constexpr int kThreads = 256;
constexpr int kWords = kRouteTile / 32;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ int64_t ReadId(const RouteShape& shape, int64_t index) {
  return shape.wide_ids ? static_cast<const int64_t*>(shape.ids)[index]
                        : static_cast<const int32_t*>(shape.ids)[index];
}

// The second time that an expert stands in a token's routes, of which there are at least two.
__device__ int64_t SecondTime(const RouteShape& shape, int64_t first, int64_t id) {
  int seen = 0;
  for (int64_t k = 0; k < shape.top_k; ++k) {
    if (ReadId(shape, first + k) == id && ++seen == 2) return first + k;
  }
  return first;
}

// Sets the bits of this block's tile: rows [0, E) by expert, [E, E + R) by rank. Returns the first
// bad route that this thread found.
__device__ int32_t MarkTile(const RouteShape& shape, uint32_t* bits) {
  for (int i = threadIdx.x; i < shape.columns() * kWords; i += kThreads) bits[i] = 0;
  __syncthreads();
  const int64_t begin = blockIdx.x * kRouteTile;
  const int tokens = static_cast<int>(min(kRouteTile, shape.tokens - begin));
  const int top_k = static_cast<int>(shape.top_k);
  const int64_t local = shape.experts / shape.world;
  int32_t bad = kNoBadRoute;
  for (int i = threadIdx.x; i < tokens * top_k; i += kThreads) {
    const int token = i / top_k;
    const int64_t index = begin * top_k + i;
    const int64_t id = ReadId(shape, index);
    if (id == -1) continue;
    if (id < 0 || id >= shape.experts) {
      bad = min(bad, static_cast<int32_t>(2 * index));
      continue;
    }
    const uint32_t bit = 1u << (token % 32);
    const int word = token / 32;
    if (atomicOr(&bits[id * kWords + word], bit) & bit) {
      const int64_t second = SecondTime(shape, (begin + token) * top_k, id);
      bad = min(bad, static_cast<int32_t>(2 * second + 1));
    }
    atomicOr(&bits[(shape.experts + id / local) * kWords + word], bit);
  }
  __syncthreads();
  return bad;
}

// Set bits of a column before `token`.
__device__ int Before(const uint32_t* column, int token) {
  int sum = 0;
  for (int word = 0; word < token / 32; ++word) sum += __popc(column[word]);
  return sum + __popc(column[token / 32] & ((1u << (token % 32)) - 1));
}

__global__ void __launch_bounds__(kThreads)
    CountKernel(RouteShape shape, int32_t* counts, int32_t* bad) {
  extern __shared__ uint32_t bits[];
  __shared__ int32_t first_bad;
  if (threadIdx.x == 0) first_bad = kNoBadRoute;
  const int32_t mine = MarkTile(shape, bits);
  if (mine != kNoBadRoute) atomicMin(&first_bad, mine);
  __syncthreads();
  if (threadIdx.x == 0) bad[blockIdx.x] = first_bad;
  for (int column = threadIdx.x; column < shape.columns(); column += kThreads) {
    int sum = 0;
    for (int word = 0; word < kWords; ++word) sum += __popc(bits[column * kWords + word]);
    counts[static_cast<int64_t>(column) * gridDim.x + blockIdx.x] = sum;
  }
}

__device__ void ScanColumn(const ScanParams& params, int64_t column, int lane) {
  int32_t* counts = params.counts + column * params.tiles;
  int sum = 0;
  for (int64_t first = 0; first < params.tiles; first += kWarp) {
    const bool inside = first + lane < params.tiles;
    const int value = inside ? counts[first + lane] : 0;
    int upto = value;
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, upto, step);
      if (lane >= step) upto += other;
    }
    if (inside) counts[first + lane] = sum + upto - value;
    sum += __shfl_sync(kAllLanes, upto, kWarp - 1);
  }
  if (lane == 0) params.record[kRecordHeader + column] = sum;
}

__device__ void WriteHeader(const ScanParams& params, int lane) {
  int32_t bad = kNoBadRoute;
  for (int64_t tile = lane; tile < params.tiles; tile += kWarp) bad = min(bad, params.bad[tile]);
  bad = __reduce_min_sync(kAllLanes, bad);
  if (lane < kRecordHeader) {
    params.record[lane] = lane == kRecordBadRoute ? bad : params.header[lane];
  }
}

__global__ void __launch_bounds__(kThreads) ScanKernel(ScanParams params) {
  const int64_t column = (blockIdx.x * kThreads + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (column < params.columns) ScanColumn(params, column, lane);
  if (column == params.columns) WriteHeader(params, lane);
}

// Places route i of the tile, that of `token` (within the tile).
__device__ void AssignRoute(const AssignParams& p, const uint32_t* bits, int token, int64_t index,
                            int64_t tiles) {
  const RouteShape& shape = p.shape;
  const int64_t id = ReadId(shape, index);
  if (p.dropped != nullptr) p.dropped[index] = 0;
  if (id < 0) return;
  const int64_t owner = id / (shape.experts / shape.world);
  const int64_t owner_column = shape.experts + owner;
  const int position = p.counts[id * tiles + blockIdx.x] + Before(bits + id * kWords, token);
  const int row =
      p.counts[owner_column * tiles + blockIdx.x] + Before(bits + owner_column * kWords, token);
  const int64_t t = index / shape.top_k;
  const int64_t k = index % shape.top_k;
  const bool own = owner == p.rank;
  const int begin = own ? 0 : p.wire_begin[owner];
  if (begin >= 0) {
    p.tables.row_of[t * shape.world + owner] = row;
    (own ? p.tables.own_tokens : p.tables.wire_tokens + begin)[row] = static_cast<int32_t>(t);
  }
  if (position >= p.kept[id]) {
    p.dropped[index] = 1;
    return;
  }
  p.tables.route_owner[index] = static_cast<int32_t>(owner);
  int32_t* slots = own ? p.own_slots : p.tables.wire_slots + begin * shape.top_k;
  slots[row * shape.top_k + k] = p.first_slot[id] + position;
}

__global__ void __launch_bounds__(kThreads) AssignKernel(AssignParams p, int64_t tiles) {
  extern __shared__ uint32_t bits[];
  const RouteShape& shape = p.shape;
  const int64_t local = shape.experts / shape.world;
  for (int64_t j = blockIdx.x; j < local; j += gridDim.x) {
    const int begin = p.pad_sums[j];
    for (int i = threadIdx.x; i < p.pad_sums[j + 1] - begin; i += kThreads) {
      p.tables.pad_slots[begin + i] = p.pad_begin[j] + i;
    }
  }
  if (tiles == 0) return;
  MarkTile(shape, bits);
  const int64_t first = blockIdx.x * kRouteTile;
  const int tokens = static_cast<int>(min(kRouteTile, shape.tokens - first));
  const int top_k = static_cast<int>(shape.top_k);
  for (int i = threadIdx.x; i < tokens * top_k; i += kThreads) {
    AssignRoute(p, bits, i / top_k, first * top_k + i, tiles);
  }
}

// Bytes of a tile's bits; raises the kernel's limit where the default is too low.
template <typename Kernel>
cudaError_t SharedBytes(Kernel* kernel, const RouteShape& shape, size_t* bytes) {
  *bytes = static_cast<size_t>(shape.columns()) * kWords * sizeof(uint32_t);
  if (*bytes <= 48 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(*bytes));
}

}  // namespace

cudaError_t LaunchCount(const RouteShape& shape, int32_t* counts, int32_t* bad,
                        cudaStream_t stream) {
  const int64_t tiles = RouteTiles(shape.tokens);
  if (tiles == 0) return cudaSuccess;
  size_t shared = 0;
  const cudaError_t raised = SharedBytes(CountKernel, shape, &shared);
  if (raised != cudaSuccess) return raised;
  CountKernel<<<static_cast<unsigned>(tiles), kThreads, shared, stream>>>(shape, counts, bad);
  return cudaGetLastError();
}

cudaError_t LaunchScan(const ScanParams& params, cudaStream_t stream) {
  const int64_t warps = params.columns + 1;
  const int64_t blocks = (warps * kWarp + kThreads - 1) / kThreads;
  ScanKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchAssign(const AssignParams& params, cudaStream_t stream) {
  const int64_t tiles = RouteTiles(params.shape.tokens);
  size_t shared = 0;
  const cudaError_t raised = SharedBytes(AssignKernel, params.shape, &shared);
  if (raised != cudaSuccess) return raised;
  const auto blocks = static_cast<unsigned>(std::max<int64_t>(tiles, 1));
  AssignKernel<<<blocks, kThreads, shared, stream>>>(params, tiles);
  return cudaGetLastError();
}

}  // namespace expertd
