// Tests of errors on the wire: details, limits, round trip.
#include "server/rpc/status.h"

#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "base/strings.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace expertd::rpc {
namespace {

google::rpc::Status Packed(const grpc::Status& status) {
  google::rpc::Status packed;
  EXPECT_TRUE(packed.ParseFromString(status.error_details()));
  return packed;
}

template <typename Detail>
bool Find(const grpc::Status& status, Detail* detail) {
  const google::rpc::Status packed = Packed(status);
  for (const auto& any : packed.details()) {
    if (any.UnpackTo(detail)) return true;
  }
  return false;
}

TEST(StatusTest, OkStaysOk) {
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpc(grpc::Status::OK).ok());
}

TEST(StatusTest, CarriesReasonDomainMetadataAndRetry) {
  const grpc::Status status =
      ToGrpc(Error(Reason::kQueueFull).Text("queue is full: got 257, need 256").With("limit", 256));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(status.error_message(), "queue is full: got 257, need 256");
  EXPECT_EQ(Packed(status).message(), status.error_message());
  EXPECT_EQ(Packed(status).code(), static_cast<int>(status.error_code()));
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(Find(status, &info));
  EXPECT_EQ(info.reason(), "QUEUE_FULL");
  EXPECT_EQ(info.domain(), "expertd.v1");
  EXPECT_EQ(info.metadata().at("limit"), "256");
  google::rpc::RetryInfo retry;
  ASSERT_TRUE(Find(status, &retry));
  EXPECT_GT(retry.retry_delay().nanos(), 0);
}

TEST(StatusTest, OnlyErrorsThatWaitingMayCureAdviseToRetry) {
  google::rpc::RetryInfo retry;
  EXPECT_TRUE(Find(ToGrpc(Error(Reason::kDraining).Text("x")), &retry));
  EXPECT_FALSE(Find(ToGrpc(Error(Reason::kShapeMismatch).Text("x")), &retry));
  EXPECT_FALSE(Find(ToGrpc(Error(Reason::kPeerLost).Text("x")), &retry));
}

TEST(StatusTest, ViolationsBecomeBadRequest) {
  Violations violations;
  violations.Add(Reason::kShapeMismatch, "tokens.shape[1]", "got 12, need 16");
  violations.Add(Reason::kExpertIdRange, "topk_ids[17,3]", "got 9, need -1 to 7");
  const grpc::Status status = ToGrpc(violations.ToStatus("invalid request"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  google::rpc::BadRequest bad_request;
  ASSERT_TRUE(Find(status, &bad_request));
  ASSERT_EQ(bad_request.field_violations_size(), 2);
  EXPECT_EQ(bad_request.field_violations(0).field(), "tokens.shape[1]");
  EXPECT_EQ(bad_request.field_violations(1).description(), "got 9, need -1 to 7");
}

TEST(StatusTest, ErrorsOfOtherLibrariesGetAReason) {
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(Find(ToGrpc(absl::InternalError("boom")), &info));
  EXPECT_EQ(info.reason(), "INTERNAL");
}

TEST(StatusTest, RoundTripKeepsCodeTextAndDetail) {
  const absl::Status status = Error(Reason::kShapeMismatch)
                                  .Text("wrong")
                                  .With("rows", 3)
                                  .At("tokens.shape[0]", "got 3, need 4");
  const absl::Status back = FromGrpc(ToGrpc(status));
  EXPECT_EQ(back.code(), status.code());
  EXPECT_EQ(back.message(), status.message());
  EXPECT_EQ(ReasonOf(back), Reason::kShapeMismatch);
  EXPECT_EQ(DetailOf(back).metadata, DetailOf(status).metadata);
  EXPECT_EQ(DetailOf(back).violations, DetailOf(status).violations);
  EXPECT_TRUE(HasDetail(back));
}

TEST(StatusTest, StatusFromElsewhereHasNoDetail) {
  const absl::Status status = FromGrpc(grpc::Status(grpc::StatusCode::UNAVAILABLE, "refused"));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(HasDetail(status));
  EXPECT_FALSE(HasDetail(FromGrpc(grpc::Status(grpc::StatusCode::INTERNAL, "x", "garbage"))));
}

TEST(StatusTest, LongTextIsCutAtACharacterAndReasonStays) {
  std::string text;
  while (text.size() < 10000) text += "\u00e4\u20ac";  // 2 and 3 bytes
  const grpc::Status status = ToGrpc(Error(Reason::kTicketMemory).Text(text));
  EXPECT_LE(status.error_message().size(), kMaxTextBytes);
  EXPECT_GE(status.error_message().size(), kMaxTextBytes - 4);
  EXPECT_EQ(status.error_message().substr(status.error_message().size() - 3), "...");
  EXPECT_LE(status.error_details().size(), kMaxStatusBytes);
  EXPECT_EQ(ReasonOf(FromGrpc(status)), Reason::kTicketMemory);
  // Still UTF-8: protobuf would refuse to parse the message field otherwise.
  EXPECT_EQ(Packed(status).message(), status.error_message());
}

TEST(StatusTest, ManyViolationsAreCountedWhenTheyDoNotFit) {
  Violations violations;
  for (int i = 0; i < 5000; ++i) {
    violations.Add(Reason::kExpertIdRange, StrCat("topk_ids[", i, ",0]"), "got 9, need -1 to 7");
  }
  const grpc::Status status = ToGrpc(violations.ToStatus("invalid request"));
  EXPECT_LE(status.error_message().size(), kMaxTextBytes);
  EXPECT_LE(status.error_details().size(), kMaxStatusBytes);
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad_request;
  ASSERT_TRUE(Find(status, &info));
  ASSERT_TRUE(Find(status, &bad_request));
  EXPECT_EQ(info.reason(), "EXPERT_ID_RANGE");
  EXPECT_GT(bad_request.field_violations_size(), 3);
  EXPECT_EQ(info.metadata().at("violations_left_out"),
            StrCat(5000 - bad_request.field_violations_size()));
}

TEST(StatusTest, HugeMetadataAndPathsStayWithinTheLimit) {
  Error error(Reason::kInternal);
  for (int i = 0; i < 100; ++i) {
    std::move(error)
        .With(StrCat("key", i), std::string(100000, 'v'))
        .At(std::string(100000, 'p'), "d");
  }
  const grpc::Status status = ToGrpc(error.ToStatus());
  EXPECT_LE(status.error_details().size(), kMaxStatusBytes);
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(Find(status, &info));
  EXPECT_EQ(info.reason(), "INTERNAL");
}

TEST(StatusTest, ControlCharactersDoNotReachTheHeader) {
  EXPECT_EQ(ToGrpc(Error(Reason::kInternal).Text("a\nb\r\tc")).error_message(), "a b  c");
}

}  // namespace
}  // namespace expertd::rpc
