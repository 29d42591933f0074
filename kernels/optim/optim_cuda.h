// OptimKernels on a GPU: the same bits as on the CPU, but for the order of Inspect's sum.
#ifndef KERNELS_OPTIM_OPTIM_CUDA_H_
#define KERNELS_OPTIM_OPTIM_CUDA_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/optim/optim_kernels.h"

namespace expertd {

// `device` must outlive what is made. Kernels are queued on its stream; Inspect waits.
std::unique_ptr<OptimKernels> CreateCudaOptim(CudaDevice& device);

}  // namespace expertd

#endif  // KERNELS_OPTIM_OPTIM_CUDA_H_
