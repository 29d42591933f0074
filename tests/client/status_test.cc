// Tests of decoding gRPC statuses and of choosing the error that explains the most.
#include "client/cpp/status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace expertd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

const Origin kOrigin = {.rank = 2, .address = "10.0.0.3:7070"};

grpc::Status WithDetails(grpc::StatusCode code, const std::string& text,
                         const google::rpc::ErrorInfo& info,
                         const google::rpc::BadRequest* bad_request = nullptr) {
  google::rpc::Status details;
  details.set_code(code);
  details.set_message(text);
  details.add_details()->PackFrom(info);
  if (bad_request != nullptr) details.add_details()->PackFrom(*bad_request);
  return grpc::Status(code, text, details.SerializeAsString());
}

google::rpc::ErrorInfo Info(const std::string& reason) {
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("expertd.v1");
  return info;
}

absl::Status Own(Reason reason) { return Error(reason).Text("x"); }

TEST(FromGrpcTest, OkStaysOk) { EXPECT_TRUE(FromGrpc(grpc::Status::OK, kOrigin).ok()); }

TEST(FromGrpcTest, KeepsReasonMetadataAndViolations) {
  google::rpc::ErrorInfo info = Info("EXPERT_ID_RANGE");
  (*info.mutable_metadata())["limit"] = "8";
  (*info.mutable_metadata())["got"] = "9";
  google::rpc::BadRequest bad_request;
  google::rpc::BadRequest::FieldViolation& field = *bad_request.add_field_violations();
  field.set_field("topk_ids[1,0]");
  field.set_description("got 9, need below 8");
  const absl::Status status = FromGrpc(
      WithDetails(grpc::StatusCode::INVALID_ARGUMENT, "bad ids", info, &bad_request), kOrigin);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "rank 2 (10.0.0.3:7070): bad ids");
  const ErrorDetail detail = DetailOf(status);
  EXPECT_EQ(detail.reason, Reason::kExpertIdRange);
  EXPECT_THAT(detail.metadata, ElementsAre(Pair("got", "9"), Pair("limit", "8")));
  ASSERT_EQ(detail.violations.size(), 1u);
  EXPECT_EQ(detail.violations[0].path, "topk_ids[1,0]");
  EXPECT_EQ(detail.violations[0].description, "got 9, need below 8");
  EXPECT_TRUE(HasDetail(status));
}

TEST(FromGrpcTest, WithoutErrorInfoThereIsNoDetail) {
  const absl::Status status =
      FromGrpc(grpc::Status(grpc::StatusCode::UNAVAILABLE, "connection refused"), kOrigin);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(HasDetail(status));
}

TEST(FromGrpcTest, AnotherDomainIsNotOurs) {
  google::rpc::ErrorInfo info = Info("CONFIG_INVALID");
  info.set_domain("example.com");
  const absl::Status status =
      FromGrpc(WithDetails(grpc::StatusCode::INVALID_ARGUMENT, "x", info), kOrigin);
  EXPECT_FALSE(HasDetail(status));
}

TEST(FromGrpcTest, ReasonOfANewerDaemonKeepsItsCodeAndName) {
  const absl::Status status =
      FromGrpc(WithDetails(grpc::StatusCode::NOT_FOUND, "x", Info("SHARD_UNKNOWN")), kOrigin);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("SHARD_UNKNOWN"));
}

TEST(FromGrpcTest, DetailsThatAreGarbageAreIgnored) {
  const absl::Status status =
      FromGrpc(grpc::Status(grpc::StatusCode::INTERNAL, "x", "\xff\xff garbage"), kOrigin);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(HasDetail(status));
}

TEST(AddContextTest, AddsNoDetailAndKeepsOne) {
  EXPECT_FALSE(HasDetail(AddContext(absl::UnavailableError("x"), "step 3")));
  const absl::Status status = AddContext(Own(Reason::kRecvCapacity), "step 3");
  EXPECT_EQ(ReasonOf(status), Reason::kRecvCapacity);
  EXPECT_EQ(status.message(), "step 3: x");
}

TEST(MostTellingTest, NothingWhenAllAreOk) {
  EXPECT_EQ(MostTelling({absl::OkStatus(), absl::OkStatus()}), kAllOk);
  EXPECT_EQ(MostTelling({}), kAllOk);
}

TEST(MostTellingTest, TheGuiltyRanksOwnErrorBeatsReportsAboutIt) {
  EXPECT_EQ(MostTelling({Own(Reason::kPeerRejected), Own(Reason::kShapeMismatch),
                         Own(Reason::kPeerRejected)}),
            1u);
  EXPECT_EQ(MostTelling({Own(Reason::kStepTimeout), Own(Reason::kConfigInvalid)}), 1u);
}

TEST(MostTellingTest, ADeadDaemonBeatsWhatItsPeersSay) {
  EXPECT_EQ(MostTelling({Own(Reason::kPeerLost), absl::UnavailableError("refused"),
                         Own(Reason::kStepTimeout)}),
            1u);
}

TEST(MostTellingTest, AnAnswerBeatsOurOwnDeadline) {
  EXPECT_EQ(MostTelling({absl::DeadlineExceededError("x"), Own(Reason::kStepTimeout)}), 1u);
  EXPECT_EQ(MostTelling({absl::CancelledError("x"), Own(Reason::kGroupBroken)}), 1u);
}

TEST(MostTellingTest, TheFirstAmongEquals) {
  EXPECT_EQ(MostTelling({absl::OkStatus(), Own(Reason::kLayerUnknown), Own(Reason::kLayerUnknown)}),
            1u);
}

TEST(FateOfTest, RefusalsOfTheServiceConsumeTheSequence) {
  for (Reason reason : {Reason::kPeerRejected, Reason::kShapeMismatch, Reason::kLayerUnknown,
                        Reason::kRecvCapacity, Reason::kVersionBehind}) {
    EXPECT_EQ(FateOf(Own(reason)), SequenceFate::kConsumed) << ReasonName(reason);
  }
  EXPECT_EQ(FateOf(absl::OkStatus()), SequenceFate::kConsumed);
}

TEST(FateOfTest, WhatNeverReachedTheStepIsUnknown) {
  EXPECT_EQ(FateOf(absl::UnavailableError("x")), SequenceFate::kUnknown);
  EXPECT_EQ(FateOf(absl::ResourceExhaustedError("message too large")), SequenceFate::kUnknown);
  for (Reason reason : {Reason::kGroupBroken, Reason::kStepTimeout, Reason::kSequenceGap,
                        Reason::kQueueFull, Reason::kDraining}) {
    EXPECT_EQ(FateOf(Own(reason)), SequenceFate::kUnknown) << ReasonName(reason);
  }
}

}  // namespace
}  // namespace expertd::client
