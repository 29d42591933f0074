// Backward of a whole MoE layer: the gradients of tokens, routing and weights.
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "server/engine/step_layer.h"
#include "server/engine/step_runner.h"
#include "server/engine/step_validation.h"

namespace expertd::engine {

absl::Status StepRunner::CheckBackward(BackwardOp& op, Step& step) {
  step.ticket = session_.tickets.Find(op.ticket);
  if (step.ticket == nullptr) {
    return Error(Reason::kTicketUnknown)
        .Text("ticket ", op.ticket, " is unknown",
              session_.tickets.OfOtherEpoch(op.ticket)
                  ? StrCat(": it belongs to another epoch than ", session_.epoch)
                  : ": used by a Backward, released, or never given")
        .With("ticket", op.ticket);
  }
  RETURN_IF_ERROR(FindLayer(step.ticket->layer_id, step));
  step.record.forward_sequence = step.ticket->forward_sequence;
  step.record.dtype = step.layer->config().token_dtype;
  step.record.token_count = step.ticket->handle->tokens();
  op.arguments = {{"aux_loss_gradient", StrCat(op.aux_loss_gradient)}};
  if (step.layer->info().frozen) {
    return Error(Reason::kConfigInvalid)
        .Text("layer ", step.ticket->layer_id, " is frozen: it takes no Backward");
  }
  const LayerConfig& layer = step.layer->config();
  const int64_t tokens = step.record.token_count;
  op.tokens_gradient.dtype = layer.token_dtype;
  op.tokens_gradient.shape = {tokens, layer.hidden};
  if (step.ticket->routing == RoutingSource::kTopk) {
    op.topk_weights_gradient.dtype = DType::kF32;
    op.topk_weights_gradient.shape = {tokens, layer.top_k};
  } else if (step.ticket->routing == RoutingSource::kLogits) {
    op.router_logits_gradient.dtype = DType::kF32;
    op.router_logits_gradient.shape = {tokens, layer.expert_count};
  }
  return ValidateBackward(op, step.layer->info(), tokens);
}

absl::Status StepRunner::Backward(BackwardOp& op, Step& step) {
  Layer& layer = *step.layer;
  TicketState& ticket = *step.ticket;
  const LayerConfig& config = layer.config();
  const EpHandle& handle = *ticket.handle;
  const int64_t t = handle.tokens();
  const int64_t rows = handle.counts().total;
  EpBackend& ep = *session_.backend;
  RecordCounts(handle, op.stats);
  DeviceBuffer gradient_hold;
  const void* gradient = nullptr;
  RETURN_IF_ERROR(Enter(step, &StepStats::stage_in_us));
  ASSIGN_OR_RETURN(gradient, StageIn(op.output_gradient, gradient_hold));
  ASSIGN_OR_RETURN(DeviceBuffer grad_out, Allocate(rows, config.hidden, config.token_dtype));
  RETURN_IF_ERROR(Enter(step, &StepStats::dispatch_us));
  RETURN_IF_ERROR(ep.CombineBackward(step.context, handle,
                                     {gradient, config.token_dtype, t, config.hidden}, nullptr,
                                     {grad_out.data(), config.token_dtype, rows, config.hidden}));
  ASSIGN_OR_RETURN(DeviceBuffer grad_h,
                   Allocate(rows, 2 * config.intermediate, config.token_dtype));
  ASSIGN_OR_RETURN(DeviceBuffer grad_x, Allocate(rows, config.hidden, config.token_dtype));
  ASSIGN_OR_RETURN(DeviceBuffer grad_w, Allocate(rows, 1, DType::kF32));
  {
    RETURN_IF_ERROR(Enter(step, &StepStats::experts_us));
    MlpDgradArgs args;
    args.segments = SegmentsOf(handle);
    args.weights = layer.Weights();
    args.h = ticket.h.data();
    args.recv_w = ticket.recv_w.as<float>();
    args.grad_out = grad_out.data();
    args.grad_h = grad_h.data();
    args.grad_recv_x = grad_x.data();
    args.grad_w = grad_w.as<float>();
    RETURN_IF_ERROR(layer.mlp().Dgrad(args));
  }
  DeviceBuffer tokens_hold;
  DeviceBuffer weights_hold;
  ASSIGN_OR_RETURN(void* const tokens_gradient,
                   Place(op.tokens_gradient, t, config.hidden, config.token_dtype, tokens_hold));
  ASSIGN_OR_RETURN(void* const weights_place,
                   Place(op.topk_weights_gradient, t, config.top_k, DType::kF32, weights_hold));
  auto* const weights_gradient = static_cast<float*>(weights_place);
  const Matrix tokens_view{tokens_gradient, config.token_dtype, t, config.hidden};
  {
    RETURN_IF_ERROR(Enter(step, &StepStats::combine_us));
    RETURN_IF_ERROR(ep.DispatchBackward(step.context, handle,
                                        {grad_x.data(), config.token_dtype, rows, config.hidden},
                                        grad_w.as<float>(), tokens_view, weights_gradient));
  }
  {
    RETURN_IF_ERROR(Enter(step, &StepStats::experts_us));
    MlpWgradArgs args;
    args.segments = SegmentsOf(handle);
    args.recv_x = ticket.recv_x.data();
    args.h = ticket.h.data();
    args.recv_w = ticket.recv_w.as<float>();
    args.grad_out = grad_out.data();
    args.grad_h = grad_h.data();
    args.gradients = layer.Gradients();
    RETURN_IF_ERROR(layer.mlp().Wgrad(args));
  }
  RETURN_IF_ERROR(RouterBackward(op, step, weights_gradient, tokens_view));
  RETURN_IF_ERROR(Enter(step, &StepStats::stage_out_us));
  RETURN_IF_ERROR(
      StageOut(tokens_gradient, config.token_dtype, {t, config.hidden}, op.tokens_gradient));
  if (ticket.routing == RoutingSource::kTopk) {
    RETURN_IF_ERROR(
        StageOut(weights_gradient, DType::kF32, {t, config.top_k}, op.topk_weights_gradient));
  }
  ++layer.info().accumulated_backwards;
  session_.ticket_bytes -= ticket.bytes;
  session_.tickets.Erase(op.ticket);
  return absl::OkStatus();
}

absl::Status StepRunner::RouterBackward(BackwardOp& op, Step& step, const float* grad_weights,
                                        Matrix grad_tokens) {
  TicketState& ticket = *step.ticket;
  if (ticket.routing == RoutingSource::kTopk) return absl::OkStatus();
  RETURN_IF_ERROR(Enter(step, &StepStats::prepare_us));
  const LayerConfig& config = step.layer->config();
  const int64_t t = grad_tokens.rows;
  DeviceBuffer logits_hold;
  ASSIGN_OR_RETURN(void* const logits_place, Place(op.router_logits_gradient, t,
                                                   config.expert_count, DType::kF32, logits_hold));
  auto* const grad_logits = static_cast<float*>(logits_place);
  RETURN_IF_ERROR(state_.router->SelectBackward(config.router, ticket.logits.as<float>(),
                                                ticket.ids.as<int64_t>(), grad_weights, t,
                                                grad_logits));
  if (op.aux_loss_gradient != 0 && !ticket.routed.empty()) {
    std::vector<float> scale = ticket.routed;
    const double factor = op.aux_loss_gradient * AuxFactor(config, ticket.group_tokens);
    for (float& value : scale) value = static_cast<float>(value * factor);
    ASSIGN_OR_RETURN(DeviceBuffer device_scale, Allocate(1, config.expert_count, DType::kF32));
    RETURN_IF_ERROR(
        state_.device->CopyToDevice(device_scale.data(), scale.data(), device_scale.size()));
    RETURN_IF_ERROR(state_.router->AuxBackward(config.router, ticket.logits.as<float>(),
                                               device_scale.as<float>(), t, grad_logits));
  }
  if (ticket.routing == RoutingSource::kLogits) {
    return StageOut(grad_logits, DType::kF32, {t, config.expert_count}, op.router_logits_gradient);
  }
  Parameter* router = step.layer->Find("router");
  ASSIGN_OR_RETURN(DeviceBuffer extra, Allocate(t, config.hidden, DType::kF32));
  RETURN_IF_ERROR(state_.device->Zero(extra.data(), extra.size()));
  RETURN_IF_ERROR(state_.router->LogitsBackward(
      {ticket.tokens.data(), config.token_dtype, t, config.hidden}, router->master.as<float>(),
      config.expert_count, grad_logits, extra.as<float>(), router->gradient.as<float>()));
  return state_.router->AddTo(extra.as<float>(), grad_tokens);
}

}  // namespace expertd::engine
