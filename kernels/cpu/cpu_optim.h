// OptimKernels on the CPU.
#ifndef KERNELS_CPU_CPU_OPTIM_H_
#define KERNELS_CPU_CPU_OPTIM_H_

#include <memory>

#include "kernels/optim/optim_kernels.h"

namespace expertd {

std::unique_ptr<OptimKernels> CreateCpuOptim();

}  // namespace expertd

#endif  // KERNELS_CPU_CPU_OPTIM_H_
