// PeerService over the engine: what other daemons leave here.
#ifndef SERVER_RPC_PEER_SERVICE_H_
#define SERVER_RPC_PEER_SERVICE_H_

#include "expertd/v1/peer_service.grpc.pb.h"
#include "server/engine/engine.h"

namespace expertd::rpc {

// `engine` must outlive the service and every call of it.
class PeerService final : public v1::PeerService::CallbackService {
 public:
  explicit PeerService(engine::Engine& engine) : engine_(engine) {}

  grpc::ServerUnaryReactor* Deliver(grpc::CallbackServerContext* context,
                                    const v1::DeliverRequest* request,
                                    v1::DeliverResponse* response) override;
  grpc::ServerUnaryReactor* Close(grpc::CallbackServerContext* context,
                                  const v1::CloseRequest* request,
                                  v1::CloseResponse* response) override;

 private:
  engine::Engine& engine_;
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_PEER_SERVICE_H_
