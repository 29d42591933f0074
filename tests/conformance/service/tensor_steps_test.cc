// Steps that read and write resident tensors: the inline bits, and refusals by name.
#include "tests/conformance/service/tensor_cases.h"

namespace expertd::conformance {
namespace {

// Forward and backward requests of every rank, with their tensors inline.
std::vector<v1::ForwardRequest> Forwards(const std::string& layer_id, int64_t world,
                                         TestRandom& random) {
  std::vector<v1::ForwardRequest> requests;
  std::vector<int64_t> tokens;
  for (int64_t rank = 0; rank < world; ++rank) tokens.push_back(4 + rank % 3);
  const reference::Routing ids = random.Ids(tokens, kTopK, kExperts);
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    v1::ForwardRequest& request = requests.emplace_back();
    request.set_layer_id(layer_id);
    request.set_keep_for_backward(true);
    *request.mutable_tokens() =
        TokenTensor(v1::DTYPE_F32, random.Values(tokens[rank] * kHidden), kHidden);
    *request.mutable_topk()->mutable_topk_ids() = IdTensor(ids[rank], kTopK);
    *request.mutable_topk()->mutable_topk_weights() =
        WeightTensor(random.Values(tokens[rank] * kTopK), kTopK);
  }
  return requests;
}

std::vector<v1::BackwardRequest> Backwards(const std::vector<v1::ForwardResponse>& forwards) {
  std::vector<v1::BackwardRequest> requests;
  for (const v1::ForwardResponse& forward : forwards) {
    v1::BackwardRequest& request = requests.emplace_back();
    request.set_ticket(forward.ticket());
    *request.mutable_output_gradient() = forward.output();
  }
  return requests;
}

TEST_P(ServiceTest, ForwardAndBackwardThroughResidentTensorsGiveTheInlineBits) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  Residency residency(*this);
  const std::string layer_id = MakeLayer(SmallLayer(kExperts, kTopK, kHidden, 6), /*seed=*/7);
  const auto requests = Forwards(layer_id, world(), random);
  const auto inlined = Run(requests);
  ASSERT_EQ(inlined.size(), requests.size());
  const auto gradients = Run(Backwards(inlined));
  ASSERT_EQ(gradients.size(), requests.size());

