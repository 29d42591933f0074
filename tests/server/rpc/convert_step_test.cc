// Tests of request decoding: headers, and all problems of a request at once.
#include "server/rpc/convert_step.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/testing/daemon_group.h"

namespace expertd::rpc {
namespace {

using testing::F32Tensor;
using testing::I64Tensor;

v1::StepHeader Header() {
  v1::StepHeader header;
  header.set_group_id("g");
  header.set_epoch(7);
  header.set_sequence(1);
  header.set_request_id(9);
  return header;
}

v1::ForwardRequest GoodForward() {
  v1::ForwardRequest request;
  *request.mutable_header() = Header();
  request.set_layer_id("layer");
  *request.mutable_tokens() = F32Tensor({2, 3}, {1, 2, 3, 4, 5, 6});
  *request.mutable_topk()->mutable_topk_ids() = I64Tensor({2, 1}, {0, -1});
  *request.mutable_topk()->mutable_topk_weights() = F32Tensor({2, 1}, {1, 0});
  return request;
}

std::vector<std::string> Paths(const absl::Status& status) {
  std::vector<std::string> paths;
  if (status.ok()) return paths;
  for (const FieldViolation& violation : DetailOf(status).violations) {
    paths.push_back(violation.path);
  }
  return paths;
}

using Strings = std::vector<std::string>;

TEST(ConvertStepTest, HeaderPartsAreAllNeeded) {
  EXPECT_EQ(Paths(FromProto(static_cast<const v1::StepHeader*>(nullptr)).status()),
            (Strings{"header"}));
  const v1::StepHeader empty;
  EXPECT_EQ(Paths(FromProto(&empty).status()),
            (Strings{"header.group_id", "header.epoch", "header.sequence", "header.request_id"}));
  const v1::StepHeader good = Header();
  const absl::StatusOr<engine::StepHeader> header = FromProto(&good);
  ASSERT_TRUE(header.ok());
  EXPECT_EQ(header->group_id, "g");
  EXPECT_EQ(header->epoch, 7u);
}

TEST(ConvertStepTest, LongIdsAreRefused) {
  v1::StepHeader header = Header();
  header.set_group_id(std::string(kMaxIdBytes, 'g'));
  EXPECT_TRUE(FromProto(&header).ok());
  header.set_group_id(std::string(kMaxIdBytes + 1, 'g'));
  EXPECT_EQ(Paths(FromProto(&header).status()), (Strings{"header.group_id"}));
}

TEST(ConvertStepTest, ForwardWithTopk) {
  const v1::ForwardRequest request = GoodForward();
  engine::ForwardOp op;
  ASSERT_TRUE(Decode(request, &op).ok());
  EXPECT_EQ(op.layer_id, "layer");
  EXPECT_EQ(op.routing, engine::RoutingSource::kTopk);
  EXPECT_EQ(op.tokens.data, request.tokens().data().data());
  EXPECT_EQ(op.topk_ids.dtype, DType::kI64);
  EXPECT_FALSE(op.router_logits.present());
}

TEST(ConvertStepTest, ForwardReportsAllProblemsAtOnce) {
  v1::ForwardRequest request = GoodForward();
  request.clear_layer_id();
  request.mutable_tokens()->mutable_data()->pop_back();
  request.mutable_topk()->mutable_topk_ids()->set_shape(1, -4);
  request.mutable_topk()->mutable_topk_weights()->set_dtype(v1::DTYPE_F16);
  request.mutable_output_buffer()->set_offset_bytes(4);
  engine::ForwardOp op;
  const absl::Status status = Decode(request, &op);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Paths(status),
            (Strings{"layer_id", "tokens.data", "topk.topk_ids.shape[1]", "topk.topk_weights.dtype",
                     "topk.topk_weights.data", "output_buffer.buffer_id"}));
}

v1::BufferRef Buffer(const std::string& id) {
  v1::BufferRef buffer;
  buffer.set_buffer_id(id);
  buffer.set_offset_bytes(12);
  return buffer;
}

TEST(ConvertStepTest, ResultPlacesAreTakenWithTheirPaths) {
  v1::ForwardRequest forward = GoodForward();
  *forward.mutable_output_buffer() = Buffer("y");
  engine::ForwardOp op;
  ASSERT_TRUE(Decode(forward, &op).ok());
  EXPECT_EQ(op.output.buffer.buffer_id, "y");
  EXPECT_EQ(op.output.buffer.offset_bytes, 12u);
  EXPECT_EQ(op.output.buffer.path, "output_buffer");
  EXPECT_FALSE(op.output.present());

  v1::BackwardRequest backward;
  *backward.mutable_tokens_gradient_buffer() = Buffer("gx");
  *backward.mutable_topk_weights_gradient_buffer() = Buffer("gw");
  *backward.mutable_router_logits_gradient_buffer() = Buffer("gl");
  engine::BackwardOp backward_op;
  EXPECT_EQ(Paths(Decode(backward, &backward_op)), (Strings{"ticket", "output_gradient"}));
  EXPECT_EQ(backward_op.tokens_gradient.buffer.buffer_id, "gx");
  EXPECT_EQ(backward_op.topk_weights_gradient.buffer.buffer_id, "gw");
  EXPECT_EQ(backward_op.router_logits_gradient.buffer.buffer_id, "gl");
}

TEST(ConvertStepTest, ResultInABufferIsAnsweredByItsName) {
  engine::CombineOp op;
  op.output = {.dtype = DType::kBF16, .shape = {2, 4}, .data = "", .buffer = {"p", "y", 8}};
  v1::CombineResponse response;
  Encode(op, &response);
  EXPECT_EQ(response.output().dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(response.output().shape(1), 4);
  EXPECT_EQ(response.output().buffer().buffer_id(), "y");
  EXPECT_EQ(response.output().buffer().offset_bytes(), 8u);
}

TEST(ConvertStepTest, ForwardComparesTokensIdsAndWeights) {
  v1::ForwardRequest request = GoodForward();
  *request.mutable_topk()->mutable_topk_ids() = I64Tensor({3, 1}, {0, 1, 2});
  *request.mutable_topk()->mutable_topk_weights() = F32Tensor({2, 2}, {1, 0, 1, 0});
  engine::ForwardOp op;
  EXPECT_EQ(Paths(Decode(request, &op)),
            (Strings{"topk.topk_ids.shape[0]", "topk.topk_weights.shape[0]",
                     "topk.topk_weights.shape[1]"}));
}

TEST(ConvertStepTest, ForwardNeedsOneRouting) {
  v1::ForwardRequest request = GoodForward();
  engine::ForwardOp op;
  request.set_layer_router(true);
  EXPECT_TRUE(Decode(request, &op).ok());
  EXPECT_EQ(op.routing, engine::RoutingSource::kLayerRouter);
  request.set_layer_router(false);
  EXPECT_EQ(Paths(Decode(request, &op)), (Strings{"layer_router"}));
  request.clear_routing();
  EXPECT_EQ(Paths(Decode(request, &op)), (Strings{"routing"}));
  *request.mutable_router_logits() = F32Tensor({2, 4}, std::vector<float>(8));
  EXPECT_TRUE(Decode(request, &op).ok());
  EXPECT_EQ(op.routing, engine::RoutingSource::kLogits);
}

TEST(ConvertStepTest, ForwardOfZeroTokens) {
  v1::ForwardRequest request = GoodForward();
  *request.mutable_tokens() = F32Tensor({0, 3}, {});
  *request.mutable_topk()->mutable_topk_ids() = I64Tensor({0, 1}, {});
  *request.mutable_topk()->mutable_topk_weights() = F32Tensor({0, 1}, {});
  engine::ForwardOp op;
  EXPECT_TRUE(Decode(request, &op).ok());
  EXPECT_TRUE(op.tokens.present());
}

TEST(ConvertStepTest, BackwardNeedsTicketAndFiniteAuxGradient) {
  v1::BackwardRequest request;
  request.set_aux_loss_gradient(std::numeric_limits<double>::quiet_NaN());
  engine::BackwardOp op;
  EXPECT_EQ(Paths(Decode(request, &op)),
            (Strings{"ticket", "output_gradient", "aux_loss_gradient"}));
}

TEST(ConvertStepTest, OptionalSlotWeightsMayBeAbsent) {
  v1::CombineRequest request;
  request.set_handle(3);
  *request.mutable_expert_output() = F32Tensor({2, 3}, std::vector<float>(6));
  engine::CombineOp op;
  EXPECT_TRUE(Decode(request, &op).ok());
  EXPECT_FALSE(op.slot_weights.present());
  *request.mutable_slot_weights() = F32Tensor({3}, std::vector<float>(3));
  EXPECT_EQ(Paths(Decode(request, &op)), (Strings{"slot_weights.shape[0]"}));
}

TEST(ConvertStepTest, AbsentResultsStayUnset) {
  engine::ForwardOp op;
  op.output = {.dtype = DType::kF32, .shape = {1, 1}, .data = std::string(4, '\0')};
  op.ticket = 5;
  op.stats.tokens_per_expert = {1, 2};
  v1::ForwardResponse response;
  Encode(op, &response);
  EXPECT_TRUE(response.has_output());
  EXPECT_FALSE(response.has_routing());
  EXPECT_EQ(response.ticket(), 5u);
  EXPECT_EQ(response.stats().tokens_per_expert_size(), 2);
}

}  // namespace
}  // namespace expertd::rpc
