// Steps that go wrong without anyone dying: each rank's answer, and that the next step works.
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/create_channel.h"
#include "tests/integration/process_test.h"

namespace expertd::integration {
namespace {

constexpr int64_t kRanks = 3;
constexpr int64_t kGuilty = 1;

class StepErrorsTest : public ProcessTest {
 protected:
  void SetUp() override { Form(/*timeout_ms=*/20000); }
  void Form(int64_t timeout_ms) {
    StartAndForm(kRanks, timeout_ms);
    ASSERT_FALSE(HasFailure());
    MakeLayer(kLayer);
    ASSERT_FALSE(HasFailure());
    good_ = Outputs();
    ASSERT_EQ(good_.size(), static_cast<size_t>(kRanks));
  }
  void TearDown() override {
    EXPECT_EQ(Outputs(), good_) << "the group does not work as before";
    ProcessTest::TearDown();
  }

  // Runs a step whose request at kGuilty is spoilt.
  template <typename Spoil>
  std::vector<absl::Status> RunSpoilt(const Spoil& spoil) {
    std::vector<v1::ForwardRequest> requests = Forwards();
    spoil(requests[kGuilty]);
    return driver().RunEach(std::move(requests)).statuses;
  }

  static void ExpectRejected(const std::vector<absl::Status>& statuses, Reason reason,
                             const std::vector<std::string>& parts) {
    for (int64_t r = 0; r < kRanks; ++r) {
      const absl::Status& status = statuses[static_cast<size_t>(r)];
      if (r == kGuilty) {
        ExpectError(status, reason, parts);
      } else {
        ExpectError(status, Reason::kPeerRejected,
                    {StrCat("rank ", kGuilty), std::string(ReasonName(reason))});
      }
    }
  }

  // Sends its request to every rank but kGuilty.
  client::Replies<v1::ForwardRequest> CallInnocent(
      const std::vector<v1::ForwardRequest>& requests) {
    const std::vector<client::RankClient*> innocent = {&rank(0), &rank(2)};
    return client::CallAll<v1::ForwardRequest>(innocent, {requests[0], requests[2]}, Soon());
  }

