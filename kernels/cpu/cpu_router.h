// RouterKernels on the CPU: products in f32, probabilities and selection in f64.
#ifndef KERNELS_CPU_CPU_ROUTER_H_
#define KERNELS_CPU_CPU_ROUTER_H_

#include <memory>

#include "kernels/router/router_kernels.h"

namespace expertd {

std::unique_ptr<RouterKernels> CreateCpuRouter();

}  // namespace expertd

#endif  // KERNELS_CPU_CPU_ROUTER_H_
