// What the driver, the CUDA runtime, NCCL and the environment say about one GPU of this host.
#ifndef KERNELS_CUDA_DEVICE_FACTS_H_
#define KERNELS_CUDA_DEVICE_FACTS_H_

#include "absl/status/statusor.h"
#include "kernels/device.h"

namespace expertd {

// Asks only; makes no context on the other GPUs that it names. REQUIRES: such a GPU exists.
absl::StatusOr<DeviceFacts> ReadDeviceFacts(int ordinal);

}  // namespace expertd

#endif  // KERNELS_CUDA_DEVICE_FACTS_H_
