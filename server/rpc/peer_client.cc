// Deliveries as gRPC calls: one attempt, or attempts with growing pauses while the peer is patient.
#include "server/rpc/peer_client.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/error.h"
#include "base/mutex.h"
#include "base/strings.h"
#include "expertd/v1/peer_service.grpc.pb.h"
#include "grpcpp/alarm.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "server/rpc/convert_group.h"
#include "server/rpc/grpc_process.h"
#include "server/rpc/keepalive.h"
#include "server/rpc/run_soon.h"
#include "server/rpc/status.h"

namespace expertd::rpc {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{20};
constexpr milliseconds kLongestPause{500};
constexpr int kFirstReconnectMs = 50;
constexpr int kLongestReconnectMs = 500;
// Also the time one attempt to connect may take.
constexpr int kConnectMs = 5000;

grpc::ChannelArguments PeerChannelArguments() {
  grpc::ChannelArguments arguments;
  // Connections of an epoch are its own: none starts out in the back-off of an earlier one.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kFirstReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kLongestReconnectMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kPingIntervalMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kPingTimeoutMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  // Patience is ours, with a deadline; a proxy would only add a hop between daemons.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return arguments;
}

// REQUIRES: deadline is not SteadyTime::max().
std::chrono::system_clock::time_point ToSystemTime(SteadyTime deadline) {
  return std::chrono::system_clock::now() + std::chrono::duration_cast<std::chrono::microseconds>(
                                                deadline - std::chrono::steady_clock::now());
}

// Deletes on a thread of gRPC's executor. What refers to a channel must not be deleted by a thread
// that runs the callbacks of calls: the last channel to go stops those threads, and joins them.
struct DeleteSoon {
  template <typename T>
  void operator()(T* object) const {
    RunSoon([object] { delete object; });
  }
};

}  // namespace

// A member and the channel to it.
class PeerClient::Peer {
 public:
  Peer(int64_t rank, std::string address,
       const std::shared_ptr<grpc::ChannelCredentials>& credentials, std::shared_ptr<Gate> gate)
      : visit_(std::move(gate)),
        name_(StrCat("rank ", rank, " at ", address)),
        stub_(v1::PeerService::NewStub(
            grpc::CreateCustomChannel(address, credentials, PeerChannelArguments()))) {}

  const std::string& name() const { return name_; }
  v1::PeerService::Stub& stub() { return *stub_; }

 private:
  // Destroyed last, after the channel.
  struct Visit {
    explicit Visit(std::shared_ptr<Gate> gate) : gate(std::move(gate)) { this->gate->Enter(); }
    ~Visit() { gate->Leave(); }
    const std::shared_ptr<Gate> gate;
  };

  const Visit visit_;
  const std::string name_;
  const std::unique_ptr<v1::PeerService::Stub> stub_;
};

// Something in flight that can be told to end.
class Cancellable {
 public:
  virtual ~Cancellable() = default;
  virtual void Cancel() = 0;
};

// What is in flight, so that the client's destructor can cancel it.
class PeerClient::Calls {
 public:
  // False after CancelAll: the call must not start.
  bool Add(std::shared_ptr<Cancellable> call) {
    MutexLock lock(mutex_);
    if (!closed_) calls_.insert(std::move(call));
    return !closed_;
  }
  void Remove(const std::shared_ptr<Cancellable>& call) {
    MutexLock lock(mutex_);
    calls_.erase(call);
  }
  void CancelAll() {
    std::set<std::shared_ptr<Cancellable>> calls;
    {
      MutexLock lock(mutex_);
      closed_ = true;
      calls.swap(calls_);
    }
    for (const auto& call : calls) call->Cancel();
  }

 private:
  Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<std::shared_ptr<Cancellable>> calls_ ABSL_GUARDED_BY(mutex_);
};

