// Tests of forming groups and driving steps against daemons whose answers the test decides.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "client/cpp/group_controller.h"
#include "client/cpp/step_driver.h"
#include "tests/client/fake_daemon.h"

namespace expertd::client {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(30);

CallOptions Within(absl::Duration time) { return {.deadline = absl::Now() + time}; }

class FakeGroupTest : public testing::Test {
 protected:
  FakeGroupTest() {
    // Slots are the reverse of the order that hosts are given in.
    for (int64_t i = 0; i < 3; ++i) daemons_.push_back(std::make_unique<FakeDaemon>(2 - i));
    request_.group_id = "g";
    for (const auto& daemon : daemons_) request_.hosts.push_back(daemon->address());
    request_.claimant = "test";
  }

  // Rank 0 is the last daemon.
  FakeDaemon& rank(int64_t rank) { return *daemons_[2 - rank]; }

  Group MakeGroup() {
    absl::StatusOr<Group> group = Up(request_, Within(kLong));
    EXPECT_TRUE(group.ok()) << group.status();
    return *std::move(group);
  }

  void SetNext(uint64_t sequence) {
    for (const auto& daemon : daemons_) {
      daemon->Set([&](auto&, v1::GroupInfo& group) { group.set_next_sequence(sequence); });
    }
  }

