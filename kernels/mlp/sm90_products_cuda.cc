// Sends a matrix product to the file that has its instances.
#include "kernels/mlp/sm90_products.h"

#include "kernels/mlp/sm90_gemm.h"

namespace expertd::sm90 {

cudaError_t LaunchGemm(const GemmLaunch& launch, const GemmParams& params) {
  if (!HasRows(params.table)) return cudaSuccess;
  switch (launch.product) {
    case Product::kInner:
      return StartInner(launch, params);
    case Product::kOuter:
      return StartOuter(launch, params);
    case Product::kGradInner:
      return StartGradInner(launch, params);
    case Product::kGradTokens:
      return StartGradTokens(launch, params);
    case Product::kGradWeights:
      return StartGradWeights(launch, params);
  }
  return cudaErrorInvalidValue;
}

}  // namespace expertd::sm90
