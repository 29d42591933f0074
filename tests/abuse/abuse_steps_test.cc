// Wrong fields of Forward, Backward and the five primitives.
#include "tests/abuse/abuse_test.h"

namespace expertd::abuse {
namespace {

TEST_F(AbuseTest, Forward) {
  SpoilCollective<v1::ForwardRequest>([] { return Forward(); });
}

TEST_F(AbuseTest, ForwardByLogits) {
  v1::CreateLayerRequest create;
  create.set_layer_id("routed");
  *create.mutable_config() = LayerOf();
  create.mutable_config()->mutable_router()->set_kind(v1::ROUTER_KIND_SOFTMAX);
  Must(create);
  v1::InitializeWeightsRequest initialize;
  initialize.set_layer_id("routed");
  Must(initialize);
  SpoilCollective<v1::ForwardRequest>(
      [] {
        v1::ForwardRequest request = Forward();
        request.set_layer_id("routed");
        *request.mutable_router_logits() = Rows(kTokens, kExperts);
        return request;
      },
      "ForwardByLogits");
}

TEST_F(AbuseTest, Backward) {
  SpoilCollective<v1::BackwardRequest>([this] {
    v1::ForwardRequest forward = Forward();
    forward.set_keep_for_backward(true);
    service_->driver().Distrust();
    const auto kept = Must(forward);
    v1::ClearGradientsRequest clear;
    clear.set_layer_id(kLayer);
    Must(clear);
    v1::BackwardRequest request;
    request.set_ticket(kept[0].ticket());
    EXPECT_EQ(kept[0].ticket(), kept[1].ticket());
    *request.mutable_output_gradient() = Rows(kTokens, kHidden);
    return request;
  });
}

class AbusePrimitivesTest : public AbuseTest {
 protected:
  // Both ranks have the same routing: two rows for each of two local experts.
  uint64_t Prepared() {
    service_->driver().Distrust();
    v1::PrepareRequest request;
    request.set_layer_id(kLayer);
    *request.mutable_topk_ids() = Ids();
    const auto prepared = Must(request);
    EXPECT_EQ(prepared[0].handle(), prepared[1].handle());
    EXPECT_EQ(prepared[0].total_rows(), 4);
    return prepared[0].handle();
  }
};

TEST_F(AbusePrimitivesTest, Prepare) {
  SpoilCollective<v1::PrepareRequest>([] {
    v1::PrepareRequest request;
    request.set_layer_id(kLayer);
    *request.mutable_topk_ids() = Ids();
    return request;
  });
}

TEST_F(AbusePrimitivesTest, Dispatch) {
  SpoilCollective<v1::DispatchRequest>([this] {
    v1::DispatchRequest request;
    request.set_handle(Prepared());
    *request.mutable_tokens() = Rows(kTokens, kHidden);
    *request.mutable_topk_weights() = Rows(kTokens, kTopK);
    return request;
  });
}

TEST_F(AbusePrimitivesTest, Combine) {
  SpoilCollective<v1::CombineRequest>([this] {
    v1::CombineRequest request;
    request.set_handle(Prepared());
    *request.mutable_expert_output() = Rows(4, kHidden);
    *request.mutable_slot_weights() = Rows(1, 4);
    request.mutable_slot_weights()->clear_shape();
    request.mutable_slot_weights()->add_shape(4);
    return request;
  });
}

TEST_F(AbusePrimitivesTest, DispatchBackward) {
  SpoilCollective<v1::DispatchBackwardRequest>([this] {
    v1::DispatchBackwardRequest request;
    request.set_handle(Prepared());
    *request.mutable_recv_tokens_gradient() = Rows(4, kHidden);
    *request.mutable_recv_weights_gradient() = Rows(1, 4);
    request.mutable_recv_weights_gradient()->clear_shape();
    request.mutable_recv_weights_gradient()->add_shape(4);
    return request;
  });
}

TEST_F(AbusePrimitivesTest, CombineBackward) {
  SpoilCollective<v1::CombineBackwardRequest>([this] {
    v1::CombineBackwardRequest request;
    request.set_handle(Prepared());
    *request.mutable_output_gradient() = Rows(kTokens, kHidden);
    *request.mutable_slot_weights() = Rows(1, 4);
    request.mutable_slot_weights()->clear_shape();
    request.mutable_slot_weights()->add_shape(4);
    return request;
  });
}

}  // namespace
}  // namespace expertd::abuse
