// One-time initialisation of gRPC.
#include "server/rpc/grpc_process.h"

#include "grpc/grpc.h"
#include "grpcpp/ext/channelz_service_plugin.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"

namespace expertd::rpc {

void InitGrpcOnce() {
  static const bool done = [] {
    grpc_init();  // without a grpc_shutdown on purpose
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::channelz::experimental::InitChannelzService();
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace expertd::rpc
