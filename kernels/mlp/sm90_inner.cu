// Instances of the grouped matrix product that makes h and u.
#include "kernels/mlp/sm90_kernel.cuh"
#include "kernels/mlp/sm90_products.h"

namespace expertd::sm90 {

cudaError_t StartInner(const GemmLaunch& launch, const GemmParams& params) {
  return StartProduct<Product::kInner>(launch, params);
}

}  // namespace expertd::sm90