  std::vector<std::string> good_;
};

TEST_F(StepErrorsTest, WrongShapeIsRejectedThereAndNamedElsewhere) {
  const auto statuses = RunSpoilt([](v1::ForwardRequest& request) {
    *request.mutable_tokens() =
        client::FloatTensor(v1::DTYPE_F32, {4, kHidden - 1}, std::vector<float>(4 * 15));
  });
  ExpectRejected(statuses, Reason::kShapeMismatch, {"tokens.shape[1]", "15", "16"});
}

TEST_F(StepErrorsTest, ExpertIdOutOfRangeIsRejectedWithItsPosition) {
  const auto statuses = RunSpoilt([](v1::ForwardRequest& request) {
    std::vector<int64_t> ids = {0, 1, 2, 3, 4, 2 * kRanks, 0, -2};
    *request.mutable_topk()->mutable_topk_ids() = client::Int64Tensor({4, kTopK}, ids);
  });
  ExpectRejected(statuses, Reason::kExpertIdRange, {"topk_ids[2,1]", "topk_ids[3,1]"});
}

TEST_F(StepErrorsTest, RepeatedExpertIsRejectedWithItsPosition) {
  const auto statuses = RunSpoilt([](v1::ForwardRequest& request) {
    std::vector<int64_t> ids = {0, 1, 2, 3, 5, 5, -1, -1};
    *request.mutable_topk()->mutable_topk_ids() = client::Int64Tensor({4, kTopK}, ids);
  });
  ExpectRejected(statuses, Reason::kDuplicateExpert, {"topk_ids[2,1]", "5"});
}

TEST_F(StepErrorsTest, TooManyTokensAreRejectedWithBothNumbers) {
  const auto statuses = RunSpoilt(
      [this](v1::ForwardRequest& request) { request = Forward(kGuilty, /*tokens=*/513); });
  ExpectRejected(statuses, Reason::kTokensOverLimit, {"513", "512"});
}

TEST_F(StepErrorsTest, UnknownLayerOnOneRankIsRejectedThere) {
  const auto statuses =
      RunSpoilt([](v1::ForwardRequest& request) { request.set_layer_id("no such layer"); });
  ExpectRejected(statuses, Reason::kLayerUnknown, {"no such layer"});
}

TEST_F(StepErrorsTest, RejectionOnTwoRanksGivesEachItsOwnError) {
  std::vector<v1::ForwardRequest> requests = Forwards();
  requests[0].mutable_tokens()->set_dtype(v1::DTYPE_BF16);
  requests[2].mutable_topk()->clear_topk_weights();
  const auto statuses = driver().RunEach(std::move(requests)).statuses;
  EXPECT_FALSE(HasReason(statuses[0], Reason::kPeerRejected)) << statuses[0];
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kInvalidArgument) << statuses[0];
  ExpectError(statuses[1], Reason::kPeerRejected, {"rank 0"});
  ExpectError(statuses[2], Reason::kShapeMismatch, {"topk_weights"});
}

TEST_F(StepErrorsTest, DifferentOperationsAtOneSequenceAreAConflictThatNamesRanks) {
  std::vector<absl::Status> statuses(kRanks);
  v1::ClearGradientsRequest clear;
  clear.set_layer_id(kLayer);
  const v1::StepHeader header = driver().NextHeader();
  *clear.mutable_header() = header;
  std::vector<std::thread> threads;
  for (int64_t r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      v1::ForwardRequest forward = Forward(r);
      *forward.mutable_header() = header;
      statuses[static_cast<size_t>(r)] = r == kGuilty ? rank(r).Call(clear, Soon()).status()
                                                      : rank(r).Call(forward, Soon()).status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) {
    ExpectError(status, Reason::kSequenceConflict,
                {"rank 0", StrCat("rank ", kGuilty), "Forward", "ClearGradients"});
  }
  driver().Distrust();
}

TEST_F(StepErrorsTest, RetryGetsTheStoredReplyAndAnotherRequestIsRefused) {
  std::vector<v1::ForwardRequest> requests = Forwards();
  for (auto& request : requests) {
    request.set_keep_for_backward(true);
    *request.mutable_header() = driver().NextHeader();
  }
  // Each rank has its own request id.
  for (size_t r = 0; r < requests.size(); ++r) {
    requests[r].mutable_header()->set_request_id(1000 + r);
  }
  const auto first = client::CallAll(group().clients(), requests, Soon());
  const auto again = client::CallAll(group().clients(), requests, Soon());
  for (size_t r = 0; r < requests.size(); ++r) {
    ASSERT_OK(first.statuses[r]);
    ASSERT_OK(again.statuses[r]);
    EXPECT_EQ(again.responses[r].SerializeAsString(), first.responses[r].SerializeAsString());
    requests[r].mutable_header()->set_request_id(2000 + r);
  }
  for (const absl::Status& status : client::CallAll(group().clients(), requests, Soon()).statuses) {
    ExpectError(status, Reason::kSequenceConflict, {});
  }
  driver().Distrust();
}

TEST_F(StepErrorsTest, SpentTicketIsUnknown) {
  std::vector<v1::ForwardRequest> forwards = Forwards();
  for (auto& request : forwards) request.set_keep_for_backward(true);
  const auto tickets = driver().Run(forwards);
  ASSERT_OK(tickets);
  std::vector<v1::BackwardRequest> backwards(kRanks);
  for (size_t r = 0; r < backwards.size(); ++r) {
    backwards[r].set_ticket((*tickets)[r].ticket());
    *backwards[r].mutable_output_gradient() = (*tickets)[r].output();
  }
  ASSERT_OK(driver().Run(backwards));
  for (const absl::Status& status : driver().RunEach(backwards).statuses) {
    ExpectError(status, Reason::kTicketUnknown, {});
  }
}

TEST_F(StepErrorsTest, ErrorDetailsDecodeToErrorInfoAndFieldPaths) {
  // Through a plain stub, as any client in any language sees it.
  const auto stub = v1::StepService::NewStub(
      grpc::CreateChannel(processes().hosts()[kGuilty], grpc::InsecureChannelCredentials()));
  std::vector<v1::ForwardRequest> requests = Forwards();
  const v1::StepHeader header = driver().NextHeader();
  for (auto& request : requests) *request.mutable_header() = header;
  requests[kGuilty].mutable_topk()->mutable_topk_weights()->set_shape(1, kTopK + 1);
  requests[kGuilty].mutable_tokens()->set_dtype(v1::DTYPE_I32);
  grpc::Status status;
  std::thread guilty([&] {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(30)));
    v1::ForwardResponse response;
    status = stub->Forward(&context, requests[kGuilty], &response);
  });
  const auto others = CallInnocent(requests);
  guilty.join();
  driver().Distrust();
  for (const absl::Status& other : others.statuses) {
    ExpectError(other, Reason::kPeerRejected, {StrCat("rank ", kGuilty)});
  }
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_LE(status.error_message().size(), 2048u);
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(details.message(), status.error_message());
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad_request;
  for (const auto& any : details.details()) {
    any.UnpackTo(&info);
    any.UnpackTo(&bad_request);
  }
  EXPECT_EQ(info.domain(), "expertd.v1");
  EXPECT_NE(ReasonFromName(info.reason()), Reason::kInternal) << info.reason();
  EXPECT_EQ(ReasonCode(ReasonFromName(info.reason())), absl::StatusCode::kInvalidArgument);
  std::set<std::string> paths;
  for (const auto& violation : bad_request.field_violations()) {
    EXPECT_FALSE(violation.description().empty());
    paths.insert(violation.field());
  }
  EXPECT_GE(paths.size(), 1u) << details.DebugString();
  for (const std::string& path : paths) {
    EXPECT_TRUE(absl::StartsWith(path, "tokens") || absl::StartsWith(path, "topk")) << path;
  }
}

