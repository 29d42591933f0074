// The `plain` expert MLP: fp32 loops in a fixed order, the bit-stable reference of the product.
//
// Every element is a sum in ascending order of the summed index (dot products: activation.h's Dot),
// whatever the block size or the instruction set.
#ifndef KERNELS_CPU_PLAIN_MLP_H_
#define KERNELS_CPU_PLAIN_MLP_H_

#include <memory>

#include "kernels/expert_mlp.h"

namespace expertd {

// REQUIRES: float dtypes in `config`.
std::unique_ptr<ExpertMlp> CreatePlainMlp(const MlpConfig& config);

}  // namespace expertd

#endif  // KERNELS_CPU_PLAIN_MLP_H_
