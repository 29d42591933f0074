// NcclEp's row operations: tokens out to slots, slots back to tokens, summed.
#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/cuda/status.h"
#include "kernels/ep/nccl_ep.h"
#include "kernels/ep/row_kernels.h"

namespace expertd {
namespace {

constexpr int64_t kFloat = sizeof(float);

int64_t RowBytes(const ConstMatrix& matrix) {
  return matrix.cols * static_cast<int64_t>(DTypeSize(matrix.dtype));
}

const NcclEpHandle& Cast(const EpHandle& handle) {
  return static_cast<const NcclEpHandle&>(handle);
}

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

}  // namespace

absl::Status NcclEp::CheckMatrices(const NcclEpHandle& handle, ConstMatrix tokens,
                                   ConstMatrix slots) const {
  if (tokens.rows == handle.token_count && slots.rows >= handle.recv_counts.total &&
      tokens.cols == slots.cols && tokens.dtype == slots.dtype && DTypeSize(tokens.dtype) > 0) {
    return absl::OkStatus();
  }
  return Error(Reason::kShapeMismatch)
      .Text("rank ", config_.rank, ": tokens [", tokens.rows, ", ", tokens.cols, "] ",
            DTypeName(tokens.dtype), " and slots [", slots.rows, ", ", slots.cols, "] ",
            DTypeName(slots.dtype), ", need ", handle.token_count, " and at least ",
            handle.recv_counts.total, " rows of one width and dtype");
}

// A rank without tokens or without received rows may pass null on that side.
absl::Status NcclEp::CheckValues(const NcclEpHandle& handle, const float* route_values,
                                 const float* slot_values) const {
  const bool with_values = route_values != nullptr || slot_values != nullptr;
  const bool routes_missing =
      route_values == nullptr && handle.token_count * handle.routes_per_token > 0;
  const bool slots_missing = slot_values == nullptr && handle.recv_counts.total > 0;
  if (!with_values || (!routes_missing && !slots_missing)) return absl::OkStatus();
  return Error(Reason::kShapeMismatch)
      .Text("rank ", config_.rank, ": route weights given for one of tokens and slots, need both");
}

absl::Status NcclEp::Dispatch(const OpContext& context, const EpHandle& handle, ConstMatrix x,
                              const float* topk_weights, Matrix recv_x, float* recv_w) {
  RETURN_IF_ERROR(Begin(context));
  return Scatter(Cast(handle),
                 {.rows = x, .route_values = topk_weights, .slots = recv_x, .slot_values = recv_w});
}

absl::Status NcclEp::CombineBackward(const OpContext& context, const EpHandle& handle,
                                     ConstMatrix grad_y, const float* slot_weights, Matrix grad_z) {
  RETURN_IF_ERROR(Begin(context));
  return Scatter(Cast(handle), {.rows = grad_y, .slots = grad_z, .slot_factors = slot_weights});
}

absl::Status NcclEp::Combine(const OpContext& context, const EpHandle& handle, ConstMatrix z,
                             const float* slot_weights, Matrix y) {
  RETURN_IF_ERROR(Begin(context));
  return Gather(Cast(handle), {.slots = z, .slot_factors = slot_weights, .rows = y});
}

absl::Status NcclEp::DispatchBackward(const OpContext& context, const EpHandle& handle,
                                      ConstMatrix grad_recv_x, const float* grad_recv_w,
                                      Matrix grad_x, float* grad_topk_weights) {
  RETURN_IF_ERROR(Begin(context));
  return Gather(Cast(handle), {.slots = grad_recv_x,
                               .slot_values = grad_recv_w,
                               .rows = grad_x,
                               .route_values = grad_topk_weights});
}

absl::Status NcclEp::Scatter(const NcclEpHandle& handle, const ScatterArgs& args) {
  RETURN_IF_ERROR(CheckMatrices(handle, args.rows, args.slots));
  RETURN_IF_ERROR(CheckValues(handle, args.route_values, args.slot_values));
  if (args.slot_factors != nullptr && !IsFloat(args.rows.dtype)) {
    return Error(Reason::kDtypeUnsupported)
        .Text("weighted rows: got ", DTypeName(args.rows.dtype), ", need a float dtype");
  }
  const int64_t row_bytes = RowBytes(args.rows);
  const bool with_values = args.route_values != nullptr || args.slot_values != nullptr;
  const int64_t value_bytes = with_values ? handle.routes_per_token * kFloat : 0;
  RETURN_IF_ERROR(send_rows_.Reserve(device_, handle.out.total * row_bytes));
  RETURN_IF_ERROR(recv_rows_.Reserve(device_, handle.in.total * row_bytes));
  RETURN_IF_ERROR(send_values_.Reserve(device_, handle.out.total * value_bytes));
  RETURN_IF_ERROR(recv_values_.Reserve(device_, handle.in.total * value_bytes));
  RETURN_IF_ERROR(CudaStatus(LaunchPack({.wire_rows = handle.out.total,
                                         .row_bytes = row_bytes,
                                         .top_k = handle.routes_per_token,
                                         .tokens = handle.tables.wire_tokens,
                                         .rows = args.rows.data,
                                         .values = with_values ? args.route_values : nullptr,
                                         .wire = send_rows_.data(),
                                         .wire_values = send_values_.as<float>()},
                                        device_.stream()),
                             "packing rows"));
  const WirePart parts[] = {{send_rows_.data(), recv_rows_.data(), row_bytes},
                            {send_values_.data(), recv_values_.data(), value_bytes}};
  RETURN_IF_ERROR(Exchange(handle.out, handle.in, std::span(parts).first(with_values ? 2 : 1)));
  return CudaStatus(LaunchScatter({.sources = handle.sources(),
                                   .cols = args.rows.cols,
                                   .dtype = args.rows.dtype,
                                   .own = args.rows.data,
                                   .wire = recv_rows_.data(),
                                   .own_values = args.route_values,
                                   .wire_values = recv_values_.as<float>(),
                                   .factors = args.slot_factors,
                                   .pad_rows = handle.pad_rows,
                                   .pad_slots = handle.tables.pad_slots,
                                   .out = args.slots.data,
                                   .out_values = args.slot_values},
                                  device_.stream()),
                    "spreading rows");
}

absl::Status NcclEp::Gather(const NcclEpHandle& handle, const GatherArgs& args) {
  RETURN_IF_ERROR(CheckMatrices(handle, args.rows, args.slots));
  RETURN_IF_ERROR(CheckValues(handle, args.route_values, args.slot_values));
  if (!IsFloat(args.rows.dtype)) {
    return Error(Reason::kDtypeUnsupported)
        .Text("summed rows: got ", DTypeName(args.rows.dtype), ", need a float dtype");
  }
  const int64_t row_bytes = RowBytes(args.rows);
  const bool with_values = args.route_values != nullptr || args.slot_values != nullptr;
  const int64_t value_bytes = with_values ? handle.routes_per_token * kFloat : 0;
  RETURN_IF_ERROR(send_rows_.Reserve(device_, handle.in.total * row_bytes));
  RETURN_IF_ERROR(recv_rows_.Reserve(device_, handle.out.total * row_bytes));
  RETURN_IF_ERROR(send_values_.Reserve(device_, handle.in.total * value_bytes));
  RETURN_IF_ERROR(recv_values_.Reserve(device_, handle.out.total * value_bytes));
  RETURN_IF_ERROR(CudaStatus(LaunchPartials({.sources = handle.sources(),
                                             .cols = args.rows.cols,
                                             .dtype = args.rows.dtype,
                                             .slots = args.slots.data,
                                             .factors = args.slot_factors,
                                             .slot_values = args.slot_values,
                                             .wire = send_rows_.data(),
                                             .wire_values = send_values_.as<float>()},
                                            device_.stream()),
                             "adding rows for other ranks"));
  const WirePart parts[] = {{send_rows_.data(), recv_rows_.data(), row_bytes},
                            {send_values_.data(), recv_values_.data(), value_bytes}};
  RETURN_IF_ERROR(Exchange(handle.in, handle.out, std::span(parts).first(with_values ? 2 : 1)));
  return CudaStatus(LaunchFinal({.tokens = handle.token_count,
                                 .top_k = handle.routes_per_token,
                                 .cols = args.rows.cols,
                                 .world = config_.world,
                                 .rank = config_.rank,
                                 .dtype = args.rows.dtype,
                                 .row_of = handle.tables.row_of,
                                 .route_owner = handle.tables.route_owner,
                                 .own_slots = handle.own_slots,
                                 .wire_begin = handle.wire_begin,
                                 .slots = args.slots.data,
                                 .factors = args.slot_factors,
                                 .slot_values = args.slot_values,
                                 .wire = recv_rows_.data(),
                                 .wire_values = recv_values_.as<float>(),
                                 .out = args.rows.data,
                                 .out_values = args.route_values},
                                device_.stream()),
                    "adding rows");
}

}  // namespace expertd
