// LayerService over the engine.
#ifndef SERVER_RPC_LAYER_SERVICE_H_
#define SERVER_RPC_LAYER_SERVICE_H_

#include "expertd/v1/layer_service.grpc.pb.h"
#include "server/engine/engine.h"
#include "server/rpc/gate.h"

namespace expertd::rpc {

// `engine` and `calls` must outlive the service and every call of it. Collective calls and streams
// are inside `calls` until they have ended.
class LayerService final : public v1::LayerService::CallbackService {
 public:
  LayerService(engine::Engine& engine, Gate& calls) : engine_(engine), calls_(calls) {}

  grpc::ServerUnaryReactor* CreateLayer(grpc::CallbackServerContext* context,
                                        const v1::CreateLayerRequest* request,
                                        v1::CreateLayerResponse* response) override;
  grpc::ServerUnaryReactor* DeleteLayer(grpc::CallbackServerContext* context,
                                        const v1::DeleteLayerRequest* request,
                                        v1::DeleteLayerResponse* response) override;
  grpc::ServerUnaryReactor* ListLayers(grpc::CallbackServerContext* context,
                                       const v1::ListLayersRequest* request,
                                       v1::ListLayersResponse* response) override;
  grpc::ServerUnaryReactor* LoadWeights(grpc::CallbackServerContext* context,
                                        const v1::LoadWeightsRequest* request,
                                        v1::LoadWeightsResponse* response) override;
  grpc::ServerUnaryReactor* SaveWeights(grpc::CallbackServerContext* context,
                                        const v1::SaveWeightsRequest* request,
                                        v1::SaveWeightsResponse* response) override;
  grpc::ServerUnaryReactor* InitializeWeights(grpc::CallbackServerContext* context,
                                              const v1::InitializeWeightsRequest* request,
                                              v1::InitializeWeightsResponse* response) override;
  grpc::ServerUnaryReactor* FreezeLayer(grpc::CallbackServerContext* context,
                                        const v1::FreezeLayerRequest* request,
                                        v1::FreezeLayerResponse* response) override;
  grpc::ServerUnaryReactor* ConfigureOptimizer(grpc::CallbackServerContext* context,
                                               const v1::ConfigureOptimizerRequest* request,
                                               v1::ConfigureOptimizerResponse* response) override;
  grpc::ServerUnaryReactor* ApplyGradients(grpc::CallbackServerContext* context,
                                           const v1::ApplyGradientsRequest* request,
                                           v1::ApplyGradientsResponse* response) override;
  grpc::ServerUnaryReactor* ClearGradients(grpc::CallbackServerContext* context,
                                           const v1::ClearGradientsRequest* request,
                                           v1::ClearGradientsResponse* response) override;
  grpc::ServerUnaryReactor* GetShardingMetadata(grpc::CallbackServerContext* context,
                                                const v1::GetShardingMetadataRequest* request,
                                                v1::GetShardingMetadataResponse* response) override;
  grpc::ServerUnaryReactor* CheckSharding(grpc::CallbackServerContext* context,
                                          const v1::CheckShardingRequest* request,
                                          v1::CheckShardingResponse* response) override;
  grpc::ServerUnaryReactor* GetExpertLoad(grpc::CallbackServerContext* context,
                                          const v1::GetExpertLoadRequest* request,
                                          v1::GetExpertLoadResponse* response) override;
  grpc::ServerWriteReactor<v1::GetParameterResponse>* GetParameter(
      grpc::CallbackServerContext* context, const v1::GetParameterRequest* request) override;

 private:
  engine::Engine& engine_;
  Gate& calls_;
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_LAYER_SERVICE_H_
