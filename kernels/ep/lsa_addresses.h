// Launcher that asks NCCL's device API where the ranks' windows are.
#ifndef KERNELS_EP_LSA_ADDRESSES_H_
#define KERNELS_EP_LSA_ADDRESSES_H_

#include <cuda_runtime_api.h>
#include <nccl.h>

namespace expertd {

// addresses [world]: device memory; each rank's window as this device sees it.
cudaError_t LaunchWindowAddresses(ncclWindow_t window, int world, void** addresses,
                                  cudaStream_t stream);

}  // namespace expertd

#endif  // KERNELS_EP_LSA_ADDRESSES_H_