// With a short limit on how long ranks wait for each other.
class StepTimeoutTest : public StepErrorsTest {
 protected:
  void SetUp() override { Form(/*timeout_ms=*/1000); }
};

TEST_F(StepTimeoutTest, RankWithoutItsRequestIsNamedAndTheNextStepWorks) {
  std::vector<v1::ForwardRequest> requests = Forwards();
  const v1::StepHeader header = driver().NextHeader();
  for (auto& request : requests) *request.mutable_header() = header;
  const absl::Time begin = absl::Now();
  const auto replies = CallInnocent(requests);
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  for (const absl::Status& status : replies.statuses) {
    ExpectMissing(status, StrCat(kGuilty));
  }
  // Its late request is told why at once, and takes no part in what comes next.
  const absl::Time late = absl::Now();
  const absl::Status status = rank(kGuilty).Call(requests[kGuilty], Soon()).status();
  EXPECT_TRUE(HasReason(status, Reason::kStepTimeout)) << status;
  EXPECT_LT(absl::Now() - late, absl::Seconds(5));
  driver().Distrust();
}

TEST_F(StepTimeoutTest, RankThatNeverSendsLosesOnlyThatSequence) {
  std::vector<v1::ForwardRequest> requests = Forwards();
  const v1::StepHeader header = driver().NextHeader();
  for (auto& request : requests) *request.mutable_header() = header;
  const auto replies = CallInnocent(requests);
  for (const absl::Status& status : replies.statuses) {
    ExpectMissing(status, StrCat(kGuilty));
  }
  for (int64_t r = 0; r < kRanks; ++r) {
    const auto described = rank(r).Call(v1::DescribeGroupRequest(), Soon());
    ASSERT_OK(described);
    EXPECT_EQ(described->group().state(), v1::GROUP_STATE_READY) << "rank " << r;
    EXPECT_EQ(described->group().next_sequence(), header.sequence() + 1) << "rank " << r;
    v1::GetStepOutcomeRequest outcome;
    outcome.set_epoch(header.epoch());
    outcome.set_sequence(header.sequence());
    const auto known = rank(r).Call(outcome, Soon());
    ASSERT_OK(known);
    EXPECT_EQ(known->state(), v1::STEP_STATE_FAILED) << "rank " << r;
    EXPECT_EQ(known->reason(), "STEP_TIMEOUT") << "rank " << r;
  }
  driver().Distrust();
}

TEST_F(StepTimeoutTest, EarlySequenceWaitsForTheGapAndIsEndedByTheDeadline) {
  v1::ForwardRequest early = Forward(0);
  *early.mutable_header() = driver().NextHeader();
  early.mutable_header()->set_sequence(early.header().sequence() + 1);
  const client::CallOptions options{.deadline = absl::Now() + absl::Seconds(8)};
  const absl::Status status = rank(0).Call(early, options).status();
  EXPECT_FALSE(status.ok());
  driver().Distrust();
}

}  // namespace
}  // namespace expertd::integration
