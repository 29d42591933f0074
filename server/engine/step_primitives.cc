// The five expert-parallel operations as steps of their own.
#include <utility>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "server/engine/step_runner.h"
#include "server/engine/step_validation.h"

namespace expertd::engine {
namespace {

std::vector<ConfigField> WeightedArgument(bool weighted) {
  return {{"weights", weighted ? "given" : "absent"}};
}

// Sets what a result will be, for the check of its place.
void Expect(DType dtype, std::vector<int64_t> shape, TensorOutput& output) {
  output.dtype = dtype;
  output.shape = std::move(shape);
}

}  // namespace

// The sizes that the shapes of a handle's operations are made of.
struct StepRunner::Rows {
  DType dtype = DType::kInvalid;
  int64_t tokens = 0;
  int64_t received = 0;
  int64_t hidden = 0;
  int64_t top_k = 0;
};

StepRunner::Rows StepRunner::RowsOf(const Step& step) {
  const LayerConfig& layer = step.layer->config();
  const EpHandle& handle = *step.handle->handle;
  return {layer.token_dtype, handle.tokens(), handle.counts().total, layer.hidden, handle.top_k()};
}

absl::Status StepRunner::FindHandle(uint64_t handle, Step& step) {
  step.handle = session_.handles.Find(handle);
  if (step.handle == nullptr) {
    return Error(Reason::kHandleUnknown)
        .Text("handle ", handle, " is unknown",
              session_.handles.OfOtherEpoch(handle)
                  ? StrCat(": it belongs to another epoch than ", session_.epoch)
                  : ": released, or never given")
        .With("handle", handle);
  }
  RETURN_IF_ERROR(FindLayer(step.handle->layer_id, step));
  step.record.forward_sequence = step.handle->prepare_sequence;
  step.record.dtype = step.layer->config().token_dtype;
  step.record.token_count = step.handle->handle->tokens();
  return absl::OkStatus();
}

absl::Status StepRunner::CheckPrimitive(Operation& op, Step& step) {
  if (op.kind == OpKind::kPrepare) {
    auto& prepare = static_cast<PrepareOp&>(op);
    RETURN_IF_ERROR(FindLayer(prepare.layer_id, step));
    RETURN_IF_ERROR(FetchValues(prepare.topk_ids));
    RETURN_IF_ERROR(ValidatePrepare(prepare, step.layer->info(), session_.config));
    step.record.token_count = prepare.topk_ids.shape[0];
    return absl::OkStatus();
  }
  if (op.kind == OpKind::kDispatch) {
    auto& dispatch = static_cast<DispatchOp&>(op);
    RETURN_IF_ERROR(FindHandle(dispatch.handle, step));
    const Rows rows = RowsOf(step);
    Expect(rows.dtype, {rows.received, rows.hidden}, dispatch.recv_tokens);
    Expect(DType::kF32, {rows.received}, dispatch.recv_weights);
    return ValidateDispatch(dispatch, step.layer->config(), *step.handle->handle);
  }
  if (op.kind == OpKind::kCombine) {
    auto& combine = static_cast<CombineOp&>(op);
    RETURN_IF_ERROR(FindHandle(combine.handle, step));
    op.arguments = WeightedArgument(combine.slot_weights.present());
    const Rows rows = RowsOf(step);
    Expect(rows.dtype, {rows.tokens, rows.hidden}, combine.output);
    return ValidateCombine(combine, step.layer->config(), *step.handle->handle);
  }
  if (op.kind == OpKind::kDispatchBackward) {
    auto& backward = static_cast<DispatchBackwardOp&>(op);
    RETURN_IF_ERROR(FindHandle(backward.handle, step));
    const bool weighted = backward.recv_weights_gradient.present();
    op.arguments = WeightedArgument(weighted);
    const Rows rows = RowsOf(step);
    Expect(rows.dtype, {rows.tokens, rows.hidden}, backward.tokens_gradient);
    if (weighted) Expect(DType::kF32, {rows.tokens, rows.top_k}, backward.topk_weights_gradient);
    return ValidateDispatchBackward(backward, step.layer->config(), *step.handle->handle);
  }
  auto& backward = static_cast<CombineBackwardOp&>(op);
  RETURN_IF_ERROR(FindHandle(backward.handle, step));
  op.arguments = WeightedArgument(backward.slot_weights.present());
  const Rows rows = RowsOf(step);
  Expect(rows.dtype, {rows.received, rows.hidden}, backward.expert_output_gradient);
  return ValidateCombineBackward(backward, step.layer->config(), *step.handle->handle);
}

absl::Status StepRunner::Prepare(PrepareOp& op, Step& step) {
  const LayerConfig& config = step.layer->config();
  DeviceBuffer hold;
  RETURN_IF_ERROR(Enter(step, &StepStats::stage_in_us));
  ASSIGN_OR_RETURN(const void* ids, StageIn(op.topk_ids, hold));
  PrepareArgs args;
  args.routing = {ids, op.topk_ids.dtype, step.record.token_count, config.top_k};
  args.expert_count = config.expert_count;
  args.alignment = config.alignment;
  RETURN_IF_ERROR(Enter(step, &StepStats::prepare_us));
  HandleState state;
  ASSIGN_OR_RETURN(state.handle, session_.backend->Prepare(step.context, args));
  const RecvCounts& counts = state.handle->counts();
  op.tokens_per_expert = counts.tokens_per_expert;
  op.padded_per_expert = counts.padded_per_expert;
  op.dropped_per_expert = counts.dropped_per_expert;
  op.total_rows = counts.total;
  op.stats.tokens_per_expert = counts.tokens_per_expert;
  op.stats.padded_per_expert = counts.padded_per_expert;
  state.layer_id = op.layer_id;
  state.prepare_sequence = op.header.sequence;
  op.handle = session_.handles.Put(std::move(state));
  return absl::OkStatus();
}

absl::Status StepRunner::Dispatch(DispatchOp& op, Step& step) {
  const LayerConfig& config = step.layer->config();
  const EpHandle& handle = *step.handle->handle;
  const int64_t rows = handle.counts().total;
  DeviceBuffer tokens_hold;
  DeviceBuffer weights_hold;
  RETURN_IF_ERROR(Enter(step, &StepStats::stage_in_us));
  ASSIGN_OR_RETURN(const void* tokens, StageIn(op.tokens, tokens_hold));
  ASSIGN_OR_RETURN(const void* weights, StageIn(op.topk_weights, weights_hold));
  DeviceBuffer x_hold;
  DeviceBuffer w_hold;
  ASSIGN_OR_RETURN(void* const recv_x,
                   Place(op.recv_tokens, rows, config.hidden, config.token_dtype, x_hold));
  ASSIGN_OR_RETURN(void* const recv_w, Place(op.recv_weights, rows, 1, DType::kF32, w_hold));
  {
    RETURN_IF_ERROR(Enter(step, &StepStats::dispatch_us));
    RETURN_IF_ERROR(session_.backend->Dispatch(
        step.context, handle, {tokens, config.token_dtype, handle.tokens(), config.hidden},
        static_cast<const float*>(weights), {recv_x, config.token_dtype, rows, config.hidden},
        static_cast<float*>(recv_w)));
  }
  RETURN_IF_ERROR(Enter(step, &StepStats::stage_out_us));
  RETURN_IF_ERROR(StageOut(recv_x, config.token_dtype, {rows, config.hidden}, op.recv_tokens));
  return StageOut(recv_w, DType::kF32, {rows}, op.recv_weights);
}

absl::Status StepRunner::Combine(CombineOp& op, Step& step) {
  const LayerConfig& config = step.layer->config();
  const EpHandle& handle = *step.handle->handle;
  DeviceBuffer z_hold;
  DeviceBuffer weights_hold;
  RETURN_IF_ERROR(Enter(step, &StepStats::stage_in_us));
  ASSIGN_OR_RETURN(const void* z, StageIn(op.expert_output, z_hold));
  ASSIGN_OR_RETURN(const void* weights, StageIn(op.slot_weights, weights_hold));
  DeviceBuffer y_hold;
  ASSIGN_OR_RETURN(void* const y,
                   Place(op.output, handle.tokens(), config.hidden, config.token_dtype, y_hold));
  {
    RETURN_IF_ERROR(Enter(step, &StepStats::combine_us));
    RETURN_IF_ERROR(session_.backend->Combine(
        step.context, handle, {z, config.token_dtype, handle.counts().total, config.hidden},
        static_cast<const float*>(weights),
        {y, config.token_dtype, handle.tokens(), config.hidden}));
  }
  RETURN_IF_ERROR(Enter(step, &StepStats::stage_out_us));
  return StageOut(y, config.token_dtype, {handle.tokens(), config.hidden}, op.output);
}

absl::Status StepRunner::DispatchBackward(DispatchBackwardOp& op, Step& step) {
  const LayerConfig& config = step.layer->config();
  const EpHandle& handle = *step.handle->handle;
  const int64_t t = handle.tokens();
  DeviceBuffer gradient_hold;
  DeviceBuffer weights_hold;
  RETURN_IF_ERROR(Enter(step, &StepStats::stage_in_us));
  ASSIGN_OR_RETURN(const void* gradient, StageIn(op.recv_tokens_gradient, gradient_hold));
  ASSIGN_OR_RETURN(const void* weights, StageIn(op.recv_weights_gradient, weights_hold));
  DeviceBuffer x_hold;
  DeviceBuffer w_hold;
  ASSIGN_OR_RETURN(void* const grad_x,
                   Place(op.tokens_gradient, t, config.hidden, config.token_dtype, x_hold));
  void* grad_w = nullptr;
  if (op.recv_weights_gradient.present()) {
    ASSIGN_OR_RETURN(grad_w,
                     Place(op.topk_weights_gradient, t, handle.top_k(), DType::kF32, w_hold));
  }
  {
    RETURN_IF_ERROR(Enter(step, &StepStats::combine_us));
    RETURN_IF_ERROR(session_.backend->DispatchBackward(
        step.context, handle, {gradient, config.token_dtype, handle.counts().total, config.hidden},
        static_cast<const float*>(weights), {grad_x, config.token_dtype, t, config.hidden},
        static_cast<float*>(grad_w)));
  }
  RETURN_IF_ERROR(Enter(step, &StepStats::stage_out_us));
  RETURN_IF_ERROR(StageOut(grad_x, config.token_dtype, {t, config.hidden}, op.tokens_gradient));
  if (!op.recv_weights_gradient.present()) return absl::OkStatus();
  return StageOut(grad_w, DType::kF32, {t, handle.top_k()}, op.topk_weights_gradient);
}

absl::Status StepRunner::CombineBackward(CombineBackwardOp& op, Step& step) {
  const LayerConfig& config = step.layer->config();
  const EpHandle& handle = *step.handle->handle;
  const int64_t rows = handle.counts().total;
  DeviceBuffer gradient_hold;
  DeviceBuffer weights_hold;
  RETURN_IF_ERROR(Enter(step, &StepStats::stage_in_us));
  ASSIGN_OR_RETURN(const void* gradient, StageIn(op.output_gradient, gradient_hold));
  ASSIGN_OR_RETURN(const void* weights, StageIn(op.slot_weights, weights_hold));
  DeviceBuffer z_hold;
  ASSIGN_OR_RETURN(void* const grad_z, Place(op.expert_output_gradient, rows, config.hidden,
                                             config.token_dtype, z_hold));
  {
    RETURN_IF_ERROR(Enter(step, &StepStats::dispatch_us));
    RETURN_IF_ERROR(session_.backend->CombineBackward(
        step.context, handle, {gradient, config.token_dtype, handle.tokens(), config.hidden},
        static_cast<const float*>(weights), {grad_z, config.token_dtype, rows, config.hidden}));
  }
  RETURN_IF_ERROR(Enter(step, &StepStats::stage_out_us));
  return StageOut(grad_z, config.token_dtype, {rows, config.hidden}, op.expert_output_gradient);
}

}  // namespace expertd::engine
