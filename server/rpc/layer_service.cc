// Collective layer methods go through RunCollective; reads answer at once.
#include "server/rpc/layer_service.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "server/rpc/collective_call.h"
#include "server/rpc/convert_layer.h"
#include "server/rpc/convert_sharding.h"
#include "server/rpc/parameter_stream.h"
#include "server/rpc/unary_call.h"
#include "server/rpc/unsupported.h"

namespace expertd::rpc {

using engine::OpKind;

grpc::ServerUnaryReactor* LayerService::CreateLayer(grpc::CallbackServerContext* context,
                                                    const v1::CreateLayerRequest* request,
                                                    v1::CreateLayerResponse* response) {
  return RunCollective(context, engine_, calls_, *request, response,
                       std::make_shared<engine::CreateLayerOp>());
}

grpc::ServerUnaryReactor* LayerService::DeleteLayer(grpc::CallbackServerContext* context,
                                                    const v1::DeleteLayerRequest* request,
                                                    v1::DeleteLayerResponse* response) {
  return RunCollective(context, engine_, calls_, *request, response,
                       std::make_shared<engine::LayerOp>(OpKind::kDeleteLayer));
}

grpc::ServerUnaryReactor* LayerService::InitializeWeights(
    grpc::CallbackServerContext* context, const v1::InitializeWeightsRequest* request,
    v1::InitializeWeightsResponse* response) {
  return RunCollective(context, engine_, calls_, *request, response,
                       std::make_shared<engine::InitializeWeightsOp>());
}

grpc::ServerUnaryReactor* LayerService::FreezeLayer(grpc::CallbackServerContext* context,
                                                    const v1::FreezeLayerRequest* request,
                                                    v1::FreezeLayerResponse* response) {
  return RunCollective(context, engine_, calls_, *request, response,
                       std::make_shared<engine::LayerOp>(OpKind::kFreezeLayer));
}

grpc::ServerUnaryReactor* LayerService::ConfigureOptimizer(
    grpc::CallbackServerContext* context, const v1::ConfigureOptimizerRequest* request,
    v1::ConfigureOptimizerResponse* response) {
  return RunCollective(context, engine_, calls_, *request, response,
                       std::make_shared<engine::ConfigureOptimizerOp>());
}

grpc::ServerUnaryReactor* LayerService::ApplyGradients(grpc::CallbackServerContext* context,
                                                       const v1::ApplyGradientsRequest* request,
                                                       v1::ApplyGradientsResponse* response) {
  return RunCollective(context, engine_, calls_, *request, response,
                       std::make_shared<engine::ApplyGradientsOp>());
}

grpc::ServerUnaryReactor* LayerService::ClearGradients(grpc::CallbackServerContext* context,
                                                       const v1::ClearGradientsRequest* request,
                                                       v1::ClearGradientsResponse* response) {
  return RunCollective(context, engine_, calls_, *request, response,
                       std::make_shared<engine::LayerOp>(OpKind::kClearGradients));
}

grpc::ServerUnaryReactor* LayerService::LoadWeights(grpc::CallbackServerContext* context,
                                                    const v1::LoadWeightsRequest*,
                                                    v1::LoadWeightsResponse*) {
  return AnswerNow(context, Unsupported("LayerService.LoadWeights"));
}

grpc::ServerUnaryReactor* LayerService::SaveWeights(grpc::CallbackServerContext* context,
                                                    const v1::SaveWeightsRequest*,
                                                    v1::SaveWeightsResponse*) {
  return AnswerNow(context, Unsupported("LayerService.SaveWeights"));
}

grpc::ServerUnaryReactor* LayerService::ListLayers(grpc::CallbackServerContext* context,
                                                   const v1::ListLayersRequest*,
                                                   v1::ListLayersResponse* response) {
  for (const engine::LayerInfo& layer : engine_.ListLayers()) {
    ToProto(layer, response->add_layers());
  }
  return AnswerNow(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* LayerService::GetShardingMetadata(
    grpc::CallbackServerContext* context, const v1::GetShardingMetadataRequest* request,
    v1::GetShardingMetadataResponse* response) {
  const std::vector<int64_t> tokens(request->tokens_per_rank().begin(),
                                    request->tokens_per_rank().end());
  const absl::StatusOr<engine::ShardingMetadata> metadata =
      engine_.GetShardingMetadata(request->layer_id(), tokens);
  if (metadata.ok()) ToProto(*metadata, response);
  return AnswerNow(context, metadata.status());
}

grpc::ServerUnaryReactor* LayerService::CheckSharding(grpc::CallbackServerContext* context,
                                                      const v1::CheckShardingRequest* request,
                                                      v1::CheckShardingResponse*) {
  const std::vector<int64_t> tokens(request->tokens_per_rank().begin(),
                                    request->tokens_per_rank().end());
  const absl::StatusOr<engine::ShardingMetadata> metadata =
      engine_.GetShardingMetadata(request->layer_id(), tokens);
  if (!metadata.ok()) return AnswerNow(context, metadata.status());
  return AnswerNow(context, engine::CheckSharding(*metadata, FromProto(*request)));
}

grpc::ServerUnaryReactor* LayerService::GetExpertLoad(grpc::CallbackServerContext* context,
                                                      const v1::GetExpertLoadRequest* request,
                                                      v1::GetExpertLoadResponse* response) {
  const absl::StatusOr<engine::LayerInfo> layer = engine_.FindLayer(request->layer_id());
  if (layer.ok()) ToProto(*layer, response);
  return AnswerNow(context, layer.status());
}

grpc::ServerWriteReactor<v1::GetParameterResponse>* LayerService::GetParameter(
    grpc::CallbackServerContext*, const v1::GetParameterRequest* request) {
  return ParameterStream::Start(engine_, calls_, *request);
}

}  // namespace expertd::rpc
