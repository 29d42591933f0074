// Forward of a whole MoE layer: route, dispatch, experts, combine, and the ticket for its backward.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "server/engine/step_layer.h"
#include "server/engine/step_runner.h"
#include "server/engine/step_validation.h"

namespace expertd::engine {
namespace {

std::string_view RoutingName(RoutingSource routing) {
  switch (routing) {
    case RoutingSource::kTopk:
      return "topk";
    case RoutingSource::kLogits:
      return "router_logits";
    case RoutingSource::kLayerRouter:
      return "layer_router";
  }
  return "topk";
}

int64_t GroupTokens(const std::vector<ArrivalRecord>& arrivals) {
  int64_t tokens = 0;
  for (const ArrivalRecord& arrival : arrivals) tokens += arrival.token_count;
  return tokens;
}

void CountLoad(const EpHandle& handle, LayerInfo& info) {
  const RecvCounts& counts = handle.counts();
  for (size_t i = 0; i < info.routes.size(); ++i) {
    info.routes[i] += counts.tokens_per_expert[i];
    info.routes_dropped[i] += counts.dropped_per_expert.empty() ? 0 : counts.dropped_per_expert[i];
  }
  ++info.forwards;
}

}  // namespace

// Where each token goes, in device memory, and what the router's backward will need.
struct StepRunner::Routed {
  RoutingView view;
  const float* weights = nullptr;  // [T, K]
  const float* logits = nullptr;   // [T, E], with a router
  DeviceBuffer ids_hold;
  DeviceBuffer weights_hold;
  DeviceBuffer logits_hold;
  std::vector<float> routed_per_expert;  // [E] of the whole group, with an auxiliary loss
};

absl::Status StepRunner::CheckForward(ForwardOp& op, Step& step) {
  RETURN_IF_ERROR(FindLayer(op.layer_id, step));
  const LayerInfo& info = step.layer->info();
  for (TensorInput* input : {&op.topk_ids, &op.topk_weights, &op.router_logits}) {
    RETURN_IF_ERROR(FetchValues(*input));
  }
  RETURN_IF_ERROR(ValidateForward(op, info, session_.config));
  op.output.dtype = info.config.token_dtype;
  op.output.shape = op.tokens.shape;
  op.arguments = {{"routing", std::string(RoutingName(op.routing))},
                  {"keep_for_backward", op.keep_for_backward ? "true" : "false"}};
  step.record.dtype = op.tokens.dtype;
  step.record.token_count = op.tokens.shape[0];
  if (!op.keep_for_backward) return absl::OkStatus();
  const auto plan = PlanLayer(SizesOf(session_.config), SizesOf(info.config, false));
  if (!plan.ok()) return plan.status();
  const int64_t worst = plan->at("ticket_worst_case");
  if (session_.ticket_bytes + worst <= session_.config.ticket_memory_bytes) {
    return absl::OkStatus();
  }
  return Error(Reason::kTicketMemory)
      .Text("no memory for another ticket: ", session_.ticket_bytes, " bytes held by ",
            session_.tickets.states().size(), " tickets, a ticket may need ", worst,
            ", limit ticket_memory_bytes ", session_.config.ticket_memory_bytes)
      .With("limit", session_.config.ticket_memory_bytes)
      .With("flag", "ticket_memory_bytes");
}

absl::Status StepRunner::Route(ForwardOp& op, Step& step, const void* tokens, Routed& routed) {
  const LayerConfig& layer = step.layer->config();
  const int64_t t = step.record.token_count;
  if (op.routing == RoutingSource::kTopk) {
    ASSIGN_OR_RETURN(const void* ids, StageIn(op.topk_ids, routed.ids_hold));
    ASSIGN_OR_RETURN(const void* weights, StageIn(op.topk_weights, routed.weights_hold));
    routed.view = {ids, op.topk_ids.dtype, t, layer.top_k};
    routed.weights = static_cast<const float*>(weights);
    return absl::OkStatus();
  }
  const float* bias = nullptr;
  if (op.routing == RoutingSource::kLogits) {
    // The caller's memory ends with the request: a ticket needs a copy of its own.
    ASSIGN_OR_RETURN(routed.logits_hold, state_.device->Allocate(op.router_logits.bytes));
    RETURN_IF_ERROR(CopyIn(op.router_logits, routed.logits_hold.data()));
  } else {
    ASSIGN_OR_RETURN(routed.logits_hold, Allocate(t, layer.expert_count, DType::kF32));
    const Parameter* router = step.layer->Find("router");
    RETURN_IF_ERROR(state_.router->Logits({tokens, layer.token_dtype, t, layer.hidden},
                                          router->master.as<float>(), layer.expert_count,
                                          routed.logits_hold.as<float>()));
    const Parameter* selection = step.layer->Find("router_bias");
    if (selection != nullptr) bias = selection->master.as<float>();
  }
  routed.logits = routed.logits_hold.as<float>();
  ASSIGN_OR_RETURN(routed.ids_hold, Allocate(t, layer.top_k, DType::kI64));
  ASSIGN_OR_RETURN(routed.weights_hold, Allocate(t, layer.top_k, DType::kF32));
  RETURN_IF_ERROR(state_.router->Select(layer.router, routed.logits, bias, t,
                                        routed.ids_hold.as<int64_t>(),
                                        routed.weights_hold.as<float>()));
  routed.view = {routed.ids_hold.data(), DType::kI64, t, layer.top_k};
  routed.weights = routed.weights_hold.as<float>();
  RETURN_IF_ERROR(
      StageOut(routed.ids_hold.data(), DType::kI64, {t, layer.top_k}, op.used_topk_ids));
  return StageOut(routed.weights_hold.data(), DType::kF32, {t, layer.top_k}, op.used_topk_weights);
}

absl::Status StepRunner::AuxLoss(ForwardOp& op, Step& step, Routed& routed) {
  const LayerConfig& layer = step.layer->config();
  if (layer.aux_loss_coefficient == 0 || routed.logits == nullptr) return absl::OkStatus();
  const int64_t experts = layer.expert_count;
  ASSIGN_OR_RETURN(DeviceBuffer sums, Allocate(2, experts, DType::kF32));
  RETURN_IF_ERROR(state_.router->AuxSums(
      layer.router, routed.logits, static_cast<const int64_t*>(routed.view.ids),
      step.record.token_count, sums.as<float>(), sums.as<float>() + experts));
  RETURN_IF_ERROR(session_.backend->AllReduceSum(step.context, sums.as<float>(), 2 * experts));
  std::vector<float> host(static_cast<size_t>(2 * experts));
  RETURN_IF_ERROR(state_.device->CopyToHost(host.data(), sums.data(), sums.size()));
  double loss = 0;
  for (int64_t e = 0; e < experts; ++e) {
    loss += static_cast<double>(host[static_cast<size_t>(e)]) *
            static_cast<double>(host[static_cast<size_t>(experts + e)]);
  }
  op.aux_loss = loss * AuxFactor(layer, GroupTokens(step.arrivals));
  host.resize(static_cast<size_t>(experts));
  routed.routed_per_expert = std::move(host);
  return absl::OkStatus();
}

absl::Status StepRunner::Forward(ForwardOp& op, Step& step) {
  Layer& layer = *step.layer;
  const LayerConfig& config = layer.config();
  const int64_t t = step.record.token_count;
  EpBackend& ep = *session_.backend;
  DeviceBuffer tokens_hold;
  Routed routed;
  const void* tokens = nullptr;
  RETURN_IF_ERROR(Enter(step, &StepStats::stage_in_us));
  ASSIGN_OR_RETURN(tokens, StageIn(op.tokens, tokens_hold));
  TicketState ticket;
  RETURN_IF_ERROR(Enter(step, &StepStats::prepare_us));
  RETURN_IF_ERROR(Route(op, step, tokens, routed));
  RETURN_IF_ERROR(AuxLoss(op, step, routed));
  PrepareArgs args{routed.view, config.expert_count, config.alignment};
  ASSIGN_OR_RETURN(ticket.handle, ep.Prepare(step.context, args));
  const EpHandle& handle = *ticket.handle;
  const int64_t rows = handle.counts().total;
  RecordCounts(handle, op.stats);
  RETURN_IF_ERROR(Enter(step, &StepStats::dispatch_us));
  ASSIGN_OR_RETURN(ticket.recv_x, Allocate(rows, config.hidden, config.token_dtype));
  ASSIGN_OR_RETURN(ticket.recv_w, Allocate(rows, 1, DType::kF32));
  RETURN_IF_ERROR(ep.Dispatch(
      step.context, handle, {tokens, config.token_dtype, t, config.hidden}, routed.weights,
      {ticket.recv_x.data(), config.token_dtype, rows, config.hidden}, ticket.recv_w.as<float>()));
  ASSIGN_OR_RETURN(DeviceBuffer z, Allocate(rows, config.hidden, config.token_dtype));
  {
    RETURN_IF_ERROR(Enter(step, &StepStats::experts_us));
    MlpForwardArgs args;
    args.segments = SegmentsOf(handle);
    args.weights = layer.Weights();
    args.recv_x = ticket.recv_x.data();
    args.recv_w = ticket.recv_w.as<float>();
    if (op.keep_for_backward) {
      ASSIGN_OR_RETURN(ticket.h, Allocate(rows, 2 * config.intermediate, config.token_dtype));
      args.h = ticket.h.data();
    }
    args.z = z.data();
    RETURN_IF_ERROR(layer.mlp().Forward(args));
  }
  DeviceBuffer y_hold;
  ASSIGN_OR_RETURN(void* const y, Place(op.output, t, config.hidden, config.token_dtype, y_hold));
  {
    RETURN_IF_ERROR(Enter(step, &StepStats::combine_us));
    const float* weights =
        config.weighting == Weighting::kLate ? ticket.recv_w.as<float>() : nullptr;
    RETURN_IF_ERROR(ep.Combine(step.context, handle,
                               {z.data(), config.token_dtype, rows, config.hidden}, weights,
                               {y, config.token_dtype, t, config.hidden}));
  }
  RETURN_IF_ERROR(Enter(step, &StepStats::stage_out_us));
  RETURN_IF_ERROR(StageOut(y, config.token_dtype, {t, config.hidden}, op.output));
  CountLoad(handle, layer.info());
  return op.keep_for_backward ? KeepTicket(op, step, routed, std::move(ticket)) : absl::OkStatus();
}

absl::Status StepRunner::KeepTicket(ForwardOp& op, Step& step, Routed& routed, TicketState ticket) {
  const LayerConfig& config = step.layer->config();
  ticket.layer_id = op.layer_id;
  ticket.forward_sequence = op.header.sequence;
  ticket.weights_version = step.layer->info().weights_version;
  ticket.routing = op.routing;
  ticket.group_tokens = GroupTokens(step.arrivals);
  if (op.routing != RoutingSource::kTopk) {
    ticket.logits = std::move(routed.logits_hold);
    ticket.ids = std::move(routed.ids_hold);
    ticket.routed = std::move(routed.routed_per_expert);
  }
  if (op.routing == RoutingSource::kLayerRouter) {
    ASSIGN_OR_RETURN(ticket.tokens,
                     Allocate(step.record.token_count, config.hidden, config.token_dtype));
    RETURN_IF_ERROR(CopyIn(op.tokens, ticket.tokens.data()));
  }
  ticket.bytes = ticket.recv_x.size() + ticket.recv_w.size() + ticket.h.size() +
                 ticket.tokens.size() + ticket.logits.size() + ticket.ids.size();
  session_.ticket_bytes += ticket.bytes;
  op.ticket = session_.tickets.Put(std::move(ticket));
  return absl::OkStatus();
}

}  // namespace expertd::engine
