// The gRPC server of one daemon: all services on one port, with health, reflection and channelz.
#ifndef SERVER_RPC_SERVER_H_
#define SERVER_RPC_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "grpcpp/server.h"
#include "server/engine/engine.h"
#include "server/rpc/control_service.h"
#include "server/rpc/gate.h"
#include "server/rpc/health.h"
#include "server/rpc/layer_service.h"
#include "server/rpc/peer_service.h"
#include "server/rpc/step_service.h"
#include "server/rpc/tensor_service.h"
#include "server/rpc/tls.h"

namespace expertd::rpc {

struct ServerOptions {
  std::string listen;     // "host:port"; port 0: any free one
  std::string advertise;  // "host:port" or "host" that other daemons reach it at; "": as bound
  TlsFiles tls;
  ServerIdentity identity;
};

class Server {
 public:
  // Binds and serves. `engine` must outlive the server.
  // Errors: ALREADY_EXISTS when the port is taken, CONFIG_INVALID when the address cannot be bound
  // for another reason; both name the address.
  static absl::StatusOr<std::unique_ptr<Server>> Create(const ServerOptions& options,
                                                        engine::Engine& engine);
  // Shuts down at once when Shutdown has not been called.
  ~Server();

  // "host:port" with the port that was bound, and the address other daemons reach it at.
  const std::string& bound_address() const { return bound_address_; }
  const std::string& address() const { return address_; }

  // Health is NOT_SERVING from here on; calls are still taken.
  void StopAdvertising();
  // Waits for collective calls and streams until the deadline, then takes no more calls, cancels
  // those that are left, long polls among them, and returns when all have ended.
  void Shutdown(SteadyTime deadline);

 private:
  Server(const ServerOptions& options, engine::Engine& engine);
  absl::Status Start(const ServerOptions& options);

  // Shared with the Drain handler, which may run before the monitor is there.
  struct Observers;

  engine::Engine& engine_;
  std::shared_ptr<Observers> observers_;
  Gate calls_;
  ControlService control_;
  LayerService layers_;
  StepService steps_;
  TensorService tensors_;
  PeerService peers_;
  std::unique_ptr<grpc::Server> server_;  // before the services it calls
  std::string bound_address_;
  std::string address_;
  bool stopped_ = false;
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_SERVER_H_