  std::vector<std::unique_ptr<FakeDaemon>> daemons_;
  UpRequest request_;
};

TEST_F(FakeGroupTest, UpPlacesSlotsOnRanksAboveEveryEpochSeen) {
  constexpr uint64_t kSeen = 9000000000000;
  rank(1).Set([](v1::GetServerInfoResponse& info, auto&) { info.set_highest_epoch_seen(kSeen); });
  const Group group = MakeGroup();
  EXPECT_EQ(group.epoch(), kSeen + 1);
  EXPECT_EQ(group.config().ep_size(), 3);
  for (int64_t r = 0; r < 3; ++r) {
    EXPECT_EQ(group.infos[r].rank(), r);
    EXPECT_EQ(group.ranks[r]->origin().address, rank(r).address());
  }
}

TEST_F(FakeGroupTest, AnOwnErrorOfOneRankIsReportedAndTheAttemptAborted) {
  for (int64_t r = 0; r < 3; ++r) {
    rank(r).on_join = [r](const v1::JoinGroupRequest&) {
      return r == 1 ? ToGrpc(Error(Reason::kBackendUnsupported).Text("no gloo here"))
                    : ToGrpc(Error(Reason::kPeerRejected).Text("rank 1 refused"));
    };
  }
  const absl::Status status = Up(request_, Within(kLong)).status();
  EXPECT_EQ(ReasonOf(status), Reason::kBackendUnsupported);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 (" + rank(1).address()));
  for (int64_t r = 0; r < 3; ++r) {
    ASSERT_EQ(rank(r).aborts().size(), 1u);
    EXPECT_THAT(rank(r).aborts()[0].reason(), HasSubstr("no gloo here"));
  }
}

TEST_F(FakeGroupTest, UpIsBoundedByItsDeadline) {
  // Shared with the daemon, whose handler may look at it after this test's end.
  const auto done = std::make_shared<absl::Notification>();
  rank(2).on_join = [done](const v1::JoinGroupRequest&) {
    done->WaitForNotificationWithTimeout(kLong);
    return grpc::Status::OK;
  };
  const absl::Time start = absl::Now();
  EXPECT_FALSE(Up(request_, Within(absl::Seconds(1))).ok());
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  done->Notify();
}

TEST_F(FakeGroupTest, AttachFindsTheGroupThatDownEnds) {
  EXPECT_EQ(ReasonOf(Attach(request_.hosts, Within(kLong)).status()), Reason::kGroupNotReady);
  const uint64_t epoch = MakeGroup().epoch();
  const absl::StatusOr<Group> found = Attach(request_.hosts, Within(kLong));
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->epoch(), epoch);
  EXPECT_TRUE(Down(request_.hosts, Within(kLong)).ok());
  EXPECT_TRUE(Down(request_.hosts, Within(kLong)).ok());  // Being in none is success.
  EXPECT_FALSE(Attach(request_.hosts, Within(kLong)).ok());
}

TEST_F(FakeGroupTest, EveryRankGetsTheSameSequenceAndItsOwnRequestId) {
  const Group group = MakeGroup();
  StepDriver driver(group, {});
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(driver.RunSame(v1::ForwardRequest()).ok());
  std::vector<uint64_t> ids;
  for (int64_t r = 0; r < 3; ++r) {
    const auto headers = rank(r).headers();
    ASSERT_EQ(headers.size(), 3u);
    for (uint64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(headers[i].sequence(), i + 1);
      EXPECT_EQ(headers[i].epoch(), group.epoch());
      EXPECT_NE(headers[i].request_id(), 0u);
      ids.push_back(headers[i].request_id());
    }
  }
  std::sort(ids.begin(), ids.end());
  EXPECT_EQ(std::unique(ids.begin(), ids.end()), ids.end());
}

TEST_F(FakeGroupTest, ARefusedStepNamesTheGuiltyRankAndConsumesItsSequence) {
  const Group group = MakeGroup();
  StepDriver driver(group, {});
  for (int64_t r = 0; r < 3; ++r) {
    rank(r).on_forward = [r](const v1::StepHeader& header, const auto&) {
      if (header.sequence() != 1) return grpc::Status::OK;
      return r == 2 ? ToGrpc(Error(Reason::kExpertIdRange).Text("bad id"))
                    : ToGrpc(Error(Reason::kPeerRejected).Text("rank 2"));
    };
  }
  const absl::Status status = driver.RunSame(v1::ForwardRequest()).status();
  EXPECT_EQ(ReasonOf(status), Reason::kExpertIdRange);
  EXPECT_THAT(std::string(status.message()), HasSubstr("Forward at sequence 1: rank 2 ("));
  ASSERT_TRUE(driver.RunSame(v1::ForwardRequest()).ok());
  EXPECT_EQ(rank(0).headers().back().sequence(), 2u);
}

TEST_F(FakeGroupTest, AfterAnUnknownOutcomeTheRanksAreAskedForTheSequence) {
  const Group group = MakeGroup();
  StepDriver driver(group, {});
  rank(1).on_forward = [](const v1::StepHeader& header, const auto&) {
    return header.sequence() == 1 ? ToGrpc(Error(Reason::kStepTimeout).Text("rank 0"))
                                  : grpc::Status::OK;
  };
  EXPECT_EQ(ReasonOf(driver.RunSame(v1::ForwardRequest()).status()), Reason::kStepTimeout);
  SetNext(7);
  ASSERT_TRUE(driver.RunSame(v1::ForwardRequest()).ok());
  EXPECT_EQ(rank(2).headers().back().sequence(), 7u);
}

TEST_F(FakeGroupTest, RanksThatDisagreeAreWaitedFor) {
  const Group group = MakeGroup();
  StepDriver driver(group, {});
  driver.Distrust();
  SetNext(5);
  uint64_t next = 2;  // Rank 0 arrives where the others are at its third answer.
  rank(0).on_describe = [&next](v1::GroupInfo& info) { info.set_next_sequence(++next); };
  EXPECT_TRUE(driver.RunSame(v1::ForwardRequest()).ok());
  EXPECT_EQ(rank(1).headers().back().sequence(), 5u);
}

TEST_F(FakeGroupTest, ABrokenGroupIsSaidToBe) {
  const Group group = MakeGroup();
  StepDriver driver(group, {});
  driver.Distrust();
  rank(1).Set([](auto&, v1::GroupInfo& info) {
    info.set_state(v1::GROUP_STATE_BROKEN);
    info.set_reason("rank 0 is gone");
  });
  const absl::Status status = driver.RunSame(v1::ForwardRequest()).status();
  EXPECT_EQ(ReasonOf(status), Reason::kGroupBroken);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 is gone"));
}

TEST_F(FakeGroupTest, AStopFlagCancelsTheRunningStep) {
  const Group group = MakeGroup();
  std::atomic<bool> stop{false};
  StepDriver driver(group, {.stop = &stop});
  rank(1).on_forward = [&stop](const v1::StepHeader&, const std::function<bool()>& cancelled) {
    stop = true;
    while (!cancelled()) absl::SleepFor(absl::Milliseconds(5));
    return grpc::Status(grpc::StatusCode::CANCELLED, "");
  };
  const absl::Time start = absl::Now();
  EXPECT_TRUE(absl::IsCancelled(driver.RunSame(v1::ForwardRequest()).status()));
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  EXPECT_TRUE(absl::IsCancelled(driver.RunSame(v1::ForwardRequest()).status()));
}

TEST_F(FakeGroupTest, ADaemonThatDiesIsNamed) {
  const Group group = MakeGroup();
  StepDriver driver(group, {.retry_window = absl::Milliseconds(300)});
  const std::string address = rank(2).address();
  daemons_.front().reset();
  const absl::Status status = driver.RunSame(v1::ForwardRequest()).status();
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 2 (" + address));
}

TEST_F(FakeGroupTest, AStepperOfOneRankCountsByItself) {
  const Group group = MakeGroup();
  RankStepper stepper(group.ranks[1].get(), group.infos[1], {});
  ASSERT_TRUE(stepper.Run(v1::ForwardRequest()).ok());
  const absl::StatusOr<v1::ForwardResponse> second = stepper.Run(v1::ForwardRequest());
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->ticket(), 2u);
  EXPECT_TRUE(rank(0).headers().empty());
}

}  // namespace
}  // namespace expertd::client
