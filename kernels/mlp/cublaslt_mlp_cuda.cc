// CublasLtMlp: lanes, operands and pads; forward and the gradients of its inputs.
#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "kernels/cuda/status.h"
#include "kernels/mlp/cublaslt_mlp.h"

namespace expertd {
namespace {

constexpr int64_t kFloat = sizeof(float);

const float* At(const float* values, int64_t index) {
  return values == nullptr ? nullptr : values + index;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CublasLtMlp>> CublasLtMlp::Create(const MlpConfig& config,
                                                                 CudaDevice& device,
                                                                 int64_t lanes) {
  std::unique_ptr<CublasLtMlp> made(new CublasLtMlp(config, device));
  RETURN_IF_ERROR(made->Open(lanes));
  return made;
}

absl::Status CublasLtMlp::Open(int64_t lanes) {
  RETURN_IF_ERROR(device_.MakeCurrent());
  ASSIGN_OR_RETURN(matmul_, CublasMatmul::Create(device_, lanes));
  ASSIGN_OR_RETURN(fork_, CreateEvent());
  lanes_.resize(static_cast<size_t>(lanes));
  for (Lane& lane : lanes_) {
    ASSIGN_OR_RETURN(lane.stream, CreateStream());
    ASSIGN_OR_RETURN(lane.done, CreateEvent());
  }
  return absl::OkStatus();
}

absl::Status CublasLtMlp::ReserveScratch(const ExpertSegments& segments,
                                         const ScratchWidths& widths) {
  int64_t rows = 0;
  for (int64_t count : *segments.counts) rows = std::max(rows, std::min(count, kBlockRows));
  for (Lane& lane : lanes_) {
    RETURN_IF_ERROR(lane.sums.Reserve(device_, rows * widths.sums));
    RETURN_IF_ERROR(lane.out.Reserve(device_, rows * widths.out));
    RETURN_IF_ERROR(lane.u.Reserve(device_, rows * widths.u));
    RETURN_IF_ERROR(lane.left.Reserve(device_, rows * widths.left));
    RETURN_IF_ERROR(lane.right.Reserve(device_, rows * widths.right));
  }
  return absl::OkStatus();
}

absl::Status CublasLtMlp::ForBlocks(const ExpertSegments& segments, const BlockStep& step) {
  RETURN_IF_ERROR(Record(fork_, device_.stream()));
  for (Lane& lane : lanes_) RETURN_IF_ERROR(StreamWait(lane.stream.get(), fork_));
  absl::Status result = absl::OkStatus();
  int64_t base = 0;
  int64_t turn = 0;
  for (size_t j = 0; j < segments.counts->size() && result.ok(); ++j) {
    const int64_t count = (*segments.counts)[j];
    const int64_t lane = turn % static_cast<int64_t>(lanes_.size());
    if (count > 0) ++turn;
    // All blocks of an expert on one lane: its gradients are added in order.
    for (int64_t done = 0; done < count && result.ok(); done += kBlockRows) {
      result = step({.expert = static_cast<int64_t>(j),
                     .begin = base + done,
                     .rows = std::min(kBlockRows, count - done),
                     .lane = lane});
    }
    base += (*segments.padded)[j];
  }
  // Also after a failure: what lanes still do must not overtake later work.
  for (Lane& lane : lanes_) {
    RETURN_IF_ERROR(Record(lane.done, lane.stream.get()));
    RETURN_IF_ERROR(StreamWait(device_.stream(), lane.done));
  }
  return result;
}

absl::Status CublasLtMlp::UseWeights(const MlpWeights& weights) {
  gate_up_ = weights.gate_up;
  down_ = weights.down;
  if (OperandDType() == config_.weight_dtype) return absl::OkStatus();
  const int64_t count = config_.local_experts * config_.hidden * config_.intermediate;
  RETURN_IF_ERROR(wide_gate_up_.Reserve(device_, 2 * count * kFloat));
  RETURN_IF_ERROR(wide_down_.Reserve(device_, count * kFloat));
  if (wide_source_ != weights.gate_up || wide_version_ != weights.version) {
    RETURN_IF_ERROR(CudaStatus(LaunchWiden(config_.weight_dtype, weights.gate_up, 2 * count,
                                           wide_gate_up_.as<float>(), device_.stream()),
                               "widening weights"));
    RETURN_IF_ERROR(CudaStatus(LaunchWiden(config_.weight_dtype, weights.down, count,
                                           wide_down_.as<float>(), device_.stream()),
                               "widening weights"));
    wide_source_ = weights.gate_up;
    wide_version_ = weights.version;
  }
  gate_up_ = wide_gate_up_.data();
  down_ = wide_down_.data();
  return absl::OkStatus();
}

const void* CublasLtMlp::Weight(const void* matrix, int64_t expert, int64_t rows,
                                int64_t cols) const {
  return static_cast<const std::byte*>(matrix) + expert * rows * cols * OperandBytes();
}

absl::StatusOr<const void*> CublasLtMlp::Operand(const void* matrix, const Block& block,
                                                 int64_t cols, Scratch& scratch) {
  const void* rows = RowsAt(matrix, block, cols);
  if (OperandDType() == config_.token_dtype) return rows;
  RETURN_IF_ERROR(CudaStatus(LaunchWiden(config_.token_dtype, rows, block.rows * cols,
                                         scratch.as<float>(), LaneOf(block).stream.get()),
                             "widening rows"));
  return scratch.data();
}

absl::Status CublasLtMlp::MultiplyToTokens(MatmulArgs product, const Block& block,
                                           const float* bias, const float* factors, void* out) {
  Lane& lane = LaneOf(block);
  product.operand_dtype = OperandDType();
  if (bias == nullptr && OperandDType() == config_.token_dtype) {
    product.out = out;
    product.out_dtype = config_.token_dtype;
    return matmul_->Run(product, block.lane, lane.stream.get());
  }
  product.out = lane.out.data();
  product.out_dtype = DType::kF32;
  RETURN_IF_ERROR(matmul_->Run(product, block.lane, lane.stream.get()));
  return CudaStatus(LaunchRoundRows({.rows = block.rows,
                                     .cols = product.n,
                                     .token = config_.token_dtype,
                                     .sums = lane.out.as<float>(),
                                     .bias = bias,
                                     .factors = factors,
                                     .out = out},
                                    lane.stream.get()),
                    "rounding rows");
}

absl::Status CublasLtMlp::ZeroPads(const ExpertSegments& segments,
                                   const std::vector<PadTarget>& targets) {
  ZeroPadsParams params;
  size_t used = 0;
  for (const PadTarget& target : targets) {
    if (target.matrix == nullptr) continue;
    params.matrix[used] = target.matrix;
    params.row_bytes[used++] = target.row_bytes;
  }
  const auto flush = [&] {
    const cudaError_t result = LaunchZeroPads(params, device_.stream());
    params.ranges.count = 0;
    return CudaStatus(result, "zeroing padding");
  };
  int64_t base = 0;
  for (size_t j = 0; j < segments.counts->size(); ++j) {
    const int64_t begin = base + (*segments.counts)[j];
    base += (*segments.padded)[j];
    if (begin == base) continue;
    params.ranges.begin[params.ranges.count] = begin;
    params.ranges.rows[params.ranges.count++] = base - begin;
    if (params.ranges.count == kMostRanges) RETURN_IF_ERROR(flush());
  }
  return flush();
}

absl::Status CublasLtMlp::Forward(const MlpForwardArgs& args) {
  RETURN_IF_ERROR(device_.MakeCurrent());
  RETURN_IF_ERROR(UseWeights(args.weights));
  const bool direct = !config_.down_bias && OperandDType() == config_.token_dtype;
  RETURN_IF_ERROR(ReserveScratch(args.segments,
                                 {.sums = 2 * config_.intermediate * kFloat,
                                  .out = direct ? 0 : config_.hidden * kFloat,
                                  .u = config_.intermediate * OperandBytes(),
                                  .left = WidenedBytes(config_.hidden)}));
  RETURN_IF_ERROR(
      ForBlocks(args.segments, [&](const Block& block) { return ForwardBlock(args, block); }));
  return ZeroPads(args.segments, {{args.h, 2 * config_.intermediate * TokenBytes()},
                                  {args.z, config_.hidden * TokenBytes()}});
}

absl::Status CublasLtMlp::ForwardBlock(const MlpForwardArgs& args, const Block& block) {
  const int64_t hidden = config_.hidden;
  const int64_t inner = config_.intermediate;
  Lane& lane = LaneOf(block);
  const float* factors =
      config_.weighting == Weighting::kEarly ? At(args.recv_w, block.begin) : nullptr;
  ASSIGN_OR_RETURN(const void* x, Operand(args.recv_x, block, hidden, lane.left));
  RETURN_IF_ERROR(matmul_->Run({.m = block.rows,
                                .n = 2 * inner,
                                .k = hidden,
                                .left = x,
                                .right = Weight(gate_up_, block.expert, hidden, 2 * inner),
                                .operand_dtype = OperandDType(),
                                .out = lane.sums.data(),
                                .out_dtype = DType::kF32},
                               block.lane, lane.stream.get()));
  ActivateParams activate;
  activate.activation = config_.activation;
  activate.rows = block.rows;
  activate.inner = inner;
  activate.token = config_.token_dtype;
  activate.operand = OperandDType();
  activate.sums = lane.sums.as<float>();
  activate.bias =
      config_.gate_up_bias ? At(args.weights.gate_up_bias, block.expert * 2 * inner) : nullptr;
  activate.factors = factors;
  activate.h_out = args.h == nullptr ? nullptr : RowsAt(args.h, block, 2 * inner);
  activate.u = lane.u.data();
  RETURN_IF_ERROR(CudaStatus(LaunchActivate(activate, lane.stream.get()), "activation"));
  return MultiplyToTokens(
      {.m = block.rows,
       .n = hidden,
       .k = inner,
       .left = lane.u.data(),
       .right = Weight(down_, block.expert, inner, hidden)},
      block, config_.down_bias ? At(args.weights.down_bias, block.expert * hidden) : nullptr,
      factors, RowsAt(args.z, block, hidden));
}

absl::Status CublasLtMlp::Dgrad(const MlpDgradArgs& args) {
  RETURN_IF_ERROR(device_.MakeCurrent());
  RETURN_IF_ERROR(UseWeights(args.weights));
  RETURN_IF_ERROR(ReserveScratch(args.segments, {.sums = config_.intermediate * kFloat,
                                                 .out = WidenedBytes(config_.hidden),
                                                 .left = WidenedBytes(config_.hidden),
                                                 .right = WidenedBytes(2 * config_.intermediate)}));
  RETURN_IF_ERROR(
      ForBlocks(args.segments, [&](const Block& block) { return DgradBlock(args, block); }));
  return ZeroPads(args.segments, {{args.grad_h, 2 * config_.intermediate * TokenBytes()},
                                  {args.grad_recv_x, config_.hidden * TokenBytes()},
                                  {args.grad_w, kFloat}});
}

absl::Status CublasLtMlp::DgradBlock(const MlpDgradArgs& args, const Block& block) {
  const int64_t hidden = config_.hidden;
  const int64_t inner = config_.intermediate;
  Lane& lane = LaneOf(block);
  ASSIGN_OR_RETURN(const void* g, Operand(args.grad_out, block, hidden, lane.left));
  RETURN_IF_ERROR(matmul_->Run({.m = block.rows,
                                .n = inner,
                                .k = hidden,
                                .left = g,
                                .right = Weight(down_, block.expert, inner, hidden),
                                .right_transposed = Transposed::kYes,
                                .operand_dtype = OperandDType(),
                                .out = lane.sums.data(),
                                .out_dtype = DType::kF32},
                               block.lane, lane.stream.get()));
  ActivateGradParams grad;
  grad.activation = config_.activation;
  grad.rows = block.rows;
  grad.inner = inner;
  grad.hidden = hidden;
  grad.token = config_.token_dtype;
  grad.h = RowsAt(args.h, block, 2 * inner);
  grad.grad_u = lane.sums.as<float>();
  grad.factors = At(args.recv_w, block.begin);
  grad.down_bias =
      config_.down_bias ? At(args.weights.down_bias, block.expert * hidden) : nullptr;
  grad.grad_out = RowsAt(args.grad_out, block, hidden);
  grad.grad_h = RowsAt(args.grad_h, block, 2 * inner);
  grad.grad_w = args.grad_w == nullptr ? nullptr : args.grad_w + block.begin;
  RETURN_IF_ERROR(CudaStatus(LaunchActivateGrad(grad, lane.stream.get()), "activation gradient"));
  ASSIGN_OR_RETURN(const void* grad_h, Operand(args.grad_h, block, 2 * inner, lane.right));
  return MultiplyToTokens({.m = block.rows,
                           .n = hidden,
                           .k = 2 * inner,
                           .left = grad_h,
                           .right = Weight(gate_up_, block.expert, hidden, 2 * inner),
                           .right_transposed = Transposed::kYes},
                          block, nullptr, nullptr, RowsAt(args.grad_recv_x, block, hidden));
}

}  // namespace expertd
