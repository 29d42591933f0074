// Every collective step goes through RunCollective; the rest answers at once.
#include "server/rpc/step_service.h"

#include <memory>

#include "server/rpc/collective_call.h"
#include "server/rpc/convert_step.h"
#include "server/rpc/unary_call.h"
#include "server/rpc/unsupported.h"

namespace expertd::rpc {

grpc::ServerUnaryReactor* StepService::Forward(grpc::CallbackServerContext* context,
                                               const v1::ForwardRequest* request,
                                               v1::ForwardResponse* response) {
  return RunCollective(context, engine_, calls_, *request, response,
                       std::make_shared<engine::ForwardOp>());
}

grpc::ServerUnaryReactor* StepService::Backward(grpc::CallbackServerContext* context,
                                                const v1::BackwardRequest* request,
                                                v1::BackwardResponse* response) {
  return RunCollective(context, engine_, calls_, *request, response,
                       std::make_shared<engine::BackwardOp>());
}

grpc::ServerUnaryReactor* StepService::Prepare(grpc::CallbackServerContext* context,
                                               const v1::PrepareRequest* request,
                                               v1::PrepareResponse* response) {
  return RunCollective(context, engine_, calls_, *request, response,
                       std::make_shared<engine::PrepareOp>());
}

grpc::ServerUnaryReactor* StepService::Dispatch(grpc::CallbackServerContext* context,
                                                const v1::DispatchRequest* request,
                                                v1::DispatchResponse* response) {
  return RunCollective(context, engine_, calls_, *request, response,
                       std::make_shared<engine::DispatchOp>());
}

grpc::ServerUnaryReactor* StepService::Combine(grpc::CallbackServerContext* context,
                                               const v1::CombineRequest* request,
                                               v1::CombineResponse* response) {
  return RunCollective(context, engine_, calls_, *request, response,
                       std::make_shared<engine::CombineOp>());
}

grpc::ServerUnaryReactor* StepService::DispatchBackward(grpc::CallbackServerContext* context,
                                                        const v1::DispatchBackwardRequest* request,
                                                        v1::DispatchBackwardResponse* response) {
  return RunCollective(context, engine_, calls_, *request, response,
                       std::make_shared<engine::DispatchBackwardOp>());
}

grpc::ServerUnaryReactor* StepService::CombineBackward(grpc::CallbackServerContext* context,
                                                       const v1::CombineBackwardRequest* request,
                                                       v1::CombineBackwardResponse* response) {
  return RunCollective(context, engine_, calls_, *request, response,
                       std::make_shared<engine::CombineBackwardOp>());
}

grpc::ServerUnaryReactor* StepService::ReleaseTicket(grpc::CallbackServerContext*,
                                                     const v1::ReleaseTicketRequest* request,
                                                     v1::ReleaseTicketResponse* response) {
  auto* call = new LateCall;
  engine_.Release({request->tickets().begin(), request->tickets().end()},
                  {request->handles().begin(), request->handles().end()},
                  [answerer = call->answerer(), response](int64_t released) {
                    answerer.Answer(absl::OkStatus(), [&] { response->set_released(released); });
                  });
  return call;
}

grpc::ServerUnaryReactor* StepService::GetStepOutcome(grpc::CallbackServerContext* context,
                                                      const v1::GetStepOutcomeRequest* request,
                                                      v1::GetStepOutcomeResponse* response) {
  const absl::StatusOr<engine::StepOutcome> outcome =
      engine_.GetStepOutcome(request->epoch(), request->sequence());
  if (outcome.ok()) ToProto(*outcome, response);
  return AnswerNow(context, outcome.status());
}

grpc::ServerBidiReactor<v1::StreamStepsRequest, v1::StreamStepsResponse>* StepService::StreamSteps(
    grpc::CallbackServerContext*) {
  return new UnsupportedStream<
      grpc::ServerBidiReactor<v1::StreamStepsRequest, v1::StreamStepsResponse>>(
      "StepService.StreamSteps");
}

}  // namespace expertd::rpc
