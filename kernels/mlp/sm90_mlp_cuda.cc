// Sm90Mlp: forward and the gradients of its inputs.
#include "kernels/mlp/sm90_mlp.h"

#include <algorithm>

#include "base/status_macros.h"
#include "kernels/cuda/status.h"
#include "kernels/mlp/sm90_maps.h"

namespace expertd {

using sm90::GemmParams;
using sm90::Plan;
using sm90::Product;

absl::StatusOr<std::unique_ptr<Sm90Mlp>> Sm90Mlp::Create(const MlpConfig& config,
                                                         CudaDevice& device,
                                                         const Sm90Options& options) {
  std::unique_ptr<Sm90Mlp> made(new Sm90Mlp(config, device, options));
  RETURN_IF_ERROR(device.MakeCurrent());
  made->served_ = sm90::Refusal(config).empty();
  ASSIGN_OR_RETURN(made->fallback_, CublasLtMlp::Create(config, device));
  made->sms_ = options.sms;
  if (made->sms_ == 0) {
    RETURN_IF_ERROR(CudaStatus(cudaDeviceGetAttribute(&made->sms_, cudaDevAttrMultiProcessorCount,
                                                      static_cast<int>(device.facts().ordinal)),
                               "reading the number of multiprocessors"));
  }
  return made;
}

Plan Sm90Mlp::PlanOf(Product product, const ExpertSegments& segments) const {
  const Plan plan = sm90::PlanFor(product, segments);
  if (!options_.kind.has_value() || !sm90::HasKind(product, *options_.kind)) return plan;
  return {.kind = *options_.kind, .cluster = *options_.kind == sm90::TileKind::kNarrow ? 1 : 2};
}

absl::Status Sm90Mlp::Run(Product product, const GemmParams& product_params,
                          const ExpertSegments& segments) {
  GemmParams params = product_params;
  const Plan plan = PlanOf(product, segments);
  params.grid.tile_rows = sm90::RowsOf(plan.kind);
  params.grid.cluster = plan.cluster;
  if (product == Product::kGradWeights) {
    params.grid.fixed_rows = sm90::CeilDiv(params.sums, params.grid.tile_rows);
  }
  params.activation = config_.activation;
  for (const sm90::ExpertTable& table : sm90::MakeTables(segments)) {
    params.table = table;
    RETURN_IF_ERROR(CudaStatus(sm90::LaunchGemm({.product = product,
                                                 .kind = plan.kind,
                                                 .token = config_.token_dtype,
                                                 .sms = sms_,
                                                 .stream = device_.stream()},
                                                params),
                               "grouped matrix product"));
  }
  return absl::OkStatus();
}

absl::Status Sm90Mlp::ZeroPads(const ExpertSegments& segments, Product inner, void* wide_inner,
                               Product outer, void* hidden) {
  const int tile_rows = std::min(sm90::RowsOf(PlanOf(inner, segments).kind),
                                 sm90::RowsOf(PlanOf(outer, segments).kind));
  const auto bytes = static_cast<int64_t>(DTypeSize(config_.token_dtype));
  ZeroPadsParams params;
  params.matrix[0] = hidden;
  params.row_bytes[0] = config_.hidden * bytes;
  if (wide_inner != nullptr) {
    params.matrix[1] = wide_inner;
    params.row_bytes[1] = 2 * config_.intermediate * bytes;
  }
  const auto flush = [&] {
    const cudaError_t result = LaunchZeroPads(params, device_.stream());
    params.ranges.count = 0;
    return CudaStatus(result, "zeroing padding");
  };
  for (const sm90::RowRange& pad : sm90::PadsOutsideTiles(segments, tile_rows)) {
    params.ranges.begin[params.ranges.count] = pad.begin;
    params.ranges.rows[params.ranges.count++] = pad.rows;
    if (params.ranges.count == kMostRanges) RETURN_IF_ERROR(flush());
  }
  return flush();
}

std::vector<int64_t> Sm90Mlp::WarmRows(int64_t max_rows) const {
  if (!served_) return fallback_->WarmRows(max_rows);
  std::vector<int64_t> rows;  // one of each kind of tile
  for (const sm90::TileKind kind : {sm90::TileKind::kNarrow, sm90::TileKind::kWide}) {
    if (sm90::RowsOf(kind) <= max_rows) rows.push_back(sm90::RowsOf(kind));
  }
  if (rows.empty() && max_rows > 0) rows.push_back(max_rows);
  return rows;
}

absl::Status Sm90Mlp::Forward(const MlpForwardArgs& args) {
  const MlpWeights& weights = args.weights;
  if (!served_ ||
      !sm90::CanServe(args.segments, {args.recv_x, args.h, args.z, weights.gate_up, weights.down,
                                      weights.gate_up_bias, weights.down_bias})) {
    return fallback_->Forward(args);
  }
  const int64_t total = args.segments.total;
  if (total == 0) return absl::OkStatus();
  RETURN_IF_ERROR(device_.MakeCurrent());
  RETURN_IF_ERROR(u_.Reserve(device_, total * config_.intermediate * 2));
  const sm90::Maps maps(config_, total);
  const float* factors = config_.weighting == Weighting::kEarly ? args.recv_w : nullptr;

  GemmParams inner;
  ASSIGN_OR_RETURN(inner.left, maps.Operand(args.recv_x, config_.hidden));
  ASSIGN_OR_RETURN(inner.right, maps.GateAndUp(weights.gate_up));
  ASSIGN_OR_RETURN(inner.out, maps.Rows(u_.data(), config_.intermediate));
  ASSIGN_OR_RETURN(inner.extra,
                   maps.GateAndUpRows(args.h != nullptr ? args.h : u_.data(), sm90::kWarpRows));
  inner.grid.columns = static_cast<int>(sm90::TilesOf(2 * config_.intermediate));
  inner.sums = static_cast<int>(config_.hidden);
  inner.columns = static_cast<int>(config_.intermediate);
  inner.rows = u_.data();
  inner.extra_rows = args.h;
  inner.bias = config_.gate_up_bias ? weights.gate_up_bias : nullptr;
  inner.factors = factors;
  RETURN_IF_ERROR(Run(Product::kInner, inner, args.segments));

  GemmParams outer;
  ASSIGN_OR_RETURN(outer.left, maps.Operand(u_.data(), config_.intermediate));
  ASSIGN_OR_RETURN(outer.right, maps.Down(weights.down));
  ASSIGN_OR_RETURN(outer.out, maps.Rows(args.z, config_.hidden));
  outer.extra = outer.out;
  outer.grid.columns = static_cast<int>(sm90::TilesOf(config_.hidden));
  outer.sums = static_cast<int>(config_.intermediate);
  outer.columns = static_cast<int>(config_.hidden);
  outer.rows = args.z;
  outer.bias = config_.down_bias ? weights.down_bias : nullptr;
  outer.factors = factors;
  RETURN_IF_ERROR(Run(Product::kOuter, outer, args.segments));
  return ZeroPads(args.segments, Product::kInner, args.h, Product::kOuter, args.z);
}

absl::Status Sm90Mlp::Dgrad(const MlpDgradArgs& args) {
  const MlpWeights& weights = args.weights;
  if (!served_ ||
      !sm90::CanServe(args.segments, {args.h, args.grad_out, args.grad_h, args.grad_recv_x,
                                      weights.gate_up, weights.down, weights.down_bias})) {
    return fallback_->Dgrad(args);
  }
  const int64_t total = args.segments.total;
  if (total == 0) return absl::OkStatus();
  RETURN_IF_ERROR(device_.MakeCurrent());
  const int64_t tiles = sm90::TilesOf(config_.intermediate);
  RETURN_IF_ERROR(partials_.Reserve(device_, tiles * total * 4));
  const sm90::Maps maps(config_, total);

  GemmParams inner;
  ASSIGN_OR_RETURN(inner.left, maps.Operand(args.grad_out, config_.hidden));
  ASSIGN_OR_RETURN(inner.right, maps.Down(weights.down));
  ASSIGN_OR_RETURN(inner.out, maps.GateAndUpRows(args.grad_h, sm90::kWarpRows));
  ASSIGN_OR_RETURN(inner.extra, maps.GateAndUpRows(args.h, sm90::kOperandRows));
  inner.grid.columns = static_cast<int>(tiles);
  inner.sums = static_cast<int>(config_.hidden);
  inner.columns = static_cast<int>(config_.intermediate);
  inner.rows = args.grad_h;
  inner.factors = args.recv_w;
  inner.partials = args.grad_w != nullptr ? partials_.as<float>() : nullptr;
  inner.partial_rows = total;
  RETURN_IF_ERROR(Run(Product::kGradInner, inner, args.segments));

  GemmParams tokens;
  ASSIGN_OR_RETURN(tokens.left, maps.Operand(args.grad_h, 2 * config_.intermediate));
  ASSIGN_OR_RETURN(tokens.right, maps.GateUpRows(weights.gate_up));
  ASSIGN_OR_RETURN(tokens.out, maps.Rows(args.grad_recv_x, config_.hidden));
  tokens.extra = tokens.out;
  tokens.grid.columns = static_cast<int>(sm90::TilesOf(config_.hidden));
  tokens.sums = static_cast<int>(2 * config_.intermediate);
  tokens.columns = static_cast<int>(config_.hidden);
  tokens.rows = args.grad_recv_x;
  RETURN_IF_ERROR(Run(Product::kGradTokens, tokens, args.segments));
  RETURN_IF_ERROR(RowDots(args));
  return ZeroPads(args.segments, Product::kGradInner, args.grad_h, Product::kGradTokens,
                  args.grad_recv_x);
}

absl::Status Sm90Mlp::RowDots(const MlpDgradArgs& args) {
  if (args.grad_w == nullptr) return absl::OkStatus();
  sm90::RowDotsParams dots;
  dots.token = config_.token_dtype;
  dots.tiles = static_cast<int>(sm90::TilesOf(config_.intermediate));
  dots.partial_rows = args.segments.total;
  dots.partials = partials_.as<float>();
  dots.down_bias = config_.down_bias ? args.weights.down_bias : nullptr;
  dots.grad_out = args.grad_out;
  dots.hidden = config_.hidden;
  dots.grad_w = args.grad_w;
  for (const sm90::ExpertTable& table : sm90::MakeTables(args.segments)) {
    dots.table = table;
    RETURN_IF_ERROR(CudaStatus(sm90::LaunchRowDots(dots, device_.stream()), "row dots"));
  }
  return absl::OkStatus();
}

}  // namespace expertd
