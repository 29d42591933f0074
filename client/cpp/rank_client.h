// Typed calls to one daemon, or to several daemons at once.
//
//   RankClient client({.rank = 0, .address = "10.0.0.1:7070"}, group.max_message_bytes());
//   absl::StatusOr<v1::ListLayersResponse> layers = client.Call(v1::ListLayersRequest(), options);
//   absl::StatusOr<uint64_t> epoch = client.PutTensor("x", tensor, deadline);
// Thread-safe; a call blocks its thread until it has ended, whatever the options ask for.
#ifndef CLIENT_CPP_RANK_CLIENT_H_
#define CLIENT_CPP_RANK_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/channel.h"
#include "client/cpp/fan_out.h"
#include "client/cpp/methods.h"

namespace expertd::client {

// One parameter shard as GetParameter streams it.
struct ParameterShard {
  v1::Tensor tensor;  // With its payload.
  v1::Slice slice;
  uint64_t weights_version = 0;
};

class RankClient {
 public:
  // Does not connect. REQUIRES: CheckAddress(origin.address) is OK.
  explicit RankClient(Origin origin, int64_t max_message_bytes = kControlMessageBytes,
                      const std::shared_ptr<grpc::ChannelCredentials>& credentials = nullptr)
      : origin_(std::move(origin)),
        channel_(OpenChannel(origin_.address, max_message_bytes, credentials)),
        control_(v1::ControlService::NewStub(channel_)),
        layers_(v1::LayerService::NewStub(channel_)),
        steps_(v1::StepService::NewStub(channel_)),
        tensors_(v1::TensorService::NewStub(channel_)) {}

  const Origin& origin() const { return origin_; }
  grpc::Channel& channel() { return *channel_; }

  // The call as FanOut takes it. `request` and `response` must outlive it.
  template <typename Request>
  PendingCall Pending(const Request& request, ResponseOf<Request>* response) {
    auto& stub = Stub(static_cast<typename Method<Request>::Service*>(nullptr));
    return {origin_, [&stub, &request, response](grpc::ClientContext* context,
                                                 std::function<void(grpc::Status)> done) {
              Method<Request>::Start(stub, context, &request, response, std::move(done));
            }};
  }

  // Errors: those of the method, as FromGrpc gives them.
  template <typename Request>
  absl::StatusOr<ResponseOf<Request>> Call(const Request& request, const CallOptions& options) {
    ResponseOf<Request> response;
    absl::Status status = FanOut({Pending(request, &response)}, options).front();
    if (!status.ok()) return status;
    return response;
  }

  // Reads the whole stream. Errors: those of the method; INTERNAL for a shard that is incomplete.
  absl::StatusOr<ParameterShard> GetParameter(const v1::GetParameterRequest& request,
                                              absl::Time deadline);

  // Stores an inline tensor on the daemon in chunks; a tensor without payload becomes zeros. Steps
  // name it with BufferTensor and SetBuffer (tensor.h). Returns the epoch it belongs to.
  // Errors: those of the method; PAYLOAD_SIZE_MISMATCH for a payload that is not the whole tensor.
  absl::StatusOr<uint64_t> PutTensor(const std::string& buffer_id, const v1::Tensor& tensor,
                                     absl::Time deadline);
  // Reads a resident tensor, inline. Errors: those of the method; INTERNAL when it is incomplete.
  absl::StatusOr<v1::Tensor> GetTensor(const std::string& buffer_id, absl::Time deadline);

 private:
  v1::ControlService::StubInterface& Stub(v1::ControlService*) { return *control_; }
  v1::LayerService::StubInterface& Stub(v1::LayerService*) { return *layers_; }
  v1::StepService::StubInterface& Stub(v1::StepService*) { return *steps_; }
  v1::TensorService::StubInterface& Stub(v1::TensorService*) { return *tensors_; }

  Origin origin_;
  std::shared_ptr<grpc::Channel> channel_;  // gRPC's stubs share it.
  std::unique_ptr<v1::ControlService::StubInterface> control_;
  std::unique_ptr<v1::LayerService::StubInterface> layers_;
  std::unique_ptr<v1::StepService::StubInterface> steps_;
  std::unique_ptr<v1::TensorService::StubInterface> tensors_;
};

// What every daemon answered; a response means something only where its status is OK.
template <typename Request>
struct Replies {
  std::vector<ResponseOf<Request>> responses;
  std::vector<absl::Status> statuses;
};

// Sends requests[i] to clients[i], all at once.
template <typename Request>
Replies<Request> CallAll(absl::Span<RankClient* const> clients,
                         const std::vector<Request>& requests, const CallOptions& options) {
  Replies<Request> replies;
  replies.responses.resize(clients.size());
  std::vector<PendingCall> calls;
  for (size_t i = 0; i < clients.size(); ++i) {
    calls.push_back(clients[i]->Pending(requests[i], &replies.responses[i]));
  }
  replies.statuses = FanOut(calls, options);
  return replies;
}

// The same request to all; the most telling error, or all responses.
template <typename Request>
absl::StatusOr<std::vector<ResponseOf<Request>>> AskAll(absl::Span<RankClient* const> clients,
                                                        const Request& request,
                                                        const CallOptions& options) {
  Replies<Request> replies =
      CallAll(clients, std::vector<Request>(clients.size(), request), options);
  const size_t telling = MostTelling(replies.statuses);
  if (telling != kAllOk) return replies.statuses[telling];
  return std::move(replies.responses);
}

}  // namespace expertd::client

#endif  // CLIENT_CPP_RANK_CLIENT_H_
