// The course every operation takes: check, arrive, execute; and what a failure means for the group.
#include "server/engine/step_runner.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/ids.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "server/engine/buffer_places.h"
#include "server/engine/step_validation.h"

namespace expertd::engine {
namespace {

// Failures after arrival that every rank comes to by the same data: the group is still in step.
bool IsUniform(const absl::Status& status) {
  switch (ReasonOf(status)) {
    case Reason::kRecvCapacity:
    case Reason::kExpertIdRange:
    case Reason::kDuplicateExpert:
    case Reason::kPeerRejected:
    case Reason::kNonFiniteGradient:
    case Reason::kLayerNeedsRestore:
      return true;
    default:
      return false;
  }
}

// Arrival failures that come from this rank's own knowledge: the others are told.
bool EndedHere(const absl::Status& status) {
  const Reason reason = ReasonOf(status);
  return reason == Reason::kStepTimeout || reason == Reason::kCancelled ||
         reason == Reason::kPeerLost;
}

// The part of a record that says which layer is meant: id and config.
uint64_t LayerKey(const std::string& layer_id, uint64_t fingerprint) {
  return Fingerprint(StrCat(layer_id, "\n", fingerprint));
}

}  // namespace

absl::Status StepRunner::Run(Operation& op) {
  const SteadyTime start = Clock::Real().Now();
  op.stats.queue_us = static_cast<int64_t>(ToMicros(start - op.submitted));
  Step step;
  step.context.sequence = op.header.sequence;
  step.context.deadline =
      std::min(op.deadline, start + std::chrono::milliseconds(session_.config.base_timeout_ms));
  step.record.epoch = session_.epoch;
  step.record.sequence = op.header.sequence;
  step.record.op = op.kind;
  step.record.status = op.rejected.ok() ? Check(op, step) : op.rejected;
  if (step.record.status.ok()) step.record.status = CheckResultPlaces(op);
  if (step.layer != nullptr) {
    const LayerInfo& info = step.layer->info();
    step.record.layer_fingerprint = LayerKey(info.layer_id, info.fingerprint);
    step.record.gradients_valid = info.gradients_valid;
    step.record.accumulated_backwards = info.accumulated_backwards;
    step.record.weights_version = info.weights_version;
    step.record.weights_lineage = info.weights_lineage;
  }
  step.record.arguments = op.arguments;

  op.status = Arrive(op, step);
  if (!op.status.ok()) {
    if (HasReason(op.status, Reason::kGradientsInvalid) && step.layer != nullptr) {
      step.layer->info().gradients_valid = false;
    }
    op.stats.total_us = static_cast<int64_t>(ToMicros(Clock::Real().Now() - start));
    return HasReason(op.status, Reason::kPeerLost) ? op.status : absl::OkStatus();
  }
  op.status = Execute(op, step);
  if (op.status.ok()) op.status = step.stages.Finish(*state_.device, op.stats);
  op.stats.total_us = static_cast<int64_t>(ToMicros(Clock::Real().Now() - start));
  if (op.status.ok() || IsUniform(op.status)) return absl::OkStatus();

  // This rank has left an operation that others may still be in.
  if (op.kind == OpKind::kBackward && step.layer != nullptr) {
    step.layer->info().gradients_valid = false;
  }
  session_.exchange->Close(session_.exchange->Others(), op.header.sequence, op.status);
  if (session_.world == 1 || session_.backend->capabilities().survives_cancel) {
    return absl::OkStatus();
  }
  return op.status;
}

absl::Status StepRunner::Arrive(Operation& op, Step& step) {
  const SteadyTime start = Clock::Real().Now();
  const absl::Cleanup timer = [&] {
    op.stats.arrival_us = static_cast<int64_t>(ToMicros(Clock::Real().Now() - start));
  };
  if (session_.world == 1) {
    step.arrivals = {step.record};
    return Conclude(step.arrivals, 0);
  }
  absl::StatusOr<std::vector<std::string>> records = session_.exchange->Gather(
      "arrive", op.header.sequence, EncodeArrival(step.record), step.context.deadline,
      /*patient=*/false);
  if (!records.ok()) {
    if (EndedHere(records.status())) {
      session_.exchange->Close(session_.exchange->Others(), op.header.sequence, records.status());
    }
    // A rank that refused its own request answers that, whatever became of the exchange.
    return step.record.status.ok() ? records.status() : step.record.status;
  }
  for (const std::string& bytes : *records) {
    ASSIGN_OR_RETURN(ArrivalRecord record, DecodeArrival(bytes));
    step.arrivals.push_back(std::move(record));
  }
  return Conclude(step.arrivals, session_.rank);
}

absl::Status StepRunner::Check(Operation& op, Step& step) {
  switch (op.kind) {
    case OpKind::kForward:
      return CheckForward(static_cast<ForwardOp&>(op), step);
    case OpKind::kBackward:
      return CheckBackward(static_cast<BackwardOp&>(op), step);
    case OpKind::kPrepare:
    case OpKind::kDispatch:
    case OpKind::kCombine:
    case OpKind::kDispatchBackward:
    case OpKind::kCombineBackward:
      return CheckPrimitive(op, step);
    default:
      return CheckParameters(op, step);
  }
}

absl::Status StepRunner::Execute(Operation& op, Step& step) {
  if (!HasResultPlaces(op)) return Perform(op, step);
  TouchResultPlaces(op);
  absl::Status status = Perform(op, step);
  // Nothing was copied to the host, so nothing has waited for these results yet.
  if (status.ok()) status = state_.device->Drain();
  return status.ok() ? status : WithTouchedPlaces(op, status);
}

absl::Status StepRunner::Perform(Operation& op, Step& step) {
  switch (op.kind) {
    case OpKind::kForward:
      return Forward(static_cast<ForwardOp&>(op), step);
    case OpKind::kBackward:
      return Backward(static_cast<BackwardOp&>(op), step);
    case OpKind::kPrepare:
      return Prepare(static_cast<PrepareOp&>(op), step);
    case OpKind::kDispatch:
      return Dispatch(static_cast<DispatchOp&>(op), step);
    case OpKind::kCombine:
      return Combine(static_cast<CombineOp&>(op), step);
    case OpKind::kDispatchBackward:
      return DispatchBackward(static_cast<DispatchBackwardOp&>(op), step);
    case OpKind::kCombineBackward:
      return CombineBackward(static_cast<CombineBackwardOp&>(op), step);
    case OpKind::kCreateLayer:
      return CreateLayer(static_cast<CreateLayerOp&>(op), step);
    case OpKind::kDeleteLayer:
      return DeleteLayer(static_cast<LayerOp&>(op), step);
    case OpKind::kApplyGradients:
      return ApplyGradients(static_cast<ApplyGradientsOp&>(op), step);
    case OpKind::kInitializeWeights: {
      auto& init = static_cast<InitializeWeightsOp&>(op);
      RETURN_IF_ERROR(step.layer->Initialize(init.seed, *state_.optim));
      init.weights_version = step.layer->info().weights_version;
      return absl::OkStatus();
    }
    case OpKind::kFreezeLayer:
      step.layer->Freeze();
      return PlanMemory(*step.layer);
    case OpKind::kConfigureOptimizer:
      RETURN_IF_ERROR(step.layer->Configure(static_cast<ConfigureOptimizerOp&>(op).optimizer));
      return PlanMemory(*step.layer);
    case OpKind::kClearGradients:
      return step.layer->ClearGradients();
  }
  return Error(Reason::kInternal).Text("operation without a meaning");
}

absl::Status StepRunner::FindLayer(const std::string& layer_id, Step& step) {
  auto found = state_.layers.find(layer_id);
  if (found == state_.layers.end()) {
    return Error(Reason::kLayerUnknown)
        .Text("layer is unknown: got \"", layer_id, "\", this rank has ", state_.layers.size(),
              " layers")
        .With("layer_id", layer_id);
  }
  step.layer = found->second.get();
  return absl::OkStatus();
}

}  // namespace expertd::engine
