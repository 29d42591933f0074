// The only kernel that includes NCCL's device API.
#include <nccl.h>
#include <nccl_device.h>

#include "kernels/ep/lsa_addresses.h"

namespace expertd {
namespace {

__global__ void AddressesKernel(ncclWindow_t window, int world, void** addresses) {
  const int rank = static_cast<int>(threadIdx.x);
  if (rank < world) addresses[rank] = ncclGetPeerPointer(window, 0, rank);
}

}  // namespace

cudaError_t LaunchWindowAddresses(ncclWindow_t window, int world, void** addresses,
                                  cudaStream_t stream) {
  AddressesKernel<<<1, 128, 0, stream>>>(window, world, addresses);
  return cudaGetLastError();
}

}  // namespace expertd
