// Puts a daemon together from its config, and takes it apart in order.
#include "server/daemon.h"

#include <unistd.h>

#include <chrono>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "server/engine_metrics.h"
#include "server/exit_code.h"
#include "server/observe/listen_address.h"
#include "server/rpc/grpc_process.h"
#include "server/rpc/peer_client.h"
#include "server/version.h"

namespace expertd::server {
namespace {

using observe::HostPort;

constexpr std::chrono::seconds kPeerWait{2};

// Where data connections bind to: the host of `listen`, or the advertised one behind a wildcard.
std::string DataHost(const Config& config) {
  if (!config.data_host.empty()) return config.data_host;
  const absl::StatusOr<HostPort> listen = observe::ParseHostPort(config.listen);
  if (listen.ok() && !observe::IsWildcard(listen->host)) return listen->host;
  if (config.advertise.empty()) return observe::HostName();
  const absl::StatusOr<HostPort> advertised = observe::ParseHostPort(config.advertise);
  return advertised.ok() ? advertised->host : config.advertise;
}

// The device thread cannot be stopped from outside: only a new process helps.
void ExitStuck(const absl::Status& status) {
  const bool fault = HasReason(status, Reason::kDeviceFault);
  Log(LogLevel::kError, fault ? "device_fault" : "device_thread_stuck")
      .Field("status", StdView(status.message()));
  _exit(static_cast<int>(fault ? ExitCode::kDeviceFault : ExitCode::kStuck));
}

engine::EngineOptions MakeEngineOptions(const Config& config,
                                        const std::shared_ptr<rpc::Gate>& gate) {
  engine::EngineOptions options;
  options.device = config.device;
  options.slot = config.slot;
  options.host = observe::HostName();
  options.version = std::string(Version());
  options.data_host = DataHost(config);
  options.expert_mlp = config.expert_mlp;
  options.max_receive_message_bytes = config.max_receive_message_bytes;
  options.queue_capacity = config.queue_capacity;
  options.bytes_in_flight = config.bytes_in_flight;
  options.tensor_memory_bytes = config.tensor_memory_bytes;
  options.peer_transport = [credentials = rpc::MakeChannelCredentials(config.tls), gate](
                               const std::vector<engine::Member>& members, int64_t rank) {
    return std::make_unique<rpc::PeerClient>(members, rank, credentials, gate);
  };
  options.on_stuck = &ExitStuck;
  return options;
}

rpc::ServerOptions MakeServerOptions(const Config& config) {
  rpc::ServerOptions options;
  options.listen = config.listen;
  options.advertise = config.advertise;
  options.tls = config.tls;
  options.identity.version = std::string(Version());
  options.identity.build = std::string(Build());
  options.identity.host = observe::HostName();
  options.identity.max_receive_message_bytes = config.max_receive_message_bytes;
  options.identity.queue_capacity = config.queue_capacity;
  options.identity.bytes_in_flight = config.bytes_in_flight;
  options.identity.tensor_memory_bytes = config.tensor_memory_bytes;
  options.identity.default_backend = config.default_backend;
  return options;
}

observe::ProbeSource MakeProbeSource(const engine::Engine& engine) {
  return {.metrics = [&engine] { return MetricsOf(ReadMetrics(engine)); },
          .ready = [&engine] { return !engine.Draining(); },
          .group_ready =
              [&engine] { return engine.DescribeGroup().state == engine::GroupState::kReady; }};
}

// Waits until the drain is done, at most until the deadline.
void DrainUntil(engine::Engine& engine, SteadyTime deadline) {
  struct Done {
    Mutex mutex;
    CondVar changed;
    bool done ABSL_GUARDED_BY(mutex) = false;
  };
  const auto state = std::make_shared<Done>();  // the callback may come after the deadline
  engine.Drain(/*resume=*/false, [state](const absl::Status& status) {
    if (!status.ok()) Log(LogLevel::kWarning, "drain_failed").Field("status", status.ToString());
    MutexLock lock(state->mutex);
    state->done = true;
    state->changed.NotifyAll();
  });
  MutexLock lock(state->mutex);
  while (!state->done && Clock::Real().Now() < deadline) {
    state->changed.WaitUntil(state->mutex, deadline);
  }
  if (!state->done) Log(LogLevel::kWarning, "drain_timeout");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Create(const Config& config) {
  rpc::InitGrpcOnce();  // before the first credentials
  std::unique_ptr<Daemon> daemon(new Daemon);
  ASSIGN_OR_RETURN(daemon->engine_,
                   engine::Engine::Create(MakeEngineOptions(config, daemon->peers_)));
  ASSIGN_OR_RETURN(daemon->server_,
                   rpc::Server::Create(MakeServerOptions(config), *daemon->engine_));
  if (!config.probe_listen.empty()) {
    ASSIGN_OR_RETURN(const HostPort probe, observe::ParseHostPort(config.probe_listen));
    ASSIGN_OR_RETURN(daemon->probe_,
                     observe::ProbeServer::Create(probe, MakeProbeSource(*daemon->engine_)));
  }
  return daemon;
}

Daemon::~Daemon() {
  probe_ = nullptr;
  server_ = nullptr;
  engine_ = nullptr;
  // Only so that nothing of this daemon runs while the process ends.
  if (!peers_->WaitUntilEmpty(Clock::Real().Now() + kPeerWait)) {
    Log(LogLevel::kWarning, "peer_connections_left");
  }
}

void Daemon::Shutdown(SteadyTime deadline) {
  server_->StopAdvertising();
  DrainUntil(*engine_, deadline);
  server_->Shutdown(deadline);
}

}  // namespace expertd::server
