// Instances of the grouped matrix product that makes z.
#include "kernels/mlp/sm90_kernel.cuh"
#include "kernels/mlp/sm90_products.h"

namespace expertd::sm90 {

cudaError_t StartOuter(const GemmLaunch& launch, const GemmParams& params) {
  return StartProduct<Product::kOuter>(launch, params);
}

}  // namespace expertd::sm90
