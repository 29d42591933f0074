// RouterKernels on a GPU: products by cuBLASLt in f32, selection and auxiliary loss by our kernels.
#ifndef KERNELS_ROUTER_ROUTER_CUDA_H_
#define KERNELS_ROUTER_ROUTER_CUDA_H_

#include <memory>

#include "kernels/cuda/cuda_device.h"
#include "kernels/router/router_kernels.h"

namespace expertd {

// `device` must outlive what is made. Everything is queued on its stream.
std::unique_ptr<RouterKernels> CreateCudaRouter(CudaDevice& device);

}  // namespace expertd

#endif  // KERNELS_ROUTER_ROUTER_CUDA_H_
