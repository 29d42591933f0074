// One-time initialisation of gRPC and protobuf.
#include "server/rpc/grpc_process.h"

#include "base/log.h"
#include "google/protobuf/stubs/logging.h"
#include "grpc/grpc.h"
#include "grpcpp/ext/channelz_service_plugin.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"

namespace expertd::rpc {
namespace {

// What protobuf has to say about a request, such as text that is not UTF-8, in our own format.
void LogProtobuf(google::protobuf::LogLevel level, const char*, int, const std::string& message) {
  const bool error = level >= google::protobuf::LOGLEVEL_ERROR;
  Log(error ? LogLevel::kWarning : LogLevel::kInfo, "protobuf").Field("message", message);
}

}  // namespace

void InitGrpcOnce() {
  static const bool done = [] {
    google::protobuf::SetLogHandler(&LogProtobuf);
    grpc_init();  // without a grpc_shutdown on purpose
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::channelz::experimental::InitChannelzService();
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace expertd::rpc
