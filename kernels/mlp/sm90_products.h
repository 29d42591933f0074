// One function for each product of sm90_gemm.h, each compiled in a file of its own.
#ifndef KERNELS_MLP_SM90_PRODUCTS_H_
#define KERNELS_MLP_SM90_PRODUCTS_H_

#include "kernels/mlp/sm90_gemm.h"

namespace expertd::sm90 {

cudaError_t StartInner(const GemmLaunch& launch, const GemmParams& params);
cudaError_t StartOuter(const GemmLaunch& launch, const GemmParams& params);
cudaError_t StartGradInner(const GemmLaunch& launch, const GemmParams& params);
cudaError_t StartGradTokens(const GemmLaunch& launch, const GemmParams& params);
cudaError_t StartGradWeights(const GemmLaunch& launch, const GemmParams& params);

}  // namespace expertd::sm90

#endif  // KERNELS_MLP_SM90_PRODUCTS_H_
