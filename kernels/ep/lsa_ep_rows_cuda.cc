// LsaEp's row operations: checks, then one kernel each.
#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/cuda/status.h"
#include "kernels/ep/lsa_ep.h"

namespace expertd {
namespace {

const LsaHandle& Cast(const EpHandle& handle) { return static_cast<const LsaHandle&>(handle); }

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

int64_t RowBytes(const ConstMatrix& matrix) {
  return matrix.cols * static_cast<int64_t>(DTypeSize(matrix.dtype));
}

}  // namespace

absl::Status LsaEp::CheckMatrices(const LsaHandle& handle, ConstMatrix tokens,
                                  ConstMatrix slots) const {
  const bool fits = tokens.cols * static_cast<int64_t>(DTypeSize(tokens.dtype)) <= layout_.pitch;
  if (tokens.rows == handle.tokens() && slots.rows >= handle.recv_counts.total &&
      tokens.cols == slots.cols && tokens.dtype == slots.dtype && DTypeSize(tokens.dtype) > 0 &&
      fits) {
    return absl::OkStatus();
  }
  return Error(Reason::kShapeMismatch)
      .Text("rank ", config_.rank, ": tokens [", tokens.rows, ", ", tokens.cols, "] ",
            DTypeName(tokens.dtype), " and slots [", slots.rows, ", ", slots.cols, "] ",
            DTypeName(slots.dtype), ", need ", handle.tokens(), " and at least ",
            handle.recv_counts.total, " rows of one dtype and width, at most ", layout_.pitch,
            " bytes");
}

// A rank without tokens or without received rows may pass null on that side.
absl::Status LsaEp::CheckValues(const LsaHandle& handle, const float* route_values,
                                const float* slot_values) const {
  const bool with_values = route_values != nullptr || slot_values != nullptr;
  const bool routes_missing = route_values == nullptr && handle.tokens() > 0;
  const bool slots_missing = slot_values == nullptr && handle.recv_counts.total > 0;
  if (!with_values || (!routes_missing && !slots_missing)) return absl::OkStatus();
  return Error(Reason::kShapeMismatch)
      .Text("rank ", config_.rank, ": route weights given for one of tokens and slots, need both");
}

LsaWork LsaEp::WorkOf(const LsaHandle& handle, int64_t row_bytes) const {
  return {.tokens = handle.routes.most_tokens,
          .row_bytes = row_bytes,
          .world = config_.world,
          .multiprocessors = device_.facts().multiprocessors,
          .budget = config_.comm_sm_count};
}

absl::Status LsaEp::Dispatch(const OpContext& context, const EpHandle& handle, ConstMatrix x,
                             const float* topk_weights, Matrix recv_x, float* recv_w) {
  RETURN_IF_ERROR(Begin(context));
  return Scatter(Cast(handle), x, recv_x, {.route_values = topk_weights, .slot_values = recv_w});
}

absl::Status LsaEp::CombineBackward(const OpContext& context, const EpHandle& handle,
                                    ConstMatrix grad_y, const float* slot_weights, Matrix grad_z) {
  RETURN_IF_ERROR(Begin(context));
  return Scatter(Cast(handle), grad_y, grad_z, {.factors = slot_weights});
}

absl::Status LsaEp::Combine(const OpContext& context, const EpHandle& handle, ConstMatrix z,
                            const float* slot_weights, Matrix y) {
  RETURN_IF_ERROR(Begin(context));
  return Gather(Cast(handle), z, y, {.factors = slot_weights});
}

absl::Status LsaEp::DispatchBackward(const OpContext& context, const EpHandle& handle,
                                     ConstMatrix grad_recv_x, const float* grad_recv_w,
                                     Matrix grad_x, float* grad_topk_weights) {
  RETURN_IF_ERROR(Begin(context));
  return Gather(Cast(handle), grad_recv_x, grad_x,
                {.slot_values = grad_recv_w, .route_values = grad_topk_weights});
}

absl::Status LsaEp::Scatter(const LsaHandle& handle, ConstMatrix rows, Matrix slots,
                            LsaScatterParams params) {
  RETURN_IF_ERROR(CheckMatrices(handle, rows, slots));
  RETURN_IF_ERROR(CheckValues(handle, params.route_values, params.slot_values));
  if (params.factors != nullptr && !IsFloat(rows.dtype)) {
    return Error(Reason::kDtypeUnsupported)
        .Text("weighted rows: got ", DTypeName(rows.dtype), ", need a float dtype");
  }
  params.routes = handle.routes;
  params.cols = rows.cols;
  params.dtype = rows.dtype;
  params.rows = rows.data;
  params.slots = slots.data;
  params.values = params.route_values != nullptr || params.slot_values != nullptr;
  ASSIGN_OR_RETURN(const LsaOp op, NextOp(kScatterPart));
  return Queued(
      LaunchLsaScatter(op, params, ScatterShape(WorkOf(handle, RowBytes(rows))), device_.stream()),
      "spreading rows");
}

absl::Status LsaEp::Gather(const LsaHandle& handle, ConstMatrix slots, Matrix rows,
                           LsaGatherParams params) {
  RETURN_IF_ERROR(CheckMatrices(handle, rows, slots));
  RETURN_IF_ERROR(CheckValues(handle, params.route_values, params.slot_values));
  if (!IsFloat(rows.dtype)) {
    return Error(Reason::kDtypeUnsupported)
        .Text("summed rows: got ", DTypeName(rows.dtype), ", need a float dtype");
  }
  params.routes = handle.routes;
  params.cols = rows.cols;
  params.dtype = rows.dtype;
  params.slots = slots.data;
  params.rows = rows.data;
  params.values = params.route_values != nullptr || params.slot_values != nullptr;
  ASSIGN_OR_RETURN(const LsaOp op, NextOp(kGatherPart));
  return Queued(
      LaunchLsaGather(op, params, GatherShape(WorkOf(handle, RowBytes(rows))), device_.stream()),
      "adding rows");
}

}  // namespace expertd
