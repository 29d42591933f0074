// Instances of the grouped matrix product that makes grad_x.
#include "kernels/mlp/sm90_kernel.cuh"
#include "kernels/mlp/sm90_products.h"

namespace expertd::sm90 {

cudaError_t StartGradTokens(const GemmLaunch& launch, const GemmParams& params) {
  return StartProduct<Product::kGradTokens>(launch, params);
}

}  // namespace expertd::sm90
