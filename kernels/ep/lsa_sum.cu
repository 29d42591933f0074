// Sum of small arrays over windows: every rank sends its slices to all, and adds in rank order.
#include "kernels/ep/lsa_device.cuh"

namespace expertd {
namespace {

constexpr int kThreads = 256;
constexpr int kSliceFloats = static_cast<int>(WindowLayout::kSumSliceBytes) / 4;

// A slice of `source` in the window of `owner`.
struct Slice {
  int64_t index;
  int owner;

  __device__ Slice(int owner, int source, int slice)
      : index(WindowPart(owner, source) * WindowLayout::kSumSlices + slice), owner(owner) {}
  __device__ uint64_t* Flag(const LsaOp& op) const {
    return InWindow<uint64_t>(op, owner, op.layout.sum_flags) + index;
  }
  __device__ float* Data(const LsaOp& op) const {
    return InWindow<float>(op, owner, op.layout.sum_slices) + index * kSliceFloats;
  }
};

__global__ void __launch_bounds__(kThreads)
    SumKernel(__grid_constant__ const LsaOp op, float* data, int count) {
  __shared__ int go_on;
  if (blockIdx.x == 0) Arrive(op);
  const int slice = static_cast<int>(blockIdx.x);
  float* own = data + static_cast<int64_t>(slice) * kSliceFloats;
  const int floats = min(kSliceFloats, count - slice * kSliceFloats);
  for (int step = 1; step < op.world; ++step) {
    const int target = (op.rank + step) % op.world;
    __syncthreads();
    if (threadIdx.x == 0) go_on = static_cast<int>(WaitGate(op, target));
    __syncthreads();
    if (go_on == 0) return;
    float* to = Slice(target, op.rank, slice).Data(op);
    for (int i = threadIdx.x; i < floats; i += kThreads) to[i] = own[i];
    __syncthreads();
    if (threadIdx.x == 0) StoreRelease(Slice(target, op.rank, slice).Flag(op), op.tag);
  }
  for (int step = 1; step < op.world; ++step) {
    const int source = (op.rank + step) % op.world;
    const uint64_t* flag = Slice(op.rank, source, slice).Flag(op);
    __syncthreads();
    if (threadIdx.x == 0) {
      go_on = static_cast<int>(WaitFlag(op, source, flag));
    }
    __syncthreads();
    if (go_on == 0) return;
  }
  for (int i = threadIdx.x; i < floats; i += kThreads) {
    float sum = 0.0f;
    for (int rank = 0; rank < op.world; ++rank) {
      const float part =
          rank == op.rank ? own[i] : __ldcg(Slice(op.rank, rank, slice).Data(op) + i);
      sum = rank == 0 ? part : __fadd_rn(sum, part);
    }
    own[i] = sum;
  }
}

}  // namespace

cudaError_t LaunchLsaSum(const LsaOp& op, float* data, int64_t count, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((count + kSliceFloats - 1) / kSliceFloats);
  SumKernel<<<blocks, kThreads, 0, stream>>>(op, data, static_cast<int>(count));
  return cudaGetLastError();
}

}  // namespace expertd
