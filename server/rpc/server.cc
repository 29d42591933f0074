// Builds the gRPC server: arguments, services, plugins; checks what was bound.
#include "server/rpc/server.h"

#include <unistd.h>

#include <chrono>
#include <initializer_list>
#include <utility>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/server_builder.h"
#include "server/observe/listen_address.h"
#include "server/rpc/grpc_process.h"
#include "server/rpc/keepalive.h"

namespace expertd::rpc {
namespace {

using observe::HostPort;
using observe::JoinHostPort;
using observe::ParseHostPort;

// Threads of the synchronous services (reflection, channelz); ours use gRPC's shared callback
// threads, whose number gRPC takes from the number of cores.
constexpr int kSyncThreads = 2;
constexpr int kMaxThreads = 8;
// Larger frames than gRPC's 16 KiB: a step's message is megabytes.
constexpr int kFrameBytes = 1 << 20;

constexpr std::chrono::milliseconds kCloseTime{100};

void SetArguments(const ServerOptions& options, grpc::ServerBuilder& builder) {
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kPingTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kMinPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytes);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, 1);
  builder.SetMaxReceiveMessageSize(static_cast<int>(options.identity.max_receive_message_bytes));
  builder.SetMaxSendMessageSize(-1);
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, kSyncThreads);
  grpc::ResourceQuota quota("expertd");
  quota.SetMaxThreads(kMaxThreads);
  builder.SetResourceQuota(quota);
}

std::string AdvertisedAddress(const ServerOptions& options, const HostPort& bound) {
  if (options.advertise.empty()) {
    return JoinHostPort(observe::IsWildcard(bound.host) ? observe::HostName() : bound.host,
                        bound.port);
  }
  const absl::StatusOr<HostPort> given = ParseHostPort(options.advertise);
  if (given.ok()) return JoinHostPort(given->host, given->port == 0 ? bound.port : given->port);
  return JoinHostPort(options.advertise, bound.port);
}

// Whether the address can be had. Asked before gRPC binds it, which does not say why it failed.
absl::Status CheckBindable(const HostPort& address) {
  const absl::StatusOr<int> socket = observe::Listen(address);
  if (!socket.ok()) return socket.status();
  close(*socket);
  return absl::OkStatus();
}

}  // namespace

struct Server::Observers {
  Mutex mutex;
  std::shared_ptr<HealthMonitor> health ABSL_GUARDED_BY(mutex);

  std::shared_ptr<HealthMonitor> Health() {
    MutexLock lock(mutex);
    return health;
  }
};

absl::StatusOr<std::unique_ptr<Server>> Server::Create(const ServerOptions& options,
                                                       engine::Engine& engine) {
  InitGrpcOnce();
  std::unique_ptr<Server> server(new Server(options, engine));
  RETURN_IF_ERROR(server->Start(options));
  return server;
}

Server::Server(const ServerOptions& options, engine::Engine& engine)
    : engine_(engine),
      observers_(std::make_shared<Observers>()),
      control_(engine, options.identity,
               [observers = observers_] {
                 if (const auto health = observers->Health()) health->Refresh();
               }),
      layers_(engine, calls_),
      steps_(engine, calls_),
      tensors_(engine, calls_, options.identity.tensor_memory_bytes),
      peers_(engine) {}

absl::Status Server::Start(const ServerOptions& options) {
  ASSIGN_OR_RETURN(HostPort address, ParseHostPort(options.listen));
  RETURN_IF_ERROR(CheckBindable(address));
  if (address.port != 0) control_.SetAddress(AdvertisedAddress(options, address));
  grpc::ServerBuilder builder;
  SetArguments(options, builder);
  int port = 0;
  builder.AddListeningPort(JoinHostPort(address.host, address.port),
                           MakeServerCredentials(options.tls), &port);
  for (grpc::Service* service :
       std::initializer_list<grpc::Service*>{&control_, &layers_, &steps_, &tensors_, &peers_}) {
    builder.RegisterService(service);
  }
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || port <= 0) {
    if (server_ != nullptr) server_->Shutdown();
    server_ = nullptr;
    // Taken in the meantime, or something that only gRPC knows.
    RETURN_IF_ERROR(CheckBindable(address));
    return Error(Reason::kInternal).Text("gRPC cannot listen on ", options.listen);
  }
  address.port = port;
  bound_address_ = JoinHostPort(address.host, address.port);
  address_ = AdvertisedAddress(options, address);
  control_.SetAddress(address_);
  auto health = std::make_shared<HealthMonitor>(engine_, *server_->GetHealthCheckService());
  {
    MutexLock lock(observers_->mutex);
    observers_->health = health;
  }
  health->Start();
  return absl::OkStatus();
}

Server::~Server() { Shutdown(SteadyTime::min()); }

void Server::StopAdvertising() { observers_->Health()->Stop(); }

void Server::Shutdown(SteadyTime deadline) {
  if (server_ == nullptr || stopped_) return;
  stopped_ = true;
  if (const auto health = observers_->Health()) health->Stop();
  calls_.WaitUntilEmpty(deadline);
  // gRPC's own waiting also waits for idle connections to go, which some clients keep until their
  // next call: so it gets only the time that a client needs which reads its connection.
  server_->Shutdown(std::chrono::system_clock::now() + kCloseTime);
  server_->Wait();
}

}  // namespace expertd::rpc