  std::vector<v1::ForwardRequest> forwards = requests;
  for (int64_t rank = 0; rank < world(); ++rank) {
    v1::ForwardRequest& request = forwards[static_cast<size_t>(rank)];
    *request.mutable_tokens() = residency.Put(rank, "x", request.tokens());
    *request.mutable_topk()->mutable_topk_ids() =
        residency.Put(rank, "ids", request.topk().topk_ids());
    *request.mutable_topk()->mutable_topk_weights() =
        residency.Put(rank, "w", request.topk().topk_weights());
    residency.Zeros(rank, "y", inlined[static_cast<size_t>(rank)].output(),
                    request.mutable_output_buffer());
  }
  const auto resident = Run(std::move(forwards));
  ASSERT_EQ(resident.size(), requests.size());
  // The output is the backward's gradient, straight from where it lies.
  std::vector<v1::BackwardRequest> backwards = Backwards(resident);
  for (int64_t rank = 0; rank < world(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    residency.Expect(rank, resident[r].output(), inlined[r].output());
    residency.Zeros(rank, "gx", gradients[r].tokens_gradient(),
                    backwards[r].mutable_tokens_gradient_buffer());
    residency.Zeros(rank, "gw", gradients[r].topk_weights_gradient(),
                    backwards[r].mutable_topk_weights_gradient_buffer());
  }
  const auto answers = Run(std::move(backwards));
  ASSERT_EQ(answers.size(), requests.size());
  for (int64_t rank = 0; rank < world(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    residency.Expect(rank, answers[r].tokens_gradient(), gradients[r].tokens_gradient());
    residency.Expect(rank, answers[r].topk_weights_gradient(),
                     gradients[r].topk_weights_gradient());
  }
  residency.ExpectNoneLeft();
}

TEST_P(ServiceTest, PrimitivesThroughResidentTensorsGiveTheInlineBits) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  Residency residency(*this);
  const std::string layer_id = MakeLayer(SmallLayer(kExperts, kTopK, kHidden, 6), /*seed=*/7);
  const auto forwards = Forwards(layer_id, world(), random);
  std::vector<v1::PrepareRequest> prepares(forwards.size());
  for (int64_t rank = 0; rank < world(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    prepares[r].set_layer_id(layer_id);
    *prepares[r].mutable_topk_ids() = residency.Put(rank, "ids", forwards[r].topk().topk_ids());
  }
  const auto prepared = Run(std::move(prepares));
  ASSERT_EQ(prepared.size(), forwards.size());
  std::vector<v1::DispatchRequest> dispatches(forwards.size());
  std::vector<v1::CombineRequest> combines(forwards.size());
  for (size_t r = 0; r < forwards.size(); ++r) {
    dispatches[r].set_handle(prepared[r].handle());
    *dispatches[r].mutable_tokens() = forwards[r].tokens();
    *dispatches[r].mutable_topk_weights() = forwards[r].topk().topk_weights();
  }
  const auto received = Run(dispatches);
  ASSERT_EQ(received.size(), forwards.size());
  for (size_t r = 0; r < forwards.size(); ++r) {
    combines[r].set_handle(prepared[r].handle());
    *combines[r].mutable_expert_output() = received[r].recv_tokens();
    *combines[r].mutable_slot_weights() = received[r].recv_weights();
    const auto rank = static_cast<int64_t>(r);
    residency.Zeros(rank, "rx", received[r].recv_tokens(),
                    dispatches[r].mutable_recv_tokens_buffer());
    residency.Zeros(rank, "rw", received[r].recv_weights(),
                    dispatches[r].mutable_recv_weights_buffer());
  }
  const auto combined = Run(combines);
  const auto kept = Run(std::move(dispatches));
  ASSERT_EQ(combined.size(), forwards.size());
  ASSERT_EQ(kept.size(), forwards.size());
  for (size_t r = 0; r < forwards.size(); ++r) {
    const auto rank = static_cast<int64_t>(r);
    residency.Expect(rank, kept[r].recv_tokens(), received[r].recv_tokens());
    residency.Expect(rank, kept[r].recv_weights(), received[r].recv_weights());
    // What a response says of a buffer is what the next request says of it.
    *combines[r].mutable_expert_output() = kept[r].recv_tokens();
    *combines[r].mutable_slot_weights() = kept[r].recv_weights();
    residency.Zeros(rank, "y", combined[r].output(), combines[r].mutable_output_buffer());
  }
  const auto again = Run(std::move(combines));
  ASSERT_EQ(again.size(), forwards.size());
  for (size_t r = 0; r < forwards.size(); ++r) {
    residency.Expect(static_cast<int64_t>(r), again[r].output(), combined[r].output());
  }
  residency.ExpectNoneLeft();
}

TEST_P(ServiceTest, UnknownBufferInEveryFieldIsRefusedByNameAndTheGroupGoesOn) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  Residency residency(*this);
  const std::string layer_id = MakeLayer(SmallLayer(kExperts, kTopK, kHidden, 6), /*seed=*/7);
  const auto forwards = Forwards(layer_id, world(), random);
  const auto good = Run(forwards);
  ASSERT_EQ(good.size(), forwards.size());
  // The last rank's request is spoilt; it must name the buffer, and the others that rank.
  const auto expect = [&](const std::vector<absl::Status>& statuses, const std::string& path) {
    const absl::Status& own = statuses.back();
    EXPECT_TRUE(HasReason(own, Reason::kBufferUnknown)) << own;
    EXPECT_NE(StdView(own.message()).find(path), std::string_view::npos) << path << ": " << own;
    EXPECT_NE(StdView(own.message()).find("\"gone\""), std::string_view::npos) << own;
    for (size_t r = 0; r + 1 < statuses.size(); ++r) {
      EXPECT_TRUE(HasReason(statuses[r], Reason::kPeerRejected)) << statuses[r];
    }
  };
  using ForwardSpoiler = std::function<void(v1::ForwardRequest&)>;
  const std::vector<std::pair<std::string, ForwardSpoiler>> forward_fields = {
      {"tokens.buffer",
       [](auto& r) { client::SetBuffer("gone", r.mutable_tokens()->mutable_buffer()); }},
      {"topk.topk_ids.buffer",
       [](auto& r) {
         client::SetBuffer("gone", r.mutable_topk()->mutable_topk_ids()->mutable_buffer());
       }},
      {"topk.topk_weights.buffer",
       [](auto& r) {
         client::SetBuffer("gone", r.mutable_topk()->mutable_topk_weights()->mutable_buffer());
       }},
      {"output_buffer", [](auto& r) { client::SetBuffer("gone", r.mutable_output_buffer()); }}};
  for (const auto& [path, spoil] : forward_fields) {
    auto requests = forwards;
    spoil(requests.back());
    expect(driver().RunEach(std::move(requests)).statuses, path);
  }
  using BackwardSpoiler = std::function<void(v1::BackwardRequest&)>;
  const std::vector<std::pair<std::string, BackwardSpoiler>> backward_fields = {
      {"output_gradient.buffer",
       [](auto& r) { client::SetBuffer("gone", r.mutable_output_gradient()->mutable_buffer()); }},
      {"tokens_gradient_buffer",
       [](auto& r) { client::SetBuffer("gone", r.mutable_tokens_gradient_buffer()); }},
      {"topk_weights_gradient_buffer",
       [](auto& r) { client::SetBuffer("gone", r.mutable_topk_weights_gradient_buffer()); }},
      {"router_logits_gradient_buffer",
       [](auto& r) { client::SetBuffer("gone", r.mutable_router_logits_gradient_buffer()); }}};
  for (const auto& [path, spoil] : backward_fields) {
    auto requests = Backwards(good);
    spoil(requests.back());
    expect(driver().RunEach(std::move(requests)).statuses, path);
  }
  // The ticket has survived all of that.
  EXPECT_EQ(Run(Backwards(good)).size(), forwards.size());
  residency.ExpectNoneLeft();
}

}  // namespace
}  // namespace expertd::conformance