namespace {

// One delivery with all its attempts. Kept alive by the callback of the attempt or pause it is in.
template <typename Request, typename Response>
class Delivery final : public Cancellable,
                       public std::enable_shared_from_this<Delivery<Request, Response>> {
 public:
  // Starts one attempt; its callback gets the gRPC status.
  using Start = void (*)(v1::PeerService::Stub&, grpc::ClientContext*, const Request*, Response*,
                         std::function<void(grpc::Status)>);

  Delivery(std::shared_ptr<PeerClient::Peer> peer, std::shared_ptr<PeerClient::Calls> calls,
           Start start, SteadyTime deadline, bool patient, engine::DeliveryCallback done)
      : peer_(std::move(peer)),
        calls_(std::move(calls)),
        start_(start),
        deadline_(deadline),
        patient_(patient),
        done_(std::move(done)) {}

  Request* request() { return &request_; }

  void Run() {
    if (calls_->Add(this->shared_from_this())) {
      Attempt();
    } else {
      done_(Error(Reason::kCancelled).Text("the connections of the epoch are closed"));
    }
  }

  void Cancel() override {
    MutexLock lock(mutex_);
    cancelled_ = true;
    if (context_ != nullptr) context_->TryCancel();
    if (pause_ != nullptr) pause_->Cancel();
  }

 private:
  bool Cancelled() {
    MutexLock lock(mutex_);
    return cancelled_;
  }

  void Attempt() {
    grpc::ClientContext* context = nullptr;
    {
      MutexLock lock(mutex_);
      pause_.reset();  // its callback, which may be running this, keeps *this alive until then
      context_ = std::make_unique<grpc::ClientContext>();
      context = context_.get();
      context->set_wait_for_ready(false);
      if (deadline_ != SteadyTime::max()) context->set_deadline(ToSystemTime(deadline_));
      if (cancelled_) context->TryCancel();
    }
    start_(peer_->stub(), context, &request_, &response_,
           [self = this->shared_from_this()](const grpc::Status& status) { self->OnEnd(status); });
  }

  void OnEnd(const grpc::Status& status) {
    if (status.error_code() == grpc::StatusCode::UNAVAILABLE && patient_ && !Cancelled() &&
        Clock::Real().Now() + pause_length_ < deadline_) {
      Pause();
      return;
    }
    calls_->Remove(this->shared_from_this());
    done_(Explain(status));
  }

  void Pause() {
    const auto until = std::chrono::system_clock::now() + pause_length_;
    pause_length_ = std::min(2 * pause_length_, kLongestPause);
    MutexLock lock(mutex_);
    pause_ = std::make_unique<grpc::Alarm>();
    pause_->Set(until, [self = this->shared_from_this()](bool) { self->Attempt(); });
    if (cancelled_) pause_->Cancel();
  }

  // What the end of a call says about the peer.
  absl::Status Explain(const grpc::Status& status) {
    if (status.ok()) return absl::OkStatus();
    const absl::Status plain = FromGrpc(status);
    if (HasDetail(plain)) return plain;  // the peer's own answer
    if (Cancelled()) {
      return Error(Reason::kCancelled).Text("the connections of the epoch are closed");
    }
    if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
      return Error(Reason::kStepTimeout).Text(peer_->name(), " did not take a record in time");
    }
    return Error(Reason::kPeerLost)
        .Text(peer_->name(), " cannot be reached: ", status.error_message())
        .With("peer", peer_->name());
  }

  const std::shared_ptr<PeerClient::Peer> peer_;
  const std::shared_ptr<PeerClient::Calls> calls_;
  const Start start_;
  const SteadyTime deadline_;
  const bool patient_;
  const engine::DeliveryCallback done_;
  Request request_;
  Response response_;
  milliseconds pause_length_ = kFirstPause;
  Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<grpc::ClientContext> context_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<grpc::Alarm> pause_ ABSL_GUARDED_BY(mutex_);
};

using DeliverCall = Delivery<v1::DeliverRequest, v1::DeliverResponse>;
using CloseCall = Delivery<v1::CloseRequest, v1::CloseResponse>;

void StartDeliver(v1::PeerService::Stub& stub, grpc::ClientContext* context,
                  const v1::DeliverRequest* request, v1::DeliverResponse* response,
                  std::function<void(grpc::Status)> done) {
  stub.async()->Deliver(context, request, response, std::move(done));
}

void StartClose(v1::PeerService::Stub& stub, grpc::ClientContext* context,
                const v1::CloseRequest* request, v1::CloseResponse* response,
                std::function<void(grpc::Status)> done) {
  stub.async()->Close(context, request, response, std::move(done));
}

}  // namespace

PeerClient::PeerClient(const std::vector<engine::Member>& members, int64_t rank,
                       const std::shared_ptr<grpc::ChannelCredentials>& credentials,
                       const std::shared_ptr<Gate>& gate)
    : calls_(std::make_shared<Calls>()) {
  InitGrpcOnce();
  for (int64_t i = 0; i < static_cast<int64_t>(members.size()); ++i) {
    peers_.emplace_back();
    if (i == rank) continue;
    peers_.back() =
        std::shared_ptr<Peer>(new Peer(i, members[i].address, credentials, gate), DeleteSoon());
  }
}

PeerClient::~PeerClient() { calls_->CancelAll(); }

void PeerClient::Deliver(int64_t to_rank, const engine::PeerRecord& record, SteadyTime deadline,
                         bool patient, engine::DeliveryCallback done) {
  std::shared_ptr<DeliverCall> call(
      new DeliverCall(peers_[to_rank], calls_, &StartDeliver, deadline, patient, std::move(done)),
      DeleteSoon());
  ToProto(record, call->request());
  call->Run();
}

void PeerClient::Close(int64_t to_rank, const engine::PeerRecord& record, SteadyTime deadline) {
  std::shared_ptr<CloseCall> call(new CloseCall(peers_[to_rank], calls_, &StartClose, deadline,
                                                /*patient=*/false, [](const absl::Status&) {}),
                                  DeleteSoon());
  ToProto(record, call->request());
  call->Run();
}

}  // namespace expertd::rpc
