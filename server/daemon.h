// One daemon: an engine, its gRPC server and its probe server. Several can live in one process.
#ifndef SERVER_DAEMON_H_
#define SERVER_DAEMON_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "server/config.h"
#include "server/engine/engine.h"
#include "server/observe/probe_server.h"
#include "server/rpc/gate.h"
#include "server/rpc/server.h"

namespace expertd::server {

class Daemon {
 public:
  // Serves when it returns. config.simulate is not looked at.
  // Errors: BACKEND_UNSUPPORTED when the device cannot be had; as rpc::Server and ProbeServer.
  static absl::StatusOr<std::unique_ptr<Daemon>> Create(const Config& config);
  // Stops at once when Shutdown has not been called.
  ~Daemon();

  // "host:port" that the gRPC server is bound to.
  const std::string& address() const { return server_->bound_address(); }
  // "host:port" that other daemons reach this one at.
  const std::string& advertised_address() const { return server_->address(); }
  // "host:port" of the probe server; empty when it is off.
  std::string probe_address() const { return probe_ == nullptr ? "" : probe_->address(); }
  engine::Engine& engine() { return *engine_; }

  // Takes no new work, lets queued steps finish and leaves the group until the deadline, then
  // cancels what is left and stops serving. Blocks until then. Probes are answered to the end.
  void Shutdown(SteadyTime deadline);

 private:
  Daemon() = default;

  // Entered by the engine's connections to other daemons; shared with them.
  std::shared_ptr<rpc::Gate> peers_ = std::make_shared<rpc::Gate>();
  // Destroyed in reverse order: the servers call the engine.
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<rpc::Server> server_;
  std::unique_ptr<observe::ProbeServer> probe_;
};

}  // namespace expertd::server

#endif  // SERVER_DAEMON_H_
