// Instances of the grouped matrix product that makes grad_h.
#include "kernels/mlp/sm90_kernel.cuh"
#include "kernels/mlp/sm90_products.h"

namespace expertd::sm90 {

cudaError_t StartGradInner(const GemmLaunch& launch, const GemmParams& params) {
  return StartProduct<Product::kGradInner>(launch, params);
}

}  // namespace expertd::sm90
