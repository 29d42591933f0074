// CublasLtMlp's gradients of weights and biases.
#include "base/status_macros.h"
#include "kernels/cuda/status.h"
#include "kernels/mlp/cublaslt_mlp.h"

namespace expertd {

absl::Status CublasLtMlp::Wgrad(const MlpWgradArgs& args) {
  ASSIGN_OR_RETURN(const std::vector<RowRuns> waves,
                   Begin(args.segments, {.u = config_.intermediate * OperandBytes(),
                                         .left = WidenedBytes(config_.hidden),
                                         .right = WidenedBytes(2 * config_.intermediate)}));
  for (const RowRuns& wave : waves) RETURN_IF_ERROR(WgradWave(args, wave));
  return absl::OkStatus();
}

absl::Status CublasLtMlp::WgradWave(const MlpWgradArgs& args, const RowRuns& wave) {
  ActivateParams activate;
  activate.activation = config_.activation;
  activate.inner = config_.intermediate;
  activate.token = config_.token_dtype;
  activate.operand = OperandDType();
  activate.runs = wave;
  activate.h_in = args.h;
  activate.factors = args.recv_w;
  activate.u = u_.data();
  RETURN_IF_ERROR(CudaStatus(LaunchActivate(activate, device_.stream()), "activation"));
  return ForRuns(wave, [&](const Run& run) { return WgradRun(args, run); });
}

absl::Status CublasLtMlp::WgradRun(const MlpWgradArgs& args, const Run& run) {
  const int64_t hidden = config_.hidden;
  const int64_t inner = config_.intermediate;
  MatmulArgs product;
  product.k = run.rows;
  product.left_transposed = Transposed::kYes;
  product.operand_dtype = OperandDType();
  product.out_dtype = DType::kF32;
  product.accumulate = true;

  ASSIGN_OR_RETURN(product.left, Operand(args.recv_x, run, hidden, left_));
  ASSIGN_OR_RETURN(product.right, Operand(args.grad_h, run, 2 * inner, right_));
  product.m = hidden;
  product.n = 2 * inner;
  product.out = args.gradients.gate_up + run.expert * hidden * 2 * inner;
  RETURN_IF_ERROR(matmul_->Run(product, run.lane, StreamOf(run)));

  product.left = UAt(run);
  ASSIGN_OR_RETURN(product.right, Operand(args.grad_out, run, hidden, left_));
  product.m = inner;
  product.n = hidden;
  product.out = args.gradients.down + run.expert * inner * hidden;
  RETURN_IF_ERROR(matmul_->Run(product, run.lane, StreamOf(run)));
  return BiasGradients(args, run);
}

absl::Status CublasLtMlp::BiasGradients(const MlpWgradArgs& args, const Run& run) {
  const int64_t hidden = config_.hidden;
  const int64_t inner = config_.intermediate;
  if (config_.gate_up_bias) {
    RETURN_IF_ERROR(
        CudaStatus(LaunchColumnSums({.rows = run.rows,
                                     .cols = 2 * inner,
                                     .token = config_.token_dtype,
                                     .matrix = RowsAt(args.grad_h, run, 2 * inner),
                                     .sums = args.gradients.gate_up_bias + run.expert * 2 * inner},
                                    StreamOf(run)),
                   "bias gradient"));
  }
  if (!config_.down_bias) return absl::OkStatus();
  return CudaStatus(
      LaunchColumnSums({.rows = run.rows,
                        .cols = hidden,
                        .token = config_.token_dtype,
                        .matrix = RowsAt(args.grad_out, run, hidden),
                        .factors = args.recv_w == nullptr ? nullptr : args.recv_w + run.begin,
                        .sums = args.gradients.down_bias + run.expert * hidden},
                       StreamOf(run)),
      "bias gradient");
}

}  // namespace expertd
