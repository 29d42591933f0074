// N daemons in this process on ephemeral ports, and a group of them formed through real gRPC.
//
// Usage:
//   ASSERT_OK_AND_ASSIGN-like: auto group = DaemonGroup::Start({.ranks = 2, .config =
//   SmallConfig()}); auto replies = (*group)->Collective(&v1::StepService::Stub::Forward,
//   requests);  // one per rank
// Every call has a deadline. For tests only; not thread-safe, but Collective calls all ranks at
// once.
#ifndef TESTS_TESTING_DAEMON_GROUP_H_
#define TESTS_TESTING_DAEMON_GROUP_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/ids.h"
#include "expertd/v1/control_service.grpc.pb.h"
#include "expertd/v1/layer_service.grpc.pb.h"
#include "expertd/v1/step_service.grpc.pb.h"
#include "expertd/v1/tensor_service.grpc.pb.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "server/daemon.h"
#include "server/rpc/status.h"

namespace expertd::testing {

// What one rank answered.
template <typename Response>
struct Reply {
  absl::Status status;
  Response response;
};

// A config that small layers fit in: f32 tokens, loopback.
v1::GroupConfig SmallGroupConfig(int64_t ranks);

struct DaemonGroupOptions {
  int64_t ranks = 2;
  v1::GroupConfig config = SmallGroupConfig(ranks);
  std::string group_id = "test";
  std::chrono::milliseconds call_timeout{20000};
};

class DaemonGroup {
 public:
  // Starts the daemons only.
  static absl::StatusOr<std::unique_ptr<DaemonGroup>> StartDaemons(DaemonGroupOptions options);
  // Starts them and forms the group.
  static absl::StatusOr<std::unique_ptr<DaemonGroup>> Start(DaemonGroupOptions options);

  // Forms a new epoch of all daemons; `configs` has one config per rank, or is empty for options'.
  std::vector<Reply<v1::JoinGroupResponse>> Join(std::vector<v1::GroupConfig> configs = {});

  int64_t ranks() const { return static_cast<int64_t>(daemons_.size()); }
  server::Daemon& daemon(int64_t rank) { return *daemons_[rank]; }
  const std::shared_ptr<grpc::Channel>& channel(int64_t rank) { return channels_[rank]; }
  uint64_t epoch() const { return epoch_; }
  // The sequence of the next Collective; a test may set it.
  uint64_t sequence = 1;

  // One call to one rank.
  template <typename Stub, typename Request, typename Response>
  Reply<Response> Call(int64_t rank,
                       grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                    Response*),
                       const Request& request) {
    Reply<Response> reply;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + options_.call_timeout);
    Stub stub(channels_[rank]);
    reply.status = rpc::FromGrpc((stub.*method)(&context, request, &reply.response));
    return reply;
  }

  // The same method on all ranks at once; requests[rank].
  template <typename Stub, typename Request, typename Response>
  std::vector<Reply<Response>> CallAll(grpc::Status (Stub::*method)(grpc::ClientContext*,
                                                                    const Request&, Response*),
                                       const std::vector<Request>& requests) {
    std::vector<Reply<Response>> replies(requests.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < requests.size(); ++rank) {
      threads.emplace_back([this, rank, method, &requests, &replies] {
        replies[rank] = Call(static_cast<int64_t>(rank), method, requests[rank]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return replies;
  }

  // CallAll of a collective: fills in the headers and moves `sequence` on.
  template <typename Stub, typename Request, typename Response>
  std::vector<Reply<Response>> Collective(grpc::Status (Stub::*method)(grpc::ClientContext*,
                                                                       const Request&, Response*),
                                          std::vector<Request> requests) {
    for (Request& request : requests) *request.mutable_header() = Header();
    ++sequence;
    return CallAll(method, requests);
  }

  // The header of the next collective, with a fresh request id.
  v1::StepHeader Header() const;

 private:
  explicit DaemonGroup(DaemonGroupOptions options) : options_(std::move(options)) {}
  absl::StatusOr<v1::JoinGroupRequest> Claim();

  const DaemonGroupOptions options_;
  std::vector<std::unique_ptr<server::Daemon>> daemons_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  uint64_t epoch_ = 0;
};

// The first status of `replies` that is not OK, with its rank; OK when all are.
template <typename Response>
absl::Status FirstError(const std::vector<Reply<Response>>& replies) {
  for (size_t rank = 0; rank < replies.size(); ++rank) {
    if (!replies[rank].status.ok()) {
      return absl::Status(replies[rank].status.code(),
                          absl::StrCat("rank ", rank, ": ", replies[rank].status.message()));
    }
  }
  return absl::OkStatus();
}

// A tensor of f32 values.
v1::Tensor F32Tensor(const std::vector<int64_t>& shape, const std::vector<float>& values);
std::vector<float> F32Values(const v1::Tensor& tensor);
v1::Tensor I64Tensor(const std::vector<int64_t>& shape, const std::vector<int64_t>& values);

}  // namespace expertd::testing

#endif  // TESTS_TESTING_DAEMON_GROUP_H_
