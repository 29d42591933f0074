// Wrong fields of what one rank answers by itself about layers, steps and tensors.
#include "tests/abuse/abuse_test.h"

namespace expertd::abuse {
namespace {

TEST_F(AbuseTest, QueriesOfLayers) {
  SpoilQuery<v1::GetShardingMetadataRequest>([] {
    auto request = OfLayer<v1::GetShardingMetadataRequest>(kLayer);
    request.add_tokens_per_rank(3);
    request.add_tokens_per_rank(4);
    return request;
  });
  SpoilQuery<v1::GetExpertLoadRequest>([] { return OfLayer<v1::GetExpertLoadRequest>(kLayer); });
  SpoilQuery<v1::CheckShardingRequest>([this] {
    auto request = OfLayer<v1::CheckShardingRequest>(kLayer);
    const auto metadata =
        service_->rank(1).Call(OfLayer<v1::GetShardingMetadataRequest>(kLayer), testing::Soon());
    EXPECT_TRUE(metadata.ok()) << metadata.status();
    for (const v1::TensorSharding& tensor : metadata->tensors()) {
      v1::DeclaredSharding* declared = request.add_tensors();
      declared->set_name(tensor.name());
      *declared->mutable_global_shape() = tensor.global_shape();
      *declared->mutable_spec() = tensor.spec();
    }
    return request;
  });
}

TEST_F(AbuseTest, QueriesOfSteps) {
  SpoilQuery<v1::ReleaseTicketRequest>([] {
    v1::ReleaseTicketRequest request;
    request.add_tickets(1);
    request.add_handles(1);
    return request;
  });
  SpoilQuery<v1::GetStepOutcomeRequest>([this] {
    v1::GetStepOutcomeRequest request;
    request.set_epoch(service_->group().epoch());
    request.set_sequence(1);
    return request;
  });
}

TEST_F(AbuseTest, QueriesOfTensors) {
  SpoilQuery<v1::DeleteTensorRequest>([this] {
    const auto stored = service_->rank(1).PutTensor("x", Ids(), absl::Now() + testing::kWait);
    EXPECT_TRUE(stored.ok()) << stored.status();
    v1::DeleteTensorRequest request;
    request.set_buffer_id("x");
    return request;
  });
}

}  // namespace
}  // namespace expertd::abuse
