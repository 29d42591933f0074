// Group lifecycle calls: decoded here, decided by the engine, answered whenever it has an answer.
#include "server/rpc/control_service.h"

#include <unistd.h>

#include <chrono>
#include <utility>

#include "base/error.h"
#include "base/strings.h"
#include "server/rpc/convert_group.h"
#include "server/rpc/convert_step.h"
#include "server/rpc/unary_call.h"
#include "server/rpc/unsupported.h"

namespace expertd::rpc {
namespace {

constexpr int64_t kMaxTopK = 32;
constexpr int64_t kMaxWatchMs = 60000;
constexpr size_t kMaxAbortReasonBytes = 512;

}  // namespace

void ControlService::SetAddress(const std::string& address) {
  MutexLock lock(mutex_);
  address_ = address;
}

grpc::ServerUnaryReactor* ControlService::GetServerInfo(grpc::CallbackServerContext* context,
                                                        const v1::GetServerInfoRequest*,
                                                        v1::GetServerInfoResponse* response) {
  ToProto(engine_.Facts(), response);
  response->set_version(identity_.version);
  response->set_build(identity_.build);
  response->set_host(identity_.host);
  response->set_process_id(getpid());
  v1::ServerLimits* limits = response->mutable_limits();
  limits->set_max_receive_message_bytes(identity_.max_receive_message_bytes);
  limits->set_max_top_k(kMaxTopK);
  limits->set_queue_capacity(identity_.queue_capacity);
  limits->set_bytes_in_flight(identity_.bytes_in_flight);
  limits->set_tensor_memory_bytes(identity_.tensor_memory_bytes);
  const engine::GroupInfo group = engine_.DescribeGroup();
  response->set_group_id(group.group_id);
  response->set_epoch(group.epoch);
  response->set_group_state(static_cast<v1::GroupState>(group.state));
  response->set_highest_epoch_seen(engine_.HighestEpochSeen());
  response->set_draining(engine_.Draining());
  for (const Support& method : UnsupportedMethods()) ToProto(method, response->add_methods());
  {
    MutexLock lock(mutex_);
    response->set_address(address_);
  }
  return AnswerNow(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* ControlService::CreateBootstrapId(
    grpc::CallbackServerContext* context, const v1::CreateBootstrapIdRequest* request,
    v1::CreateBootstrapIdResponse* response) {
  Violations violations;
  CheckId(request->group_id(), "group_id", &violations);
  CheckId(request->claimant(), "claimant", &violations);
  if (request->epoch() == 0) {
    violations.Add(Reason::kConfigInvalid, "epoch", "got 0, need a non-zero number");
  }
  if (!violations.empty()) return AnswerNow(context, violations.ToStatus("invalid request"));
  const absl::StatusOr<engine::BootstrapClaim> claim =
      engine_.CreateBootstrapId(request->group_id(), request->epoch(), request->claimant());
  if (claim.ok()) {
    response->set_bootstrap_id(claim->bootstrap_id);
    response->set_fingerprint(claim->fingerprint);
    response->set_root_incarnation(claim->root_incarnation);
  }
  return AnswerNow(context, claim.status());
}

grpc::ServerUnaryReactor* ControlService::JoinGroup(grpc::CallbackServerContext* context,
                                                    const v1::JoinGroupRequest* request,
                                                    v1::JoinGroupResponse* response) {
  absl::StatusOr<engine::JoinRequest> join = FromProto(*request);
  if (!join.ok()) return AnswerNow(context, join.status());
  join->deadline = DeadlineOf(*context);
  if (join->config.backend.empty()) join->config.backend = identity_.default_backend;
  auto* call = new LateCall;
  engine_.JoinGroup(*std::move(join), [answerer = call->answerer(),
                                       response](absl::StatusOr<engine::GroupInfo> group) {
    answerer.Answer(group.status(), [&] { ToProto(*group, response->mutable_group()); });
  });
  return call;
}

grpc::ServerUnaryReactor* ControlService::LeaveGroup(grpc::CallbackServerContext* context,
                                                     const v1::LeaveGroupRequest* request,
                                                     v1::LeaveGroupResponse*) {
  Violations violations;
  CheckId(request->group_id(), "group_id", &violations);
  if (!violations.empty()) return AnswerNow(context, violations.ToStatus("invalid request"));
  auto* call = new LateCall;
  engine_.LeaveGroup(
      request->group_id(), request->epoch(),
      [answerer = call->answerer()](const absl::Status& status) { answerer.Answer(status); });
  return call;
}

grpc::ServerUnaryReactor* ControlService::AbortGroup(grpc::CallbackServerContext* context,
                                                     const v1::AbortGroupRequest* request,
                                                     v1::AbortGroupResponse*) {
  Violations violations;
  CheckId(request->group_id(), "group_id", &violations);
  if (!violations.empty()) return AnswerNow(context, violations.ToStatus("invalid request"));
  auto* call = new LateCall;
  engine_.AbortGroup(
      request->group_id(), request->epoch(), request->reason().substr(0, kMaxAbortReasonBytes),
      [answerer = call->answerer()](const absl::Status& status) { answerer.Answer(status); });
  return call;
}

grpc::ServerUnaryReactor* ControlService::DescribeGroup(grpc::CallbackServerContext* context,
                                                        const v1::DescribeGroupRequest*,
                                                        v1::DescribeGroupResponse* response) {
  ToProto(engine_.DescribeGroup(), response->mutable_group());
  return AnswerNow(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* ControlService::WatchGroup(grpc::CallbackServerContext* context,
                                                     const v1::WatchGroupRequest* request,
                                                     v1::WatchGroupResponse* response) {
  if (request->timeout_ms() < 0 || request->timeout_ms() > kMaxWatchMs) {
    return AnswerNow(context, Error(Reason::kConfigInvalid)
                                  .Text("invalid request")
                                  .At("timeout_ms", StrCat("got ", request->timeout_ms(),
                                                           ", need 0 to ", kMaxWatchMs)));
  }
  const SteadyTime until = Clock::Real().Now() + std::chrono::milliseconds(request->timeout_ms());
  auto* call = new LateCall;
  engine_.WatchGroup(request->known_version(), until,
                     [answerer = call->answerer(), response](const engine::GroupInfo& group) {
                       answerer.Answer(absl::OkStatus(),
                                       [&] { ToProto(group, response->mutable_group()); });
                     });
  return call;
}

grpc::ServerUnaryReactor* ControlService::Drain(grpc::CallbackServerContext*,
                                                const v1::DrainRequest* request,
                                                v1::DrainResponse*) {
  auto* call = new LateCall;
  engine_.Drain(request->resume(), [answerer = call->answerer()](const absl::Status& status) {
    answerer.Answer(status);
  });
  on_drain_();
  return call;
}

}  // namespace expertd::rpc
