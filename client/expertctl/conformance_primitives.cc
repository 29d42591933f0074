// Conformance of the five primitives: counts, layout and bits.
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/tensor.h"
#include "client/expertctl/conformance.h"

namespace expertd::expertctl {
namespace {

using Rows = std::vector<float>;

// Whether a token's row is multiplied by the number of its valid routes.
enum class Scale { kNone, kByRoutes };

// Powers of two, so that products and small sums are exact; different for neighbouring routes.
float RouteWeight(int64_t rank, int64_t token, int64_t k) {
  constexpr float kWeights[] = {1.0f, 0.5f, 2.0f, 0.25f};
  return kWeights[(rank + token + k) % 4];
}

// One scenario's run: the primitives in order, each checked against the layout.
class PrimitiveCheck {
 public:
  PrimitiveCheck(const Conformance& conformance, const Scenario& scenario)
      : conformance_(conformance),
        scenario_(scenario),
        hidden_(conformance.layer.config().hidden()),
        dtype_(conformance.layer.config().token_dtype()),
        layouts_(LayOut(scenario)) {}

  absl::Status Run();

 private:
  absl::Status Prepare();
  absl::Status Dispatch();
  absl::Status Combine();
  absl::Status CombineWeighted();
  absl::Status DispatchBackward();
  absl::Status CombineBackward();

  // [tokens, hidden] of one rank.
  Rows TokenRows(int64_t rank, int64_t salt, Scale scale) const;
  // [tokens, top_k]; 0 where there is no route.
  Rows Weights(int64_t rank) const;
  // [total_rows, hidden] and [total_rows] as rank `rank` receives them; pads are zero.
  Rows ReceivedRows(int64_t rank, int64_t salt) const;
  Rows ReceivedWeights(int64_t rank) const;
  v1::Tensor Tokens(const Rows& rows) const {
    return client::FloatTensor(dtype_, {static_cast<int64_t>(rows.size()) / hidden_, hidden_},
                               rows);
  }
  int64_t total_rows(int64_t rank) const {
    return static_cast<int64_t>(layouts_[rank].slots.size());
  }

