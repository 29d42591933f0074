// Instances of the grouped matrix product that makes grad_x.
#include "kernels/mlp/sm90_kernel.cuh"
#include "kernels/mlp/sm90_products.h"

namespace expertd::sm90 {

cudaError_t StartGradTokens(const GemmLaunch& launch, const GemmParams& params) {
  if (launch.kind == TileKind::kWide) {
    return StartKind<Product::kGradTokens, TileKind::kWide>(launch, params);
  }
  return cudaErrorInvalidValue;
}

}  // namespace expertd::sm90
