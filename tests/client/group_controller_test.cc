// Tests of the pure parts of forming groups and counting sequences.
#include "client/cpp/group_controller.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "client/cpp/step_driver.h"

namespace expertd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::GroupInfo Info(int64_t rank, uint64_t next_sequence) {
  v1::GroupInfo info;
  info.set_group_id("g");
  info.set_epoch(5);
  info.set_state(v1::GROUP_STATE_READY);
  info.set_rank(rank);
  info.add_members();
  info.add_members();
  info.set_next_sequence(next_sequence);
  return info;
}

HostReport Report(const std::string& host, int64_t rank) {
  HostReport report;
  report.host = host;
  report.group = Info(rank, 1);
  return report;
}

TEST(MakeJoinRequestsTest, EveryRankGetsTheSameButItsRank) {
  UpRequest up;
  up.group_id = "g";
  std::vector<PlacedRank> ranks(4);
  for (int64_t i = 0; i < 4; ++i) {
    ranks[i].rank = i;
    ranks[i].member.set_slot(10 * i);
  }
  const auto requests = MakeJoinRequests(up, ranks, 77, "secret");
  ASSERT_EQ(requests.size(), 4u);
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(requests[i].rank(), i);
    EXPECT_EQ(requests[i].epoch(), 77u);
    EXPECT_EQ(requests[i].bootstrap_id(), "secret");
    EXPECT_EQ(requests[i].members_size(), 4);
    EXPECT_EQ(requests[i].members(3).slot(), 30);
    EXPECT_EQ(requests[i].config().ep_size(), 4);
  }
}

TEST(MakeJoinRequestsTest, AnEpSizeThatIsGivenStays) {
  UpRequest up;
  up.config.set_ep_size(3);
  const auto requests = MakeJoinRequests(up, std::vector<PlacedRank>(4), 1, "");
  EXPECT_EQ(requests[0].config().ep_size(), 3);
}

TEST(OrderByRankTest, HostsComeInAnyOrder) {
  const auto order = OrderByRank({Report("b", 1), Report("a", 0)});
  ASSERT_TRUE(order.ok()) << order.status();
  EXPECT_THAT(*order, ElementsAre(1, 0));
}

TEST(OrderByRankTest, EveryHostIsDescribedWhenTheyAreNoGroup) {
  HostReport idle;
  idle.host = "b";
  const absl::Status status = OrderByRank({Report("a", 0), idle}).status();
  EXPECT_EQ(ReasonOf(status), Reason::kGroupNotReady);
  EXPECT_THAT(std::string(status.message()), HasSubstr("a: GROUP_STATE_READY in g epoch 5"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("b: in no group"));
}

TEST(OrderByRankTest, RefusesTheSameRankTwiceOtherEpochsAndMissingHosts) {
  EXPECT_FALSE(OrderByRank({Report("a", 0), Report("b", 0)}).ok());
  HostReport other = Report("b", 1);
  other.group.set_epoch(6);
  EXPECT_FALSE(OrderByRank({Report("a", 0), other}).ok());
  EXPECT_FALSE(OrderByRank({Report("a", 0)}).ok());  // The group has two members.
}

TEST(AgreeOnTest, EqualNumbersAreAgreed) {
  const Agreement agreement = AgreeOn({Info(0, 8), Info(1, 8)}, "g", 5);
  EXPECT_EQ(agreement.state, Agreement::State::kAgreed);
  EXPECT_EQ(agreement.next_sequence, 8u);
}

TEST(AgreeOnTest, DifferentNumbersAreWaitedFor) {
  const Agreement agreement = AgreeOn({Info(0, 9), Info(1, 8)}, "g", 5);
  EXPECT_EQ(agreement.state, Agreement::State::kWait);
  EXPECT_THAT(agreement.reason, HasSubstr("rank 1 is at 8"));
}

TEST(AgreeOnTest, AnotherEpochOrABrokenGroupEndsIt) {
  EXPECT_EQ(AgreeOn({Info(0, 8), Info(1, 8)}, "g", 6).state, Agreement::State::kBroken);
  v1::GroupInfo broken = Info(1, 8);
  broken.set_state(v1::GROUP_STATE_BROKEN);
  broken.set_reason("rank 0 is gone");
  const Agreement agreement = AgreeOn({Info(0, 8), broken}, "g", 5);
  EXPECT_EQ(agreement.state, Agreement::State::kBroken);
  EXPECT_THAT(agreement.reason, HasSubstr("rank 0 is gone"));
}

TEST(StepTimeoutTest, FollowsTheGroupsBaseLimit) {
  EXPECT_GT(DefaultStepTimeout(10000), absl::Seconds(20));
  EXPECT_EQ(DefaultStepTimeout(0), DefaultStepTimeout(30000));
}

}  // namespace
}  // namespace expertd::client
