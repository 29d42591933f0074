// CublasLtMlp: lanes, operands and pads; forward and the gradients of its inputs.
#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "kernels/cuda/status.h"
#include "kernels/mlp/cublaslt_mlp.h"

namespace expertd {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kLanes = 3;
// f32 sums of a wave at most.
constexpr int64_t kWaveBytes = int64_t{2} << 30;

const float* At(const float* values, int64_t index) {
  return values == nullptr ? nullptr : values + index;
}

}  // namespace

WaveLimits CublasLtMlp::DefaultLimits(const MlpConfig& config) {
  return {.run_rows = 4096, .wave_rows = kWaveBytes / (2 * config.intermediate * kFloat)};
}

absl::StatusOr<std::unique_ptr<CublasLtMlp>> CublasLtMlp::Create(const MlpConfig& config,
                                                                 CudaDevice& device) {
  return Create(config, device, kLanes, DefaultLimits(config));
}

absl::StatusOr<std::unique_ptr<CublasLtMlp>> CublasLtMlp::Create(const MlpConfig& config,
                                                                 CudaDevice& device, int64_t lanes,
                                                                 const WaveLimits& limits) {
  std::unique_ptr<CublasLtMlp> made(new CublasLtMlp(config, device, limits));
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

std::vector<int64_t> CublasLtMlp::WarmRows(int64_t max_rows) const {
  // One of each class of row counts that share a plan, the largest being a full run.
  std::vector<int64_t> rows;
  for (int64_t next = 1; next <= std::min(max_rows, limits_.run_rows); next = rows.back() + 1) {
    rows.push_back(MatmulRowClass(next));
  }
  if (!rows.empty()) rows.back() = std::min(rows.back(), limits_.run_rows);
  return rows;
}

// Scratch grows before any lane forks: what it gives back to the pool is taken by users that follow
// the device's stream and not the lanes'.
absl::StatusOr<std::vector<RowRuns>> CublasLtMlp::Begin(const ExpertSegments& segments,
                                                        const ScratchWidths& widths) {
  RETURN_IF_ERROR(device_.MakeCurrent());
  std::vector<RowRuns> waves = CutWaves(segments, limits_);
  int64_t rows = 0;
  for (const RowRuns& wave : waves) rows = std::max(rows, RowsOf(wave));
  RETURN_IF_ERROR(sums_.Reserve(device_, rows * widths.sums));
  RETURN_IF_ERROR(out_.Reserve(device_, rows * widths.out));
  RETURN_IF_ERROR(u_.Reserve(device_, rows * widths.u));
  RETURN_IF_ERROR(left_.Reserve(device_, rows * widths.left));
  RETURN_IF_ERROR(right_.Reserve(device_, rows * widths.right));
  return waves;
}

absl::Status CublasLtMlp::ForRuns(const RowRuns& wave, const RunStep& step) {
  RETURN_IF_ERROR(Record(fork_, device_.stream()));
  for (Lane& lane : lanes_) RETURN_IF_ERROR(StreamWait(lane.stream.get(), fork_));
  absl::Status result = absl::OkStatus();
  int64_t turn = 0;
  for (int i = 0; i < wave.count && result.ok(); ++i) {
    if (i > 0 && wave.expert[i] != wave.expert[i - 1]) ++turn;
    result = step({.expert = wave.expert[i],
                   .begin = wave.begin[i],
                   .scratch = wave.scratch[i],
                   .rows = wave.rows[i],
                   .lane = turn % static_cast<int64_t>(lanes_.size())});
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

const void* CublasLtMlp::Weight(const void* matrix, int64_t expert) const {
  const int64_t size = config_.hidden * config_.intermediate * OperandBytes();
  return static_cast<const std::byte*>(matrix) + expert * (matrix == gate_up_ ? 2 : 1) * size;
}

absl::StatusOr<const void*> CublasLtMlp::Operand(const void* matrix, const Run& run, int64_t cols,
                                                 const Scratch& scratch) {
  const void* rows = RowsAt(matrix, run, cols);
  if (OperandDType() == config_.token_dtype) return rows;
  float* wide = scratch.as<float>() + run.scratch * cols;
  RETURN_IF_ERROR(
      CudaStatus(LaunchWiden(config_.token_dtype, rows, run.rows * cols, wide, StreamOf(run)),
                 "widening rows"));
  return static_cast<const void*>(wide);
}

absl::Status CublasLtMlp::MultiplyToTokens(MatmulArgs product, const Run& run, const float* bias,
                                           const float* factors, void* out) {
  product.m = run.rows;
  product.n = config_.hidden;
  product.operand_dtype = OperandDType();
  void* to = RowsAt(out, run, config_.hidden);
  if (bias == nullptr && OperandDType() == config_.token_dtype) {
    product.out = to;
    product.out_dtype = config_.token_dtype;
    return matmul_->Run(product, run.lane, StreamOf(run));
  }
  float* sums = out_.as<float>() + run.scratch * config_.hidden;
  product.out = sums;
  product.out_dtype = DType::kF32;
  RETURN_IF_ERROR(matmul_->Run(product, run.lane, StreamOf(run)));
  return CudaStatus(LaunchRoundRows({.rows = run.rows,
                                     .cols = config_.hidden,
                                     .token = config_.token_dtype,
                                     .sums = sums,
                                     .bias = At(bias, run.expert * config_.hidden),
                                     .factors = At(factors, run.begin),
                                     .out = to},
                                    StreamOf(run)),
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
  const bool direct = !config_.down_bias && OperandDType() == config_.token_dtype;
  ASSIGN_OR_RETURN(const std::vector<RowRuns> waves,
                   Begin(args.segments, {.sums = 2 * config_.intermediate * kFloat,
                                         .out = direct ? 0 : config_.hidden * kFloat,
                                         .u = config_.intermediate * OperandBytes(),
                                         .left = WidenedBytes(config_.hidden)}));
  RETURN_IF_ERROR(UseWeights(args.weights));
  for (const RowRuns& wave : waves) RETURN_IF_ERROR(ForwardWave(args, wave));
  return ZeroPads(args.segments, {{args.h, 2 * config_.intermediate * TokenBytes()},
                                  {args.z, config_.hidden * TokenBytes()}});
}

absl::Status CublasLtMlp::ForwardWave(const MlpForwardArgs& args, const RowRuns& wave) {
  const int64_t inner = config_.intermediate;
  const float* factors = config_.weighting == Weighting::kEarly ? args.recv_w : nullptr;
  RETURN_IF_ERROR(ForRuns(wave, [&](const Run& run) -> absl::Status {
    ASSIGN_OR_RETURN(const void* x, Operand(args.recv_x, run, config_.hidden, left_));
    return matmul_->Run({.m = run.rows,
                         .n = 2 * inner,
                         .k = config_.hidden,
                         .left = x,
                         .right = Weight(gate_up_, run.expert),
                         .operand_dtype = OperandDType(),
                         .out = SumsAt(run, 2 * inner),
                         .out_dtype = DType::kF32},
                        run.lane, StreamOf(run));
  }));
  ActivateParams activate;
  activate.activation = config_.activation;
  activate.inner = inner;
  activate.token = config_.token_dtype;
  activate.operand = OperandDType();
  activate.runs = wave;
  activate.sums = sums_.as<float>();
  activate.bias = config_.gate_up_bias ? args.weights.gate_up_bias : nullptr;
  activate.factors = factors;
  activate.h_out = args.h;
  activate.u = u_.data();
  RETURN_IF_ERROR(CudaStatus(LaunchActivate(activate, device_.stream()), "activation"));
  return ForRuns(wave, [&](const Run& run) {
    return MultiplyToTokens({.k = inner, .left = UAt(run), .right = Weight(down_, run.expert)}, run,
                            config_.down_bias ? args.weights.down_bias : nullptr, factors, args.z);
  });
}

absl::Status CublasLtMlp::Dgrad(const MlpDgradArgs& args) {
  ASSIGN_OR_RETURN(const std::vector<RowRuns> waves,
                   Begin(args.segments, {.sums = config_.intermediate * kFloat,
                                         .out = WidenedBytes(config_.hidden),
                                         .left = WidenedBytes(config_.hidden),
                                         .right = WidenedBytes(2 * config_.intermediate)}));
  RETURN_IF_ERROR(UseWeights(args.weights));
  for (const RowRuns& wave : waves) RETURN_IF_ERROR(DgradWave(args, wave));
  return ZeroPads(args.segments, {{args.grad_h, 2 * config_.intermediate * TokenBytes()},
                                  {args.grad_recv_x, config_.hidden * TokenBytes()},
                                  {args.grad_w, kFloat}});
}

absl::Status CublasLtMlp::DgradWave(const MlpDgradArgs& args, const RowRuns& wave) {
  const int64_t inner = config_.intermediate;
  RETURN_IF_ERROR(ForRuns(wave, [&](const Run& run) -> absl::Status {
    ASSIGN_OR_RETURN(const void* g, Operand(args.grad_out, run, config_.hidden, left_));
    return matmul_->Run({.m = run.rows,
                         .n = inner,
                         .k = config_.hidden,
                         .left = g,
                         .right = Weight(down_, run.expert),
                         .right_transposed = Transposed::kYes,
                         .operand_dtype = OperandDType(),
                         .out = SumsAt(run, inner),
                         .out_dtype = DType::kF32},
                        run.lane, StreamOf(run));
  }));
  ActivateGradParams grad;
  grad.activation = config_.activation;
  grad.inner = inner;
  grad.hidden = config_.hidden;
  grad.token = config_.token_dtype;
  grad.runs = wave;
  grad.h = args.h;
  grad.grad_u = sums_.as<float>();
  grad.factors = args.recv_w;
  grad.down_bias = config_.down_bias ? args.weights.down_bias : nullptr;
  grad.grad_out = args.grad_out;
  grad.grad_h = args.grad_h;
  grad.grad_w = args.grad_w;
  RETURN_IF_ERROR(CudaStatus(LaunchActivateGrad(grad, device_.stream()), "activation gradient"));
  return ForRuns(wave, [&](const Run& run) -> absl::Status {
    ASSIGN_OR_RETURN(const void* grad_h, Operand(args.grad_h, run, 2 * inner, right_));
    return MultiplyToTokens({.k = 2 * inner,
                             .left = grad_h,
                             .right = Weight(gate_up_, run.expert),
                             .right_transposed = Transposed::kYes},
                            run, nullptr, nullptr, args.grad_recv_x);
  });
}

}  // namespace expertd
