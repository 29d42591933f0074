// CublasLtMlp's gradients of weights and biases.
#include "base/status_macros.h"
#include "kernels/cuda/status.h"
#include "kernels/mlp/cublaslt_mlp.h"

namespace expertd {

absl::Status CublasLtMlp::Wgrad(const MlpWgradArgs& args) {
  RETURN_IF_ERROR(device_.MakeCurrent());
  RETURN_IF_ERROR(ReserveScratch(args.segments, {.u = config_.intermediate * OperandBytes(),
                                                 .left = WidenedBytes(config_.hidden),
                                                 .right = WidenedBytes(2 * config_.intermediate)}));
  return ForBlocks(args.segments, [&](const Block& block) { return WgradBlock(args, block); });
}

absl::Status CublasLtMlp::WgradBlock(const MlpWgradArgs& args, const Block& block) {
  const int64_t hidden = config_.hidden;
  const int64_t inner = config_.intermediate;
  Lane& lane = LaneOf(block);
  MatmulArgs product;
  product.k = block.rows;
  product.left_transposed = Transposed::kYes;
  product.operand_dtype = OperandDType();
  product.out_dtype = DType::kF32;
  product.accumulate = true;

  ASSIGN_OR_RETURN(product.left, Operand(args.recv_x, block, hidden, lane.left));
  ASSIGN_OR_RETURN(product.right, Operand(args.grad_h, block, 2 * inner, lane.right));
  product.m = hidden;
  product.n = 2 * inner;
  product.out = args.gradients.gate_up + block.expert * hidden * 2 * inner;
  RETURN_IF_ERROR(matmul_->Run(product, block.lane, lane.stream.get()));

  ActivateParams activate;
  activate.activation = config_.activation;
  activate.rows = block.rows;
  activate.inner = inner;
  activate.token = config_.token_dtype;
  activate.operand = OperandDType();
  activate.h_in = RowsAt(args.h, block, 2 * inner);
  activate.factors = args.recv_w == nullptr ? nullptr : args.recv_w + block.begin;
  activate.u = lane.u.data();
  RETURN_IF_ERROR(CudaStatus(LaunchActivate(activate, lane.stream.get()), "activation"));
  product.left = lane.u.data();
  ASSIGN_OR_RETURN(product.right, Operand(args.grad_out, block, hidden, lane.left));
  product.m = inner;
  product.n = hidden;
  product.out = args.gradients.down + block.expert * inner * hidden;
  RETURN_IF_ERROR(matmul_->Run(product, block.lane, lane.stream.get()));
  return BiasGradients(args, block);
}

absl::Status CublasLtMlp::BiasGradients(const MlpWgradArgs& args, const Block& block) {
  const int64_t hidden = config_.hidden;
  const int64_t inner = config_.intermediate;
  cudaStream_t stream = LaneOf(block).stream.get();
  if (config_.gate_up_bias) {
    RETURN_IF_ERROR(CudaStatus(
        LaunchColumnSums({.rows = block.rows,
                          .cols = 2 * inner,
                          .token = config_.token_dtype,
                          .matrix = RowsAt(args.grad_h, block, 2 * inner),
                          .sums = args.gradients.gate_up_bias + block.expert * 2 * inner},
                         stream),
        "bias gradient"));
  }
  if (!config_.down_bias) return absl::OkStatus();
  return CudaStatus(
      LaunchColumnSums({.rows = block.rows,
                        .cols = hidden,
                        .token = config_.token_dtype,
                        .matrix = RowsAt(args.grad_out, block, hidden),
                        .factors = args.recv_w == nullptr ? nullptr : args.recv_w + block.begin,
                        .sums = args.gradients.down_bias + block.expert * hidden},
                       stream),
      "bias gradient");
}

}  // namespace expertd
