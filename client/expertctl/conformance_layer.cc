// Conformance of whole layers: sharding, forward, backward, tickets, gradients, updates.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/tensor.h"
#include "client/expertctl/conformance.h"
#include "client/expertctl/workload.h"

namespace expertd::expertctl {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(30);

client::CallOptions Soon() { return {.deadline = absl::Now() + kTimeout, .stop = StopFlag()}; }

// Random forwards of all ranks, with one token more on each next rank.
std::vector<v1::ForwardRequest> Forwards(const Conformance& conformance, bool keep) {
  std::vector<v1::ForwardRequest> requests;
  for (int64_t r = 0; r < conformance.ranks(); ++r) {
    const int64_t tokens = std::min(r + 1, conformance.shape().max_tokens);
    requests.push_back(
        RandomForward({conformance.layer.config(), tokens, 7, r}, conformance.layer.layer_id()));
    requests.back().set_keep_for_backward(keep);
  }
  return requests;
}

absl::Status ExpectReason(const absl::Status& status, Reason reason, const std::string& what) {
  if (HasReason(status, reason)) return absl::OkStatus();
  return Error(Reason::kInternal)
      .Text(what, ": got ", status.ok() ? "success" : status.ToString(), ", need ",
            ReasonName(reason));
}

absl::Status CheckSharding(const Conformance& conformance) {
  v1::GetShardingMetadataRequest request;
  request.set_layer_id(conformance.layer.layer_id());
  client::RankClient& rank = *conformance.session->group.ranks.front();
  ASSIGN_OR_RETURN(const v1::GetShardingMetadataResponse sharding, rank.Call(request, Soon()));
  v1::CheckShardingRequest check;
  check.set_layer_id(conformance.layer.layer_id());
  for (const v1::TensorSharding& tensor : sharding.tensors()) {
    v1::DeclaredSharding& declared = *check.add_tensors();
    declared.set_name(tensor.name());
    *declared.mutable_global_shape() = tensor.global_shape();
    *declared.mutable_spec() = tensor.spec();
    if (tensor.name() != "gate_up") continue;
    std::vector<int64_t> experts;
    for (const v1::RankShard& shard : tensor.shards()) {
      experts.insert(experts.end(), shard.expert_ids().begin(), shard.expert_ids().end());
    }
    for (size_t e = 0; e < experts.size(); ++e) {
      RETURN_IF_ERROR(ExpectTrue(experts[e] == static_cast<int64_t>(e),
                                 "gate_up: expert ids are not in rank order"));
    }
    RETURN_IF_ERROR(ExpectTrue(static_cast<int64_t>(experts.size()) == conformance.shape().experts,
                               "gate_up: the shards do not hold every expert once"));
  }
  RETURN_IF_ERROR(ExpectTrue(check.tensors_size() >= 4, "fewer than four tensors are described"));
  RETURN_IF_ERROR(rank.Call(check, Soon()).status());
  check.mutable_tensors(0)->clear_spec();
  return ExpectReason(rank.Call(check, Soon()).status(), Reason::kShardingMismatch,
                      "a declaration without specs");
}

absl::Status CheckSameBits(const Conformance& conformance) {
  ASSIGN_OR_RETURN(const auto first, conformance.driver().Run(Forwards(conformance, false)));
  ASSIGN_OR_RETURN(const auto second, conformance.driver().Run(Forwards(conformance, false)));
  for (size_t r = 0; r < first.size(); ++r) {
    ASSIGN_OR_RETURN(const auto a, client::ReadFloats(first[r].output()));
    ASSIGN_OR_RETURN(const auto b, client::ReadFloats(second[r].output()));
    RETURN_IF_ERROR(ExpectBits(StrCat("rank ", r, " output"), b, a));
    RETURN_IF_ERROR(
        ExpectTrue(first[r].output().dtype() == conformance.layer.config().token_dtype(),
                   "the output's dtype is not the token dtype"));
    for (float value : a) RETURN_IF_ERROR(ExpectTrue(std::isfinite(value), "output not finite"));
  }
  return absl::OkStatus();
}

absl::Status CheckBackward(const Conformance& conformance) {
  ASSIGN_OR_RETURN(const auto forwards, conformance.driver().Run(Forwards(conformance, true)));
  std::vector<v1::BackwardRequest> requests(forwards.size());
  for (size_t r = 0; r < forwards.size(); ++r) {
    requests[r].set_ticket(forwards[r].ticket());
    *requests[r].mutable_output_gradient() = forwards[r].output();
  }
  ASSIGN_OR_RETURN(const auto backwards, conformance.driver().Run(requests));
  for (size_t r = 0; r < backwards.size(); ++r) {
    const v1::Tensor& gradient = backwards[r].tokens_gradient();
    RETURN_IF_ERROR(ExpectTrue(gradient.dtype() == forwards[r].output().dtype(),
                               "tokens_gradient's dtype is not the token dtype"));
    ASSIGN_OR_RETURN(const auto values, client::ReadFloats(gradient));
    for (float value : values) RETURN_IF_ERROR(ExpectTrue(std::isfinite(value), "not finite"));
  }
  return ExpectReason(conformance.driver().Run(requests).status(), Reason::kTicketUnknown,
                      "a ticket that was spent");
}

// All tokens at expert 0: other experts' gradients are exact zeros, its own are not.
absl::Status CheckGradients(const Conformance& conformance) {
  v1::ClearGradientsRequest clear;
  clear.set_layer_id(conformance.layer.layer_id());
  RETURN_IF_ERROR(conformance.driver().RunSame(clear).status());
  std::vector<v1::ForwardRequest> forwards = Forwards(conformance, true);
  const int64_t top_k = conformance.shape().top_k;
  for (v1::ForwardRequest& request : forwards) {
    const int64_t tokens = request.tokens().shape(0);
    std::vector<int32_t> ids(tokens * top_k, -1);
    for (int64_t t = 0; t < tokens; ++t) ids[t * top_k] = 0;
    *request.mutable_topk()->mutable_topk_ids() = client::Int32Tensor({tokens, top_k}, ids);
  }
  ASSIGN_OR_RETURN(const auto kept, conformance.driver().Run(std::move(forwards)));
  std::vector<v1::BackwardRequest> requests(kept.size());
  for (size_t r = 0; r < kept.size(); ++r) {
    requests[r].set_ticket(kept[r].ticket());
    *requests[r].mutable_output_gradient() = kept[r].output();
  }
  RETURN_IF_ERROR(conformance.driver().Run(std::move(requests)).status());
  v1::GetParameterRequest get;
  get.set_layer_id(conformance.layer.layer_id());
  get.set_parameter("down");
  get.set_kind(v1::PARAMETER_KIND_GRADIENT);
  for (const auto& rank : conformance.session->group.ranks) {
    ASSIGN_OR_RETURN(const client::ParameterShard shard,
                     rank->GetParameter(get, absl::Now() + kTimeout));
    ASSIGN_OR_RETURN(const auto values, client::ReadFloats(shard.tensor));
    const size_t per_expert = values.size() / (conformance.shape().experts / conformance.ranks());
    const bool has_expert_0 = rank->origin().rank == 0;
    const auto rest = values.begin() + static_cast<int64_t>(has_expert_0 ? per_expert : 0);
    const auto not_zero = [](float value) { return value != 0; };
    RETURN_IF_ERROR(ExpectTrue(std::none_of(rest, values.end(), not_zero),
                               "an expert without rows has a gradient that is not zero"));
    RETURN_IF_ERROR(ExpectTrue(!has_expert_0 || std::any_of(values.begin(), rest, not_zero),
                               "the expert with all rows has a zero gradient"));
  }
  return absl::OkStatus();
}

absl::Status CheckApply(const Conformance& conformance) {
  v1::ConfigureOptimizerRequest configure;
  configure.set_layer_id(conformance.layer.layer_id());
  configure.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  RETURN_IF_ERROR(conformance.driver().RunSame(configure).status());
  v1::ApplyGradientsRequest apply;
  apply.set_layer_id(conformance.layer.layer_id());
  apply.set_learning_rate(0.125);
  apply.set_expected_version(conformance.layer.weights_version());
  ASSIGN_OR_RETURN(const auto first, conformance.driver().RunSame(apply));
  ASSIGN_OR_RETURN(const auto again, conformance.driver().RunSame(apply));
  for (size_t r = 0; r < first.size(); ++r) {
    const bool once = first[r].applied() && !again[r].applied() &&
                      first[r].weights_version() == apply.expected_version() + 1 &&
                      again[r].weights_version() == first[r].weights_version();
    RETURN_IF_ERROR(ExpectTrue(
        once, StrCat("ApplyGradients was not exactly once on rank ", r, ": ",
                     first[r].ShortDebugString(), " then ", again[r].ShortDebugString())));
  }
  apply.set_expected_version(apply.expected_version() + 7);
  return ExpectReason(conformance.driver().RunSame(apply).status(), Reason::kVersionBehind,
                      "a version far ahead");
}

// The same (sequence, request id) returns the stored reply; another id is refused.
absl::Status CheckReplay(const Conformance& conformance) {
  RETURN_IF_ERROR(conformance.driver().Run(Forwards(conformance, false)).status());
  std::vector<v1::ForwardRequest> requests = Forwards(conformance, false);
  const v1::StepHeader header = conformance.driver().NextHeader();
  for (v1::ForwardRequest& request : requests) *request.mutable_header() = header;
  conformance.driver().Distrust();
  const std::vector<client::RankClient*> ranks = conformance.session->group.clients();
  const auto first = client::CallAll(ranks, requests, Soon());
  const auto again = client::CallAll(ranks, requests, Soon());
  for (size_t r = 0; r < ranks.size(); ++r) {
    RETURN_IF_ERROR(first.statuses[r]);
    RETURN_IF_ERROR(client::AddContext(again.statuses[r], "the same request again"));
    RETURN_IF_ERROR(
        ExpectTrue(first.responses[r].output().data() == again.responses[r].output().data(),
                   "the stored reply differs from the first one"));
  }
  for (v1::ForwardRequest& request : requests) {
    request.mutable_header()->set_request_id(header.request_id() ^ 1);
  }
  const auto other = client::CallAll(ranks, requests, Soon());
  return ExpectReason(other.statuses[0], Reason::kSequenceConflict, "another request id");
}

}  // namespace

void CheckLayer(const Conformance& conformance) {
  struct Row {
    const char* name;
    absl::Status (*check)(const Conformance&);
  };
  constexpr Row kRows[] = {
      {"layer: sharding metadata", CheckSharding},
      {"layer: same inputs, same bits", CheckSameBits},
      {"layer: backward spends its ticket", CheckBackward},
      {"layer: gradients of experts without rows are zero", CheckGradients},
      {"layer: updates are applied exactly once", CheckApply},
      {"layer: a retry gets the stored reply", CheckReplay},
  };
  for (const Row& row : kRows) {
    conformance.Check(row.name, [&] { return row.check(conformance); });
  }
}

}  // namespace expertd::expertctl
