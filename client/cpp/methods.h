// Which method of which service a request message belongs to: RankClient calls by request type.
#ifndef CLIENT_CPP_METHODS_H_
#define CLIENT_CPP_METHODS_H_

#include <functional>

#include "expertd/v1/control_service.grpc.pb.h"
#include "expertd/v1/layer_service.grpc.pb.h"
#include "expertd/v1/step_service.grpc.pb.h"
#include "expertd/v1/tensor_service.grpc.pb.h"
#include "grpcpp/client_context.h"

namespace expertd::client {

// Specialised below for every unary request.
template <typename Request>
struct Method;

#define EXPERTD_METHOD(service, method)                                           \
  template <>                                                                     \
  struct Method<v1::method##Request> {                                            \
    using Service = v1::service;                                                  \
    using Response = v1::method##Response;                                        \
    static constexpr char kName[] = #method;                                      \
    static void Start(Service::StubInterface& stub, grpc::ClientContext* context, \
                      const v1::method##Request* request, Response* response,     \
                      std::function<void(grpc::Status)> done) {                   \
      stub.async()->method(context, request, response, std::move(done));          \
    }                                                                             \
  }

EXPERTD_METHOD(ControlService, GetServerInfo);
EXPERTD_METHOD(ControlService, CreateBootstrapId);
EXPERTD_METHOD(ControlService, JoinGroup);
EXPERTD_METHOD(ControlService, LeaveGroup);
EXPERTD_METHOD(ControlService, AbortGroup);
EXPERTD_METHOD(ControlService, DescribeGroup);
EXPERTD_METHOD(ControlService, WatchGroup);
EXPERTD_METHOD(ControlService, Drain);

EXPERTD_METHOD(LayerService, CreateLayer);
EXPERTD_METHOD(LayerService, DeleteLayer);
EXPERTD_METHOD(LayerService, ListLayers);
EXPERTD_METHOD(LayerService, LoadWeights);
EXPERTD_METHOD(LayerService, SaveWeights);
EXPERTD_METHOD(LayerService, InitializeWeights);
EXPERTD_METHOD(LayerService, FreezeLayer);
EXPERTD_METHOD(LayerService, ConfigureOptimizer);
EXPERTD_METHOD(LayerService, ApplyGradients);
EXPERTD_METHOD(LayerService, ClearGradients);
EXPERTD_METHOD(LayerService, GetShardingMetadata);
EXPERTD_METHOD(LayerService, CheckSharding);
EXPERTD_METHOD(LayerService, GetExpertLoad);

EXPERTD_METHOD(StepService, Forward);
EXPERTD_METHOD(StepService, Backward);
EXPERTD_METHOD(StepService, Prepare);
EXPERTD_METHOD(StepService, Dispatch);
EXPERTD_METHOD(StepService, Combine);
EXPERTD_METHOD(StepService, DispatchBackward);
EXPERTD_METHOD(StepService, CombineBackward);
EXPERTD_METHOD(StepService, ReleaseTicket);
EXPERTD_METHOD(StepService, GetStepOutcome);

EXPERTD_METHOD(TensorService, DeleteTensor);
EXPERTD_METHOD(TensorService, ListTensors);

#undef EXPERTD_METHOD

template <typename Request>
using ResponseOf = typename Method<Request>::Response;

}  // namespace expertd::client

#endif  // CLIENT_CPP_METHODS_H_
