// The `sm90` expert MLP: five grouped matrix products with fused activations, for Hopper GPUs.
//
// One launch makes one product of all experts; nothing is packed or repacked, and the host never
// waits. Layers and calls that the products cannot serve (f32, mixed dtypes, sizes that are no
// multiple of 8, matrices at odd addresses) go to `cublaslt`.
#ifndef KERNELS_MLP_SM90_MLP_H_
#define KERNELS_MLP_SM90_MLP_H_

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/scratch.h"
#include "kernels/expert_mlp.h"
#include "kernels/mlp/cublaslt_mlp.h"
#include "kernels/mlp/sm90_gemm.h"
#include "kernels/mlp/sm90_plan.h"

namespace expertd {

// Choices that tests and measurements override.
struct Sm90Options {
  int sms = 0;                         // blocks at once; 0: as many as the GPU has multiprocessors
  std::optional<sm90::TileKind> kind;  // where the product has it
};

class Sm90Mlp final : public ExpertMlp {
 public:
  // REQUIRES: float dtypes in `config`; a GPU of compute capability 9.0.
  static absl::StatusOr<std::unique_ptr<Sm90Mlp>> Create(const MlpConfig& config,
                                                         CudaDevice& device,
                                                         const Sm90Options& options = {});

  std::string_view name() const override { return "sm90"; }
  absl::Status Forward(const MlpForwardArgs& args) override;
  absl::Status Dgrad(const MlpDgradArgs& args) override;
  absl::Status Wgrad(const MlpWgradArgs& args) override;
  std::vector<int64_t> WarmRows(int64_t max_rows) const override;

 private:
  Sm90Mlp(const MlpConfig& config, CudaDevice& device, const Sm90Options& options)
      : config_(config), device_(device), options_(options) {}

  sm90::Plan PlanOf(sm90::Product product, const ExpertSegments& segments) const;
  // Runs a product for every table of experts.
  absl::Status Run(sm90::Product product, const sm90::GemmParams& product_params,
                   const ExpertSegments& segments);
  // Of padding that the tiles of either product do not reach.
  absl::Status ZeroPads(const ExpertSegments& segments, sm90::Product inner, void* wide_inner,
                        sm90::Product outer, void* hidden);
  absl::Status RowDots(const MlpDgradArgs& args);
  absl::Status GradWeights(const ExpertSegments& segments, const void* left, int64_t left_columns,
                           const void* right, int64_t right_columns, float* gradient);
  absl::Status BiasGradients(const MlpWgradArgs& args);

  const MlpConfig config_;
  CudaDevice& device_;
  const Sm90Options options_;
  int sms_ = 0;
  bool served_ = false;  // the layer; else everything goes to fallback_
  std::unique_ptr<CublasLtMlp> fallback_;
  Scratch u_;         // [total, I] token dtype
  Scratch partials_;  // [column tiles of I, total] f32
};

}  // namespace expertd

#endif  // KERNELS_MLP_SM90_MLP_H_
