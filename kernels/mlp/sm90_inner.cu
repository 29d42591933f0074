// Instances of the grouped matrix product that makes h and u.
#include "kernels/mlp/sm90_kernel.cuh"
#include "kernels/mlp/sm90_products.h"

namespace expertd::sm90 {

cudaError_t StartInner(const GemmLaunch& launch, const GemmParams& params) {
  if (launch.kind == TileKind::kWide) {
    return StartKind<Product::kInner, TileKind::kWide>(launch, params);
  }
  if (launch.kind == TileKind::kNarrow) {
    return StartKind<Product::kInner, TileKind::kNarrow>(launch, params);
  }
  return cudaErrorInvalidValue;
}

}  // namespace expertd::sm90