  const Conformance& conformance_;
  const Scenario& scenario_;
  int64_t hidden_;
  v1::DType dtype_;
  std::vector<RankLayout> layouts_;
  std::vector<uint64_t> handles_;
};

Rows PrimitiveCheck::TokenRows(int64_t rank, int64_t salt, Scale scale) const {
  Rows rows;
  for (int64_t t = 0; t < scenario_.tokens(rank); ++t) {
    const auto factor =
        scale == Scale::kByRoutes ? static_cast<float>(ValidRoutes(scenario_, rank, t)) : 1.0f;
    for (int64_t c = 0; c < hidden_; ++c) {
      const float value = RowValue(rank, t, c, salt);
      rows.push_back(factor == 0 ? 0.0f : factor * value);  // Never -0.
    }
  }
  return rows;
}

Rows PrimitiveCheck::Weights(int64_t rank) const {
  Rows weights;
  for (size_t route = 0; route < scenario_.ids[rank].size(); ++route) {
    const auto flat = static_cast<int64_t>(route);
    const bool valid = scenario_.ids[rank][route] >= 0;
    weights.push_back(valid ? RouteWeight(rank, flat / scenario_.top_k, flat % scenario_.top_k)
                            : 0.0f);
  }
  return weights;
}

Rows PrimitiveCheck::ReceivedRows(int64_t rank, int64_t salt) const {
  Rows rows;
  for (const SlotSource& slot : layouts_[rank].slots) {
    for (int64_t c = 0; c < hidden_; ++c) {
      rows.push_back(slot.rank < 0 ? 0.0f : RowValue(slot.rank, slot.token, c, salt));
    }
  }
  return rows;
}

Rows PrimitiveCheck::ReceivedWeights(int64_t rank) const {
  Rows weights;
  for (const SlotSource& slot : layouts_[rank].slots) {
    weights.push_back(slot.rank < 0 ? 0.0f : RouteWeight(slot.rank, slot.token, slot.k));
  }
  return weights;
}

absl::Status PrimitiveCheck::Prepare() {
  std::vector<v1::PrepareRequest> requests(scenario_.ranks());
  for (int64_t r = 0; r < scenario_.ranks(); ++r) {
    requests[r].set_layer_id(conformance_.layer.layer_id());
    *requests[r].mutable_topk_ids() =
        client::Int32Tensor({scenario_.tokens(r), scenario_.top_k}, scenario_.ids[r]);
  }
  ASSIGN_OR_RETURN(const auto responses, conformance_.driver().Run(std::move(requests)));
  for (int64_t r = 0; r < scenario_.ranks(); ++r) {
    const v1::PrepareResponse& got = responses[r];
    const std::vector<int64_t> counts(got.tokens_per_expert().begin(),
                                      got.tokens_per_expert().end());
    const std::vector<int64_t> padded(got.padded_per_expert().begin(),
                                      got.padded_per_expert().end());
    const bool good = counts == layouts_[r].tokens_per_expert &&
                      padded == layouts_[r].padded_per_expert && got.total_rows() == total_rows(r);
    RETURN_IF_ERROR(ExpectTrue(
        good, StrCat("Prepare: counts of rank ", r, " differ: got ", got.ShortDebugString())));
    handles_.push_back(got.handle());
  }
  return absl::OkStatus();
}

absl::Status PrimitiveCheck::Dispatch() {
  std::vector<v1::DispatchRequest> requests(scenario_.ranks());
  for (int64_t r = 0; r < scenario_.ranks(); ++r) {
    requests[r].set_handle(handles_[r]);
    *requests[r].mutable_tokens() = Tokens(TokenRows(r, 0, Scale::kNone));
    *requests[r].mutable_topk_weights() =
        client::FloatTensor(v1::DTYPE_F32, {scenario_.tokens(r), scenario_.top_k}, Weights(r));
  }
  ASSIGN_OR_RETURN(const auto responses, conformance_.driver().Run(std::move(requests)));
  for (int64_t r = 0; r < scenario_.ranks(); ++r) {
    ASSIGN_OR_RETURN(const Rows rows, client::ReadFloats(responses[r].recv_tokens()));
    ASSIGN_OR_RETURN(const Rows weights, client::ReadFloats(responses[r].recv_weights()));
    RETURN_IF_ERROR(
        ExpectBits(StrCat("Dispatch: rank ", r, " recv_tokens"), rows, ReceivedRows(r, 0)));
    RETURN_IF_ERROR(
        ExpectBits(StrCat("Dispatch: rank ", r, " recv_weights"), weights, ReceivedWeights(r)));
  }
  return absl::OkStatus();
}

// Identity experts without weights: y = (valid k) * x.
absl::Status PrimitiveCheck::Combine() {
  std::vector<v1::CombineRequest> requests(scenario_.ranks());
  for (int64_t r = 0; r < scenario_.ranks(); ++r) {
    requests[r].set_handle(handles_[r]);
    *requests[r].mutable_expert_output() = Tokens(ReceivedRows(r, 0));
  }
  ASSIGN_OR_RETURN(const auto responses, conformance_.driver().Run(std::move(requests)));
  for (int64_t r = 0; r < scenario_.ranks(); ++r) {
    ASSIGN_OR_RETURN(const Rows output, client::ReadFloats(responses[r].output()));
    RETURN_IF_ERROR(ExpectBits(StrCat("Combine: rank ", r, " output"), output,
                               TokenRows(r, 0, Scale::kByRoutes)));
  }
  return absl::OkStatus();
}

// Ones from every expert with weights: y = sum of the valid weights.
absl::Status PrimitiveCheck::CombineWeighted() {
  std::vector<v1::CombineRequest> requests(scenario_.ranks());
  for (int64_t r = 0; r < scenario_.ranks(); ++r) {
    requests[r].set_handle(handles_[r]);
    *requests[r].mutable_expert_output() = Tokens(Rows(total_rows(r) * hidden_, 1.0f));
    *requests[r].mutable_slot_weights() =
        client::FloatTensor(v1::DTYPE_F32, {total_rows(r)}, ReceivedWeights(r));
  }
  ASSIGN_OR_RETURN(const auto responses, conformance_.driver().Run(std::move(requests)));
  for (int64_t r = 0; r < scenario_.ranks(); ++r) {
    const Rows weights = Weights(r);
    Rows want;
    for (int64_t t = 0; t < scenario_.tokens(r); ++t) {
      float sum = 0;
      for (int64_t k = 0; k < scenario_.top_k; ++k) sum += weights[t * scenario_.top_k + k];
      want.insert(want.end(), hidden_, sum);
    }
    ASSIGN_OR_RETURN(const Rows output, client::ReadFloats(responses[r].output()));
    RETURN_IF_ERROR(ExpectBits(StrCat("weighted Combine: rank ", r, " output"), output, want));
  }
  return absl::OkStatus();
}

// What CombineBackward gave goes back as (valid k) * g; weight gradients come back as they are.
absl::Status PrimitiveCheck::DispatchBackward() {
  std::vector<v1::DispatchBackwardRequest> requests(scenario_.ranks());
  for (int64_t r = 0; r < scenario_.ranks(); ++r) {
    requests[r].set_handle(handles_[r]);
    *requests[r].mutable_recv_tokens_gradient() = Tokens(ReceivedRows(r, 1));
    *requests[r].mutable_recv_weights_gradient() =
        client::FloatTensor(v1::DTYPE_F32, {total_rows(r)}, ReceivedWeights(r));
  }
  ASSIGN_OR_RETURN(const auto responses, conformance_.driver().Run(std::move(requests)));
  for (int64_t r = 0; r < scenario_.ranks(); ++r) {
    ASSIGN_OR_RETURN(const Rows tokens, client::ReadFloats(responses[r].tokens_gradient()));
    ASSIGN_OR_RETURN(const Rows weights, client::ReadFloats(responses[r].topk_weights_gradient()));
    RETURN_IF_ERROR(ExpectBits(StrCat("DispatchBackward: rank ", r, " tokens_gradient"), tokens,
                               TokenRows(r, 1, Scale::kByRoutes)));
    RETURN_IF_ERROR(ExpectBits(StrCat("DispatchBackward: rank ", r, " topk_weights_gradient"),
                               weights, Weights(r)));
  }
  return absl::OkStatus();
}

absl::Status PrimitiveCheck::CombineBackward() {
  std::vector<v1::CombineBackwardRequest> requests(scenario_.ranks());
  for (int64_t r = 0; r < scenario_.ranks(); ++r) {
    requests[r].set_handle(handles_[r]);
    *requests[r].mutable_output_gradient() = Tokens(TokenRows(r, 1, Scale::kNone));
  }
  ASSIGN_OR_RETURN(const auto responses, conformance_.driver().Run(std::move(requests)));
  for (int64_t r = 0; r < scenario_.ranks(); ++r) {
    ASSIGN_OR_RETURN(const Rows rows, client::ReadFloats(responses[r].expert_output_gradient()));
    RETURN_IF_ERROR(ExpectBits(StrCat("CombineBackward: rank ", r, " expert_output_gradient"), rows,
                               ReceivedRows(r, 1)));
  }
  return absl::OkStatus();
}

absl::Status PrimitiveCheck::Run() {
  RETURN_IF_ERROR(Prepare());
  RETURN_IF_ERROR(Dispatch());
  RETURN_IF_ERROR(Combine());
  RETURN_IF_ERROR(CombineWeighted());
  RETURN_IF_ERROR(CombineBackward());
  return DispatchBackward();
}

}  // namespace

void CheckPrimitives(const Conformance& conformance) {
  for (const NamedScenario& named : MakeScenarios(conformance.shape())) {
    conformance.Check(StrCat("primitives: ", named.name), [&conformance, &named] {
      return PrimitiveCheck(conformance, named.scenario).Run();
    });
  }
}

}  // namespace expertd::expertctl
