// Instances of the grouped matrix product that makes weight gradients.
#include "kernels/mlp/sm90_kernel.cuh"
#include "kernels/mlp/sm90_products.h"

namespace expertd::sm90 {

cudaError_t StartGradWeights(const GemmLaunch& launch, const GemmParams& params) {
  return StartProduct<Product::kGradWeights>(launch, params);
}

}  // namespace expertd::sm90
