// Operands, products and launches; see router_cuda.h.
#include "kernels/router/router_cuda.h"

#include <utility>

#include "absl/status/statusor.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/scratch.h"
#include "kernels/cuda/status.h"
#include "kernels/router/select_kernels.h"

namespace expertd {
namespace {

absl::Status CheckFloat(DType dtype) {
  if (dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16) {
    return absl::OkStatus();
  }
  return Error(Reason::kDtypeUnsupported)
      .Text("router tokens: got ", DTypeName(dtype), ", need DTYPE_F32, DTYPE_F16 or DTYPE_BF16");
}

class CudaRouter final : public RouterKernels {
 public:
  explicit CudaRouter(CudaDevice& device) : device_(device) {}

  absl::Status Logits(ConstMatrix x, const float* weight, int64_t experts, float* logits) override {
    ASSIGN_OR_RETURN(const float* tokens, Begin(x));
    return Multiply(
        {.m = x.rows, .n = experts, .k = x.cols, .left = tokens, .right = weight, .out = logits});
  }

  absl::Status LogitsBackward(ConstMatrix x, const float* weight, int64_t experts,
                              const float* grad_logits, float* grad_x,
                              float* grad_weight) override {
    ASSIGN_OR_RETURN(const float* tokens, Begin(x));
    RETURN_IF_ERROR(Multiply({.m = x.rows,
                              .n = x.cols,
                              .k = experts,
                              .left = grad_logits,
                              .right = weight,
                              .right_transposed = Transposed::kYes,
                              .out = grad_x,
                              .accumulate = true}));
    return Multiply({.m = x.cols,
                     .n = experts,
                     .k = x.rows,
                     .left = tokens,
                     .left_transposed = Transposed::kYes,
                     .right = grad_logits,
                     .out = grad_weight,
                     .accumulate = true});
  }

  absl::Status Select(const RouterConfig& config, const float* logits, const float* bias,
                      int64_t tokens, int64_t* ids, float* weights) override {
    RETURN_IF_ERROR(device_.MakeCurrent());
    return CudaStatus(LaunchSelect({.config = config,
                                    .tokens = tokens,
                                    .logits = logits,
                                    .bias = bias,
                                    .ids = ids,
                                    .weights = weights},
                                   device_.stream()),
                      "selecting experts");
  }

  absl::Status SelectBackward(const RouterConfig& config, const float* logits, const int64_t* ids,
                              const float* grad_weights, int64_t tokens,
                              float* grad_logits) override {
    RETURN_IF_ERROR(device_.MakeCurrent());
    SelectParams params;
    params.config = config;
    params.tokens = tokens;
    params.logits = logits;
    params.ids = const_cast<int64_t*>(ids);  // read only by this launch
    params.grad_weights = grad_weights;
    params.grad_logits = grad_logits;
    return CudaStatus(LaunchSelectBackward(params, device_.stream()), "gradient of the selection");
  }

  absl::Status AuxSums(const RouterConfig& config, const float* logits, const int64_t* ids,
                       int64_t tokens, float* routed, float* affinity) override {
    RETURN_IF_ERROR(device_.MakeCurrent());
    RETURN_IF_ERROR(partial_.Reserve(device_, AffinityScratchBytes(config.expert_count)));
    return CudaStatus(LaunchAffinity({.config = config,
                                      .tokens = tokens,
                                      .logits = logits,
                                      .ids = ids,
                                      .scratch = partial_.data(),
                                      .routed = routed,
                                      .affinity = affinity},
                                     device_.stream()),
                      "auxiliary loss");
  }

  absl::Status AuxBackward(const RouterConfig& config, const float* logits, const float* scale,
                           int64_t tokens, float* grad_logits) override {
    RETURN_IF_ERROR(device_.MakeCurrent());
    return CudaStatus(LaunchAffinityBackward({.config = config,
                                              .tokens = tokens,
                                              .logits = logits,
                                              .scale = scale,
                                              .grad_logits = grad_logits},
                                             device_.stream()),
                      "gradient of the auxiliary loss");
  }

  absl::Status AddTo(const float* extra, Matrix grad) override {
    RETURN_IF_ERROR(CheckFloat(grad.dtype));
    RETURN_IF_ERROR(device_.MakeCurrent());
    return CudaStatus(
        LaunchAddTo(grad.dtype, extra, grad.rows * grad.cols, grad.data, device_.stream()),
        "adding the router's gradient");
  }

 private:
  // The tokens as f32, on this thread's device.
  absl::StatusOr<const float*> Begin(const ConstMatrix& x) {
    RETURN_IF_ERROR(CheckFloat(x.dtype));
    RETURN_IF_ERROR(device_.MakeCurrent());
    if (x.dtype == DType::kF32) return static_cast<const float*>(x.data);
    const int64_t count = x.rows * x.cols;
    RETURN_IF_ERROR(tokens_.Reserve(device_, count * static_cast<int64_t>(sizeof(float))));
    RETURN_IF_ERROR(
        CudaStatus(LaunchTokensToF32(x.dtype, x.data, count, tokens_.as<float>(), device_.stream()),
                   "widening tokens"));
    return tokens_.as<float>();
  }

  absl::Status Multiply(MatmulArgs args) {
    if (matmul_ == nullptr) {
      ASSIGN_OR_RETURN(matmul_, CublasMatmul::Create(device_, 1));
    }
    args.operand_dtype = DType::kF32;
    args.out_dtype = DType::kF32;
    return matmul_->Run(args, 0, device_.stream());
  }

  CudaDevice& device_;
  std::unique_ptr<CublasMatmul> matmul_;
  Scratch tokens_;
  Scratch partial_;
};

}  // namespace

std::unique_ptr<RouterKernels> CreateCudaRouter(CudaDevice& device) {
  return std::make_unique<CudaRouter>(device);
}

}  // namespace expertd
