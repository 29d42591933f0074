// What each step method requires of its tensors, and how results go into its response.
#include "server/rpc/convert_step.h"

#include <algorithm>

#include <cmath>
#include <string_view>
#include <vector>

#include "base/strings.h"
#include "server/rpc/convert_config.h"
#include "server/rpc/convert_tensor.h"

namespace expertd::rpc {
namespace {

using engine::TensorInput;
using engine::TensorOutput;

const std::vector<DType>& TokenDtypes() {
  static const auto* const dtypes = new std::vector<DType>{DType::kF32, DType::kF16, DType::kBF16};
  return *dtypes;
}

TensorRule TokensRule(std::string path) { return {std::move(path), 2, TokenDtypes()}; }
TensorRule WeightsRule(std::string path) { return {std::move(path), 2, {DType::kF32}}; }
TensorRule SlotWeightsRule(std::string path) { return {std::move(path), 1, {DType::kF32}}; }
TensorRule IdsRule(std::string path) { return {std::move(path), 2, {DType::kI32, DType::kI64}}; }

void CheckNonZero(uint64_t id, std::string path, Violations* violations) {
  if (id != 0) return;
  violations->Add(Reason::kConfigInvalid, std::move(path), "got 0, need a non-zero number");
}

// The tensor when the request has it. An absent optional tensor is no problem.
const v1::Tensor* Optional(bool has, const v1::Tensor& tensor) { return has ? &tensor : nullptr; }

TensorInput OptionalSlotWeights(bool has, const v1::Tensor& tensor, const std::string& path,
                                Violations* violations) {
  if (!has) return {};
  return FromProto(&tensor, SlotWeightsRule(path), violations);
}

void DecodeTopk(const v1::TopkRouting& topk, engine::ForwardOp* op, Violations* violations) {
  op->routing = engine::RoutingSource::kTopk;
  op->topk_ids = FromProto(Optional(topk.has_topk_ids(), topk.topk_ids()), IdsRule("topk.topk_ids"),
                           violations);
  op->topk_weights = FromProto(Optional(topk.has_topk_weights(), topk.topk_weights()),
                               WeightsRule("topk.topk_weights"), violations);
  CheckSameDimension(op->topk_ids, 0, op->tokens, 0, violations);
  CheckSameDimension(op->topk_weights, 0, op->topk_ids, 0, violations);
  CheckSameDimension(op->topk_weights, 1, op->topk_ids, 1, violations);
}

void DecodeRouting(const v1::ForwardRequest& request, engine::ForwardOp* op,
                   Violations* violations) {
  switch (request.routing_case()) {
    case v1::ForwardRequest::kTopk:
      DecodeTopk(request.topk(), op, violations);
      return;
    case v1::ForwardRequest::kRouterLogits:
      op->routing = engine::RoutingSource::kLogits;
      op->router_logits =
          FromProto(&request.router_logits(), WeightsRule("router_logits"), violations);
      CheckSameDimension(op->router_logits, 0, op->tokens, 0, violations);
      return;
    case v1::ForwardRequest::kLayerRouter:
      op->routing = engine::RoutingSource::kLayerRouter;
      if (!request.layer_router()) {
        violations->Add(Reason::kConfigInvalid, "layer_router", "got false, need true");
      }
      return;
    case v1::ForwardRequest::ROUTING_NOT_SET:
      violations->Add(Reason::kConfigInvalid, "routing",
                      "got none, need topk, router_logits or layer_router");
      return;
  }
}

// Where a result goes, when the request says so.
void DecodePlace(bool has, const v1::BufferRef& buffer, const std::string& path,
                 TensorOutput* output, Violations* violations) {
  if (has) output->buffer = FromProto(buffer, path, violations);
}

// Leaves the field unset when there is no tensor.
template <typename Mutable>
void EncodeTensor(const TensorOutput& tensor, const Mutable& field) {
  if (tensor.present()) ToProto(tensor, field());
}

}  // namespace

void CheckId(const std::string& id, const std::string& path, Violations* violations) {
  if (id.empty()) {
    violations->Add(Reason::kConfigInvalid, path, "got an empty id, need one");
  } else if (id.size() > kMaxIdBytes) {
    violations->Add(Reason::kConfigInvalid, path,
                    StrCat("got ", id.size(), " bytes, need at most ", kMaxIdBytes));
  } else if (std::any_of(id.begin(), id.end(),
                         [](unsigned char c) { return c < ' ' || c == 127; })) {
    violations->Add(Reason::kConfigInvalid, path, "got control characters, need none");
  }
}

absl::StatusOr<engine::StepHeader> FromProto(const v1::StepHeader* header) {
  Violations violations;
  if (header == nullptr) {
    violations.Add(Reason::kConfigInvalid, "header", "got none, need one");
    return violations.ToStatus("invalid request");
  }
  CheckId(header->group_id(), "header.group_id", &violations);
  CheckNonZero(header->epoch(), "header.epoch", &violations);
  CheckNonZero(header->sequence(), "header.sequence", &violations);
  CheckNonZero(header->request_id(), "header.request_id", &violations);
  if (!violations.empty()) return violations.ToStatus("invalid request");
  return engine::StepHeader{header->group_id(), header->epoch(), header->sequence(),
                            header->request_id()};
}

absl::Status Decode(const v1::ForwardRequest& request, engine::ForwardOp* op) {
  Violations violations;
  CheckId(request.layer_id(), "layer_id", &violations);
  op->layer_id = request.layer_id();
  op->tokens = FromProto(Optional(request.has_tokens(), request.tokens()), TokensRule("tokens"),
                         &violations);
  DecodeRouting(request, op, &violations);
  op->keep_for_backward = request.keep_for_backward();
  DecodePlace(request.has_output_buffer(), request.output_buffer(), "output_buffer", &op->output,
              &violations);
  return violations.ToStatus("invalid request");
}

absl::Status Decode(const v1::BackwardRequest& request, engine::BackwardOp* op) {
  Violations violations;
  CheckNonZero(request.ticket(), "ticket", &violations);
  op->ticket = request.ticket();
  op->output_gradient =
      FromProto(Optional(request.has_output_gradient(), request.output_gradient()),
                TokensRule("output_gradient"), &violations);
  op->aux_loss_gradient = request.aux_loss_gradient();
  if (!std::isfinite(op->aux_loss_gradient)) {
    violations.Add(Reason::kConfigInvalid, "aux_loss_gradient",
                   StrCat("got ", op->aux_loss_gradient, ", need a finite number"));
  }
  DecodePlace(request.has_tokens_gradient_buffer(), request.tokens_gradient_buffer(),
              "tokens_gradient_buffer", &op->tokens_gradient, &violations);
  DecodePlace(request.has_topk_weights_gradient_buffer(), request.topk_weights_gradient_buffer(),
              "topk_weights_gradient_buffer", &op->topk_weights_gradient, &violations);
  DecodePlace(request.has_router_logits_gradient_buffer(), request.router_logits_gradient_buffer(),
              "router_logits_gradient_buffer", &op->router_logits_gradient, &violations);
  return violations.ToStatus("invalid request");
}

absl::Status Decode(const v1::PrepareRequest& request, engine::PrepareOp* op) {
  Violations violations;
  CheckId(request.layer_id(), "layer_id", &violations);
  op->layer_id = request.layer_id();
  op->topk_ids = FromProto(Optional(request.has_topk_ids(), request.topk_ids()),
                           IdsRule("topk_ids"), &violations);
  return violations.ToStatus("invalid request");
}

absl::Status Decode(const v1::DispatchRequest& request, engine::DispatchOp* op) {
  Violations violations;
  CheckNonZero(request.handle(), "handle", &violations);
  op->handle = request.handle();
  op->tokens = FromProto(Optional(request.has_tokens(), request.tokens()), TokensRule("tokens"),
                         &violations);
  op->topk_weights = FromProto(Optional(request.has_topk_weights(), request.topk_weights()),
                               WeightsRule("topk_weights"), &violations);
  CheckSameDimension(op->topk_weights, 0, op->tokens, 0, &violations);
  DecodePlace(request.has_recv_tokens_buffer(), request.recv_tokens_buffer(), "recv_tokens_buffer",
              &op->recv_tokens, &violations);
  DecodePlace(request.has_recv_weights_buffer(), request.recv_weights_buffer(),
              "recv_weights_buffer", &op->recv_weights, &violations);
  return violations.ToStatus("invalid request");
}

absl::Status Decode(const v1::CombineRequest& request, engine::CombineOp* op) {
  Violations violations;
  CheckNonZero(request.handle(), "handle", &violations);
  op->handle = request.handle();
  op->expert_output = FromProto(Optional(request.has_expert_output(), request.expert_output()),
                                TokensRule("expert_output"), &violations);
  op->slot_weights = OptionalSlotWeights(request.has_slot_weights(), request.slot_weights(),
                                         "slot_weights", &violations);
  CheckSameDimension(op->slot_weights, 0, op->expert_output, 0, &violations);
  DecodePlace(request.has_output_buffer(), request.output_buffer(), "output_buffer", &op->output,
              &violations);
  return violations.ToStatus("invalid request");
}

absl::Status Decode(const v1::DispatchBackwardRequest& request, engine::DispatchBackwardOp* op) {
  Violations violations;
  CheckNonZero(request.handle(), "handle", &violations);
  op->handle = request.handle();
  op->recv_tokens_gradient =
      FromProto(Optional(request.has_recv_tokens_gradient(), request.recv_tokens_gradient()),
                TokensRule("recv_tokens_gradient"), &violations);
  op->recv_weights_gradient =
      OptionalSlotWeights(request.has_recv_weights_gradient(), request.recv_weights_gradient(),
                          "recv_weights_gradient", &violations);
  CheckSameDimension(op->recv_weights_gradient, 0, op->recv_tokens_gradient, 0, &violations);
  DecodePlace(request.has_tokens_gradient_buffer(), request.tokens_gradient_buffer(),
              "tokens_gradient_buffer", &op->tokens_gradient, &violations);
  DecodePlace(request.has_topk_weights_gradient_buffer(), request.topk_weights_gradient_buffer(),
              "topk_weights_gradient_buffer", &op->topk_weights_gradient, &violations);
  return violations.ToStatus("invalid request");
}

absl::Status Decode(const v1::CombineBackwardRequest& request, engine::CombineBackwardOp* op) {
  Violations violations;
  CheckNonZero(request.handle(), "handle", &violations);
  op->handle = request.handle();
  op->output_gradient =
      FromProto(Optional(request.has_output_gradient(), request.output_gradient()),
                TokensRule("output_gradient"), &violations);
  op->slot_weights = OptionalSlotWeights(request.has_slot_weights(), request.slot_weights(),
                                         "slot_weights", &violations);
  DecodePlace(request.has_expert_output_gradient_buffer(), request.expert_output_gradient_buffer(),
              "expert_output_gradient_buffer", &op->expert_output_gradient, &violations);
  return violations.ToStatus("invalid request");
}

void Encode(const engine::ForwardOp& op, v1::ForwardResponse* response) {
  EncodeTensor(op.output, [=] { return response->mutable_output(); });
  EncodeTensor(op.used_topk_ids, [=] { return response->mutable_routing()->mutable_topk_ids(); });
  EncodeTensor(op.used_topk_weights,
               [=] { return response->mutable_routing()->mutable_topk_weights(); });
  response->set_ticket(op.ticket);
  response->set_aux_loss(op.aux_loss);
  ToProto(op.stats, response->mutable_stats());
}

void Encode(const engine::BackwardOp& op, v1::BackwardResponse* response) {
  EncodeTensor(op.tokens_gradient, [=] { return response->mutable_tokens_gradient(); });
  EncodeTensor(op.topk_weights_gradient, [=] { return response->mutable_topk_weights_gradient(); });
  EncodeTensor(op.router_logits_gradient,
               [=] { return response->mutable_router_logits_gradient(); });
  ToProto(op.stats, response->mutable_stats());
}

void Encode(const engine::PrepareOp& op, v1::PrepareResponse* response) {
  response->set_handle(op.handle);
  response->mutable_tokens_per_expert()->Assign(op.tokens_per_expert.begin(),
                                                op.tokens_per_expert.end());
  response->mutable_padded_per_expert()->Assign(op.padded_per_expert.begin(),
                                                op.padded_per_expert.end());
  response->mutable_dropped_per_expert()->Assign(op.dropped_per_expert.begin(),
                                                 op.dropped_per_expert.end());
  response->set_total_rows(op.total_rows);
  ToProto(op.stats, response->mutable_stats());
}

void Encode(const engine::DispatchOp& op, v1::DispatchResponse* response) {
  EncodeTensor(op.recv_tokens, [=] { return response->mutable_recv_tokens(); });
  EncodeTensor(op.recv_weights, [=] { return response->mutable_recv_weights(); });
  ToProto(op.stats, response->mutable_stats());
}

void Encode(const engine::CombineOp& op, v1::CombineResponse* response) {
  EncodeTensor(op.output, [=] { return response->mutable_output(); });
  ToProto(op.stats, response->mutable_stats());
}

void Encode(const engine::DispatchBackwardOp& op, v1::DispatchBackwardResponse* response) {
  EncodeTensor(op.tokens_gradient, [=] { return response->mutable_tokens_gradient(); });
  EncodeTensor(op.topk_weights_gradient, [=] { return response->mutable_topk_weights_gradient(); });
  ToProto(op.stats, response->mutable_stats());
}

void Encode(const engine::CombineBackwardOp& op, v1::CombineBackwardResponse* response) {
  EncodeTensor(op.expert_output_gradient,
               [=] { return response->mutable_expert_output_gradient(); });
  ToProto(op.stats, response->mutable_stats());
}

void ToProto(const engine::StepStats& stats, v1::StepStats* out) {
  out->set_queue_us(stats.queue_us);
  out->set_arrival_us(stats.arrival_us);
  out->set_stage_in_us(stats.stage_in_us);
  out->set_prepare_us(stats.prepare_us);
  out->set_dispatch_us(stats.dispatch_us);
  out->set_experts_us(stats.experts_us);
  out->set_combine_us(stats.combine_us);
  out->set_stage_out_us(stats.stage_out_us);
  out->set_total_us(stats.total_us);
  out->mutable_tokens_per_expert()->Assign(stats.tokens_per_expert.begin(),
                                           stats.tokens_per_expert.end());
  out->mutable_padded_per_expert()->Assign(stats.padded_per_expert.begin(),
                                           stats.padded_per_expert.end());
  out->set_routes_dropped(stats.routes_dropped);
}

void ToProto(const engine::StepOutcome& outcome, v1::GetStepOutcomeResponse* out) {
  out->set_state(static_cast<v1::StepState>(outcome.state));
  if (outcome.state == engine::StepState::kAhead) return;
  out->set_operation(std::string(engine::OpName(outcome.kind)));
  out->set_request_id(outcome.request_id);
  if (outcome.status.ok()) return;
  out->set_code(static_cast<int>(outcome.status.code()));
  out->set_reason(std::string(ReasonName(ReasonOf(outcome.status))));
  out->set_message(std::string(StdView(outcome.status.message())));
}

}  // namespace expertd::rpc
