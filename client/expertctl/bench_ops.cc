// Closures over prepared requests.
#include "client/expertctl/bench_ops.h"

#include <memory>
#include <utility>

#include "absl/time/clock.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "client/cpp/tensor.h"
#include "client/expertctl/workload.h"

namespace expertd::expertctl {
namespace {

template <typename Message>
int64_t Bytes(const std::vector<Message>& messages) {
  int64_t bytes = 0;
  for (const Message& message : messages) bytes += static_cast<int64_t>(message.ByteSizeLong());
  return bytes;
}

// Runs `requests` once, and makes an operation of doing so again.
template <typename Request>
absl::StatusOr<std::vector<client::ResponseOf<Request>>> AddOp(const BenchSpec& spec,
                                                               const std::string& name,
                                                               std::vector<Request> requests,
                                                               std::vector<BenchOp>* ops) {
  ASSIGN_OR_RETURN(std::vector<client::ResponseOf<Request>> responses, spec.driver->Run(requests));
  BenchOp op;
  op.name = name;
  op.request_bytes = Bytes(requests);
  op.response_bytes = Bytes(responses);
  op.run = [driver = spec.driver, requests = std::move(requests)] {
    return driver->Run(requests).status();
  };
  ops->push_back(std::move(op));
  return responses;
}

std::vector<Workload> Workloads(const BenchSpec& spec) {
  std::vector<Workload> workloads;
  for (int64_t rank = 0; rank < spec.driver->world(); ++rank) {
    workloads.push_back({spec.config, spec.tokens, spec.seed, rank});
  }
  return workloads;
}

BenchOp Ping(const std::vector<client::RankClient*>& ranks) {
  BenchOp op;
  op.name = "ping";
  op.run = [ranks] {
    return client::AskAll(ranks, v1::GetServerInfoRequest(),
                          {.deadline = absl::Now() + absl::Seconds(10)})
        .status();
  };
  return op;
}

absl::Status ReleaseAll(const std::vector<client::RankClient*>& ranks,
                        const std::vector<v1::PrepareResponse>& prepared) {
  std::vector<v1::ReleaseTicketRequest> requests(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r) requests[r].add_handles(prepared[r].handle());
  const auto replies =
      client::CallAll(ranks, requests, {.deadline = absl::Now() + absl::Seconds(10)});
  const size_t telling = client::MostTelling(replies.statuses);
  return telling == client::kAllOk ? absl::OkStatus() : replies.statuses[telling];
}

// Prepare frees its handle again, so that a long run does not fill the daemon.
absl::StatusOr<std::vector<uint64_t>> AddPrepare(const BenchSpec& spec,
                                                 const std::vector<client::RankClient*>& ranks,
                                                 std::vector<BenchOp>* ops) {
  std::vector<v1::PrepareRequest> requests;
  for (const Workload& workload : Workloads(spec)) {
    v1::PrepareRequest& request = requests.emplace_back();
    request.set_layer_id(spec.layer_id);
    *request.mutable_topk_ids() = RandomIds(workload);
  }
  ASSIGN_OR_RETURN(const std::vector<v1::PrepareResponse> first, spec.driver->Run(requests));
  std::vector<uint64_t> handles;
  for (const v1::PrepareResponse& response : first) handles.push_back(response.handle());
  BenchOp op;
  op.name = "prepare_release";
  op.request_bytes = Bytes(requests);
  op.response_bytes = Bytes(first);
  op.run = [driver = spec.driver, ranks, requests]() -> absl::Status {
    ASSIGN_OR_RETURN(const std::vector<v1::PrepareResponse> prepared, driver->Run(requests));
    return ReleaseAll(ranks, prepared);
  };
  ops->push_back(std::move(op));
  return handles;
}

absl::Status AddPrimitives(const BenchSpec& spec, const std::vector<uint64_t>& handles,
                           std::vector<BenchOp>* ops) {
  const size_t world = handles.size();
  const std::vector<Workload> workloads = Workloads(spec);
  std::vector<v1::DispatchRequest> dispatch(world);
  for (size_t r = 0; r < world; ++r) {
    dispatch[r].set_handle(handles[r]);
    *dispatch[r].mutable_tokens() = RandomTokens(workloads[r]);
    *dispatch[r].mutable_topk_weights() = RandomWeights(workloads[r]);
  }
  ASSIGN_OR_RETURN(const auto received, AddOp(spec, "dispatch", std::move(dispatch), ops));
  std::vector<v1::CombineRequest> combine(world);
  std::vector<v1::DispatchBackwardRequest> dispatch_backward(world);
  std::vector<v1::CombineBackwardRequest> combine_backward(world);
  for (size_t r = 0; r < world; ++r) {
    combine[r].set_handle(handles[r]);
    *combine[r].mutable_expert_output() = received[r].recv_tokens();
    *combine[r].mutable_slot_weights() = received[r].recv_weights();
    dispatch_backward[r].set_handle(handles[r]);
    *dispatch_backward[r].mutable_recv_tokens_gradient() = received[r].recv_tokens();
    *dispatch_backward[r].mutable_recv_weights_gradient() = received[r].recv_weights();
    combine_backward[r].set_handle(handles[r]);
    *combine_backward[r].mutable_output_gradient() = RandomTokens(workloads[r]);
    *combine_backward[r].mutable_slot_weights() = received[r].recv_weights();
  }
  RETURN_IF_ERROR(AddOp(spec, "combine", std::move(combine), ops).status());
  RETURN_IF_ERROR(AddOp(spec, "dispatch_backward", std::move(dispatch_backward), ops).status());
  return AddOp(spec, "combine_backward", std::move(combine_backward), ops).status();
}

absl::Status ForwardBackward(client::StepDriver* driver,
                             const std::vector<v1::ForwardRequest>& forward) {
  ASSIGN_OR_RETURN(const std::vector<v1::ForwardResponse> responses, driver->Run(forward));
  std::vector<v1::BackwardRequest> backward(responses.size());
  for (size_t r = 0; r < responses.size(); ++r) {
    backward[r].set_ticket(responses[r].ticket());
    *backward[r].mutable_output_gradient() = responses[r].output();
  }
  return driver->Run(std::move(backward)).status();
}

absl::Status AddLayerOps(const BenchSpec& spec, std::vector<BenchOp>* ops) {
  std::vector<v1::ForwardRequest> forward;
  for (const Workload& workload : Workloads(spec)) {
    forward.push_back(RandomForward(workload, spec.layer_id));
  }
  ASSIGN_OR_RETURN(const auto responses, AddOp(spec, "forward", forward, ops));
  for (v1::ForwardRequest& request : forward) request.set_keep_for_backward(true);
  BenchOp op;
  op.name = "forward_backward";
  op.request_bytes = Bytes(forward) + Bytes(responses);
  op.response_bytes = 2 * Bytes(responses);
  op.run = [driver = spec.driver, forward] { return ForwardBackward(driver, forward); };
  RETURN_IF_ERROR(op.run());
  ops->push_back(std::move(op));
  return absl::OkStatus();
}

constexpr char kTokens[] = "expertctl-bench/tokens";
constexpr char kIds[] = "expertctl-bench/ids";
constexpr char kWeights[] = "expertctl-bench/weights";
constexpr char kOutput[] = "expertctl-bench/output";
constexpr char kLarge[] = "expertctl-bench/large";
constexpr int64_t kLargeBytes = int64_t{64} << 20;

absl::Time PutDeadline() { return absl::Now() + absl::Seconds(60); }

// Stores the tensor on the rank, and names that in its place.
absl::Status Move(client::RankClient& rank, const std::string& id, v1::Tensor* tensor) {
  RETURN_IF_ERROR(rank.PutTensor(id, *tensor, PutDeadline()).status());
  client::SetBuffer(id, tensor->mutable_buffer());
  return absl::OkStatus();
}

absl::Status AddResidentForward(const BenchSpec& spec,
                                const std::vector<client::RankClient*>& ranks,
                                std::vector<BenchOp>* ops) {
  const std::vector<Workload> workloads = Workloads(spec);
  std::vector<v1::ForwardRequest> forward;
  for (size_t r = 0; r < ranks.size(); ++r) {
    v1::ForwardRequest& request = forward.emplace_back(RandomForward(workloads[r], spec.layer_id));
    v1::Tensor output = request.tokens();
    output.clear_payload();  // zeros
    RETURN_IF_ERROR(Move(*ranks[r], kOutput, &output));
    *request.mutable_output_buffer() = output.buffer();
    RETURN_IF_ERROR(Move(*ranks[r], kTokens, request.mutable_tokens()));
    if (!request.has_topk()) continue;
    RETURN_IF_ERROR(Move(*ranks[r], kIds, request.mutable_topk()->mutable_topk_ids()));
    RETURN_IF_ERROR(Move(*ranks[r], kWeights, request.mutable_topk()->mutable_topk_weights()));
  }
  return AddOp(spec, "forward_resident", std::move(forward), ops).status();
}

absl::Status AddTransfers(client::RankClient& rank, std::vector<BenchOp>* ops) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_F8E5M2);
  tensor.add_shape(kLargeBytes);
  tensor.set_data(std::string(static_cast<size_t>(kLargeBytes), 'x'));
  BenchOp put;
  put.name = "put_tensor";
  put.request_bytes = kLargeBytes;
  put.run = [&rank, tensor = std::move(tensor)] {
    return rank.PutTensor(kLarge, tensor, PutDeadline()).status();
  };
  BenchOp get;
  get.name = "get_tensor";
  get.response_bytes = kLargeBytes;
  get.run = [&rank] { return rank.GetTensor(kLarge, PutDeadline()).status(); };
  for (BenchOp* op : {&put, &get}) {
    RETURN_IF_ERROR(op->run());
    ops->push_back(std::move(*op));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status DeleteBenchTensors(const std::vector<client::RankClient*>& ranks) {
  for (client::RankClient* rank : ranks) {
    for (const char* id : {kTokens, kIds, kWeights, kOutput, kLarge}) {
      v1::DeleteTensorRequest request;
      request.set_buffer_id(id);
      const absl::Status deleted =
          rank->Call(request, {.deadline = absl::Now() + absl::Seconds(10)}).status();
      if (!deleted.ok() && !HasReason(deleted, Reason::kBufferUnknown)) return deleted;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<BenchOp>> MakeBenchOps(const BenchSpec& spec,
                                                  const std::vector<client::RankClient*>& ranks) {
  std::vector<BenchOp> ops = {Ping(ranks)};
  ASSIGN_OR_RETURN(const std::vector<uint64_t> handles, AddPrepare(spec, ranks, &ops));
  RETURN_IF_ERROR(AddPrimitives(spec, handles, &ops));
  RETURN_IF_ERROR(AddLayerOps(spec, &ops));
  RETURN_IF_ERROR(AddResidentForward(spec, ranks, &ops));
  RETURN_IF_ERROR(AddTransfers(*ranks.front(), &ops));
  return ops;
}

}  // namespace expertd::expertctl
