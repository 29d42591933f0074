// Sharding, calling and merging.
#include "client/expertctl/served_moe.h"

#include <algorithm>
#include <utility>

#include "absl/types/span.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/tensor.h"
#include "client/expertctl/layers.h"

namespace expertd::expertctl {
namespace {

v1::Tensor Shard(const std::vector<float>& rows, int64_t width, const RowRange& range) {
  return client::FloatTensor(
      v1::DTYPE_F32, {range.count, width},
      absl::MakeConstSpan(rows).subspan(range.begin * width, range.count * width));
}

absl::Status Append(const v1::Tensor& tensor, std::vector<float>* values) {
  ASSIGN_OR_RETURN(const std::vector<float> shard, client::ReadFloats(tensor));
  values->insert(values->end(), shard.begin(), shard.end());
  return absl::OkStatus();
}

}  // namespace

RowRange ShardOf(int64_t rows, int64_t world, int64_t rank) {
  const int64_t base = rows / world;
  const int64_t more = rows % world;
  return {rank * base + std::min(rank, more), base + (rank < more ? 1 : 0)};
}

v1::LayerConfig MakeLayerConfig(const ServedMoeOptions& options) {
  v1::LayerConfig config;
  config.set_expert_count(options.experts);
  config.set_hidden(options.hidden);
  config.set_intermediate(options.intermediate);
  config.set_top_k(options.top_k);
  config.set_activation(v1::ACTIVATION_SILU);
  config.set_token_dtype(v1::DTYPE_F32);
  config.set_weight_dtype(v1::DTYPE_F32);
  config.mutable_router()->set_kind(v1::ROUTER_KIND_SOFTMAX);
  config.set_aux_loss_coefficient(options.aux_loss_coefficient);
  config.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  config.mutable_optimizer()->set_momentum(options.momentum);
  return config;
}

absl::StatusOr<std::unique_ptr<ServedMoe>> ServedMoe::Create(const ServedMoeOptions& options,
                                                             client::StepDriver* driver) {
  ASSIGN_OR_RETURN(const v1::LayerInfo info,
                   EnsureLayer(options.layer_id, MakeLayerConfig(options), options.seed, driver));
  return std::unique_ptr<ServedMoe>(new ServedMoe(options, info.weights_version(), driver));
}

absl::StatusOr<train::MoeLayer::ForwardResult> ServedMoe::Forward(
    const std::vector<float>& tokens, const std::vector<float>& router_logits, train::Keep keep) {
  const int64_t rows = static_cast<int64_t>(tokens.size()) / options_.hidden;
  std::vector<v1::ForwardRequest> requests(driver_->world());
  for (int64_t r = 0; r < driver_->world(); ++r) {
    const RowRange range = ShardOf(rows, driver_->world(), r);
    requests[r].set_layer_id(options_.layer_id);
    *requests[r].mutable_tokens() = Shard(tokens, options_.hidden, range);
    *requests[r].mutable_router_logits() = Shard(router_logits, options_.experts, range);
    requests[r].set_keep_for_backward(keep == train::Keep::kForBackward);
  }
  ASSIGN_OR_RETURN(const std::vector<v1::ForwardResponse> responses,
                   driver_->Run(std::move(requests)));
  ForwardResult result;
  std::vector<uint64_t> tickets;
  for (const v1::ForwardResponse& response : responses) {
    RETURN_IF_ERROR(Append(response.output(), &result.output));
    const auto& counts = response.stats().tokens_per_expert();
    result.tokens_per_expert.insert(result.tokens_per_expert.end(), counts.begin(), counts.end());
    tickets.push_back(response.ticket());
  }
  result.aux_loss = responses.front().aux_loss();
  if (keep == train::Keep::kForBackward) {
    result.ticket = next_ticket_++;
    tickets_[result.ticket] = std::move(tickets);
  }
  return result;
}

absl::StatusOr<train::MoeLayer::BackwardResult> ServedMoe::Backward(
    uint64_t ticket, const std::vector<float>& output_gradient, double aux_loss_gradient) {
  const auto kept = tickets_.find(ticket);
  if (kept == tickets_.end()) {
    return Error(Reason::kTicketUnknown).Text("layer ", options_.layer_id, ": no forward ", ticket);
  }
  const int64_t rows = static_cast<int64_t>(output_gradient.size()) / options_.hidden;
  std::vector<v1::BackwardRequest> requests(driver_->world());
  for (int64_t r = 0; r < driver_->world(); ++r) {
    requests[r].set_ticket(kept->second[r]);
    *requests[r].mutable_output_gradient() =
        Shard(output_gradient, options_.hidden, ShardOf(rows, driver_->world(), r));
    requests[r].set_aux_loss_gradient(aux_loss_gradient);
  }
  ASSIGN_OR_RETURN(const std::vector<v1::BackwardResponse> responses,
                   driver_->Run(std::move(requests)));
  tickets_.erase(kept);
  BackwardResult result;
  for (const v1::BackwardResponse& response : responses) {
    RETURN_IF_ERROR(Append(response.tokens_gradient(), &result.tokens_gradient));
    RETURN_IF_ERROR(Append(response.router_logits_gradient(), &result.router_logits_gradient));
  }
  return result;
}

absl::Status ServedMoe::Apply(double learning_rate) {
  v1::ApplyGradientsRequest request;
  request.set_layer_id(options_.layer_id);
  request.set_learning_rate(learning_rate);
  request.set_expected_version(version_);
  ASSIGN_OR_RETURN(const std::vector<v1::ApplyGradientsResponse> responses,
                   driver_->RunSame(request));
  version_ = responses.front().weights_version();
  return absl::OkStatus();
}

}  // namespace expertd::expertctl
