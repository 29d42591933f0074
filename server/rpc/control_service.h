// ControlService over the engine.
#ifndef SERVER_RPC_CONTROL_SERVICE_H_
#define SERVER_RPC_CONTROL_SERVICE_H_

#include <cstdint>
#include <functional>
#include <string>

#include "base/mutex.h"
#include "expertd/v1/control_service.grpc.pb.h"
#include "server/engine/engine.h"

namespace expertd::rpc {

// What GetServerInfo says of the process beside the engine's facts.
struct ServerIdentity {
  std::string version;
  std::string build;
  std::string host;
  int64_t max_receive_message_bytes = 0;
  int64_t queue_capacity = 0;
  int64_t bytes_in_flight = 0;
  int64_t tensor_memory_bytes = 0;
  std::string default_backend;  // of groups that name none; "": the device's
};

// `engine` must outlive the service and every call of it.
class ControlService final : public v1::ControlService::CallbackService {
 public:
  // `on_drain` is called after every accepted Drain, from any thread.
  ControlService(engine::Engine& engine, ServerIdentity identity, std::function<void()> on_drain)
      : engine_(engine), identity_(std::move(identity)), on_drain_(std::move(on_drain)) {}

  // The address other daemons reach this one at; known only once the port is bound.
  void SetAddress(const std::string& address);

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override;
  grpc::ServerUnaryReactor* CreateBootstrapId(grpc::CallbackServerContext* context,
                                              const v1::CreateBootstrapIdRequest* request,
                                              v1::CreateBootstrapIdResponse* response) override;
  grpc::ServerUnaryReactor* JoinGroup(grpc::CallbackServerContext* context,
                                      const v1::JoinGroupRequest* request,
                                      v1::JoinGroupResponse* response) override;
  grpc::ServerUnaryReactor* LeaveGroup(grpc::CallbackServerContext* context,
                                       const v1::LeaveGroupRequest* request,
                                       v1::LeaveGroupResponse* response) override;
  grpc::ServerUnaryReactor* AbortGroup(grpc::CallbackServerContext* context,
                                       const v1::AbortGroupRequest* request,
                                       v1::AbortGroupResponse* response) override;
  grpc::ServerUnaryReactor* DescribeGroup(grpc::CallbackServerContext* context,
                                          const v1::DescribeGroupRequest* request,
                                          v1::DescribeGroupResponse* response) override;
  grpc::ServerUnaryReactor* WatchGroup(grpc::CallbackServerContext* context,
                                       const v1::WatchGroupRequest* request,
                                       v1::WatchGroupResponse* response) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context,
                                  const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override;

 private:
  engine::Engine& engine_;
  const ServerIdentity identity_;
  const std::function<void()> on_drain_;
  Mutex mutex_;
  std::string address_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_CONTROL_SERVICE_H_
