// StepService over the engine.
#ifndef SERVER_RPC_STEP_SERVICE_H_
#define SERVER_RPC_STEP_SERVICE_H_

#include "expertd/v1/step_service.grpc.pb.h"
#include "server/engine/engine.h"
#include "server/rpc/gate.h"

namespace expertd::rpc {

// `engine` and `calls` must outlive the service and every call of it. Collective calls and streams
// are inside `calls` until they have ended.
class StepService final : public v1::StepService::CallbackService {
 public:
  StepService(engine::Engine& engine, Gate& calls) : engine_(engine), calls_(calls) {}

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const v1::ForwardRequest* request,
                                    v1::ForwardResponse* response) override;
  grpc::ServerUnaryReactor* Backward(grpc::CallbackServerContext* context,
                                     const v1::BackwardRequest* request,
                                     v1::BackwardResponse* response) override;
  grpc::ServerUnaryReactor* Prepare(grpc::CallbackServerContext* context,
                                    const v1::PrepareRequest* request,
                                    v1::PrepareResponse* response) override;
  grpc::ServerUnaryReactor* Dispatch(grpc::CallbackServerContext* context,
                                     const v1::DispatchRequest* request,
                                     v1::DispatchResponse* response) override;
  grpc::ServerUnaryReactor* Combine(grpc::CallbackServerContext* context,
                                    const v1::CombineRequest* request,
                                    v1::CombineResponse* response) override;
  grpc::ServerUnaryReactor* DispatchBackward(grpc::CallbackServerContext* context,
                                             const v1::DispatchBackwardRequest* request,
                                             v1::DispatchBackwardResponse* response) override;
  grpc::ServerUnaryReactor* CombineBackward(grpc::CallbackServerContext* context,
                                            const v1::CombineBackwardRequest* request,
                                            v1::CombineBackwardResponse* response) override;
  grpc::ServerUnaryReactor* ReleaseTicket(grpc::CallbackServerContext* context,
                                          const v1::ReleaseTicketRequest* request,
                                          v1::ReleaseTicketResponse* response) override;
  grpc::ServerUnaryReactor* GetStepOutcome(grpc::CallbackServerContext* context,
                                           const v1::GetStepOutcomeRequest* request,
                                           v1::GetStepOutcomeResponse* response) override;
  grpc::ServerBidiReactor<v1::StreamStepsRequest, v1::StreamStepsResponse>* StreamSteps(
      grpc::CallbackServerContext* context) override;

 private:
  engine::Engine& engine_;
  Gate& calls_;
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_STEP_SERVICE_H_
