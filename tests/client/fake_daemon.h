// A daemon that only pretends: a real gRPC server whose answers the test decides.
#ifndef TESTS_CLIENT_FAKE_DAEMON_H_
#define TESTS_CLIENT_FAKE_DAEMON_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/error.h"
#include "base/mutex.h"
#include "base/strings.h"
#include "expertd/v1/control_service.grpc.pb.h"
#include "expertd/v1/step_service.grpc.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"

namespace expertd::client {

// As the service encodes its errors.
inline grpc::Status ToGrpc(const absl::Status& status) {
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(ReasonName(ReasonOf(status))));
  info.set_domain("expertd.v1");
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  details.add_details()->PackFrom(info);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()),
                      details.SerializeAsString());
}

class FakeDaemon final : public v1::ControlService::Service {
 public:
  // What a Forward does; returns its status. May block until `cancelled` says so.
  using OnForward =
      std::function<grpc::Status(const v1::StepHeader&, const std::function<bool()>& cancelled)>;
  using OnJoin = std::function<grpc::Status(const v1::JoinGroupRequest&)>;

  explicit FakeDaemon(int64_t slot) : steps_(this) {
    info_.set_slot(slot);
    info_.set_incarnation(static_cast<uint64_t>(1000 + slot));
    info_.set_version("0.1.0");
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    builder.RegisterService(&steps_);
    server_ = builder.BuildAndStart();
    address_ = StrCat("127.0.0.1:", port);
    info_.set_address(address_);
  }
  ~FakeDaemon() override { server_->Shutdown(absl::ToChronoTime(absl::Now())); }

  const std::string& address() const { return address_; }

  // Set these before calls run.
  OnForward on_forward;
  OnJoin on_join;
  // Changes the group before each DescribeGroup.
  std::function<void(v1::GroupInfo&)> on_describe;

  // State that both sides touch.
  void Set(const std::function<void(v1::GetServerInfoResponse&, v1::GroupInfo&)>& change) {
    MutexLock lock(mutex_);
    change(info_, group_);
  }
  std::vector<v1::AbortGroupRequest> aborts() {
    MutexLock lock(mutex_);
    return aborts_;
  }
  std::vector<v1::StepHeader> headers() {
    MutexLock lock(mutex_);
    return headers_;
  }

  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse* response) override {
    MutexLock lock(mutex_);
    *response = info_;
    return grpc::Status::OK;
  }
  grpc::Status CreateBootstrapId(grpc::ServerContext*, const v1::CreateBootstrapIdRequest* request,
                                 v1::CreateBootstrapIdResponse* response) override {
    MutexLock lock(mutex_);
    if (request->epoch() <= info_.highest_epoch_seen()) {
      return ToGrpc(Error(Reason::kEpochStale).Text("stale"));
    }
    info_.set_highest_epoch_seen(request->epoch());
    response->set_bootstrap_id("secret");
    return grpc::Status::OK;
  }
  grpc::Status JoinGroup(grpc::ServerContext*, const v1::JoinGroupRequest* request,
                         v1::JoinGroupResponse* response) override {
    if (on_join) {
      if (grpc::Status status = on_join(*request); !status.ok()) return status;
    }
    MutexLock lock(mutex_);
    group_.set_group_id(request->group_id());
    group_.set_epoch(request->epoch());
    group_.set_rank(request->rank());
    *group_.mutable_members() = request->members();
    *group_.mutable_config() = request->config();
    group_.set_state(v1::GROUP_STATE_READY);
    group_.set_next_sequence(1);
    *response->mutable_group() = group_;
    return grpc::Status::OK;
  }
  grpc::Status LeaveGroup(grpc::ServerContext*, const v1::LeaveGroupRequest*,
                          v1::LeaveGroupResponse*) override {
    MutexLock lock(mutex_);
    group_.Clear();
    return grpc::Status::OK;
  }
  grpc::Status AbortGroup(grpc::ServerContext*, const v1::AbortGroupRequest* request,
                          v1::AbortGroupResponse*) override {
    MutexLock lock(mutex_);
    aborts_.push_back(*request);
    return grpc::Status::OK;
  }
  grpc::Status DescribeGroup(grpc::ServerContext*, const v1::DescribeGroupRequest*,
                             v1::DescribeGroupResponse* response) override {
    MutexLock lock(mutex_);
    if (on_describe) on_describe(group_);
    *response->mutable_group() = group_;
    return grpc::Status::OK;
  }

 private:
  class Steps final : public v1::StepService::Service {
   public:
    explicit Steps(FakeDaemon* daemon) : daemon_(daemon) {}
    grpc::Status Forward(grpc::ServerContext* context, const v1::ForwardRequest* request,
                         v1::ForwardResponse* response) override {
      {
        MutexLock lock(daemon_->mutex_);
        daemon_->headers_.push_back(request->header());
      }
      response->set_ticket(request->header().sequence());
      if (!daemon_->on_forward) return grpc::Status::OK;
      return daemon_->on_forward(request->header(), [context] { return context->IsCancelled(); });
    }

   private:
    FakeDaemon* daemon_;
  };

  Mutex mutex_;
  v1::GetServerInfoResponse info_;
  v1::GroupInfo group_;
  std::vector<v1::AbortGroupRequest> aborts_;
  std::vector<v1::StepHeader> headers_;
  Steps steps_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace expertd::client

#endif  // TESTS_CLIENT_FAKE_DAEMON_H_
