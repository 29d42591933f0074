// The group lifecycle: every transition, and what is refused in every state.
#include "server/engine/group_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"

namespace expertd::engine {
namespace {

using testing::HasSubstr;

GroupStateMachine Joining(uint64_t epoch = 5) {
  GroupStateMachine machine;
  EXPECT_EQ(*machine.OnJoinRequest("g", epoch), JoinDecision::kJoin);
  return machine;
}
GroupStateMachine Ready(uint64_t epoch = 5) {
  GroupStateMachine machine = Joining(epoch);
  machine.OnJoined(epoch);
  return machine;
}

TEST(GroupStateTest, StartsIdle) {
  const GroupStateMachine machine;
  EXPECT_EQ(machine.state(), GroupState::kIdle);
  EXPECT_EQ(machine.epoch(), 0u);
  EXPECT_EQ(ReasonOf(machine.CheckStep("g", 1)), Reason::kGroupNotReady);
}

TEST(GroupStateTest, AJoinLeadsToReadyAndStepsAreAccepted) {
  GroupStateMachine machine = Joining();
  EXPECT_EQ(machine.state(), GroupState::kJoining);
  EXPECT_EQ(ReasonOf(machine.CheckStep("g", 5)), Reason::kGroupNotReady);
  EXPECT_EQ(*machine.OnJoinRequest("g", 5), JoinDecision::kInProgress);
  machine.OnJoined(4);  // of another epoch: ignored
  EXPECT_EQ(machine.state(), GroupState::kJoining);
  machine.OnJoined(5);
  EXPECT_EQ(machine.state(), GroupState::kReady);
  EXPECT_EQ(*machine.OnJoinRequest("g", 5), JoinDecision::kAlreadyJoined);
  EXPECT_TRUE(machine.CheckStep("g", 5).ok());
}

TEST(GroupStateTest, OlderAndEqualEpochsAreStaleWithBothNumbers) {
  GroupStateMachine machine = Ready();
  for (const auto& [group, epoch] : {std::pair("g", 4u), std::pair("h", 5u), std::pair("h", 1u)}) {
    const absl::Status status = machine.OnJoinRequest(group, epoch).status();
    EXPECT_EQ(ReasonOf(status), Reason::kEpochStale);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("got " + std::to_string(epoch) + ", have seen 5"));
  }
  EXPECT_EQ(machine.state(), GroupState::kReady);
}

TEST(GroupStateTest, ANewerEpochIsJoinedFromEveryState) {
  GroupStateMachine broken = Ready();
  broken.OnBroken(5, "x");
  for (GroupStateMachine machine : {GroupStateMachine(), Joining(), Ready(), broken}) {
    EXPECT_EQ(*machine.OnJoinRequest("h", 6), JoinDecision::kJoin);
    EXPECT_EQ(machine.group_id(), "h");
    EXPECT_EQ(machine.epoch(), 6u);
    EXPECT_EQ(machine.reason(), "");
    machine.OnJoined(5);
    machine.OnJoinFailed(5);
    machine.OnBroken(5, "late news of the older epoch");
    EXPECT_EQ(machine.state(), GroupState::kJoining);
  }
}

TEST(GroupStateTest, AnEpochSeenElsewhereMakesOlderJoinsStaleButMayItselfBeJoined) {
  GroupStateMachine machine;
  machine.SawEpoch(9);
  machine.SawEpoch(3);
  EXPECT_EQ(machine.highest_epoch_seen(), 9u);
  EXPECT_EQ(ReasonOf(machine.OnJoinRequest("g", 8).status()), Reason::kEpochStale);
  EXPECT_EQ(*machine.OnJoinRequest("g", 9), JoinDecision::kJoin);
}

TEST(GroupStateTest, AFailedJoinLeavesIdleAndTheSameEpochMayTryAgain) {
  GroupStateMachine machine = Joining();
  machine.OnJoinFailed(5);
  EXPECT_EQ(machine.state(), GroupState::kIdle);
  EXPECT_EQ(machine.epoch(), 0u);
  EXPECT_EQ(machine.highest_epoch_seen(), 5u);
  EXPECT_EQ(ReasonOf(machine.OnJoinRequest("g", 4).status()), Reason::kEpochStale);
  EXPECT_EQ(*machine.OnJoinRequest("g", 5), JoinDecision::kJoin);
}

TEST(GroupStateTest, AJoinCannotFailOnceItIsReady) {
  GroupStateMachine machine = Ready();
  machine.OnJoinFailed(5);
  EXPECT_EQ(machine.state(), GroupState::kReady);
}

TEST(GroupStateTest, StepsOfOtherEpochsAndGroupsAreRefused) {
  const GroupStateMachine machine = Ready();
  EXPECT_EQ(ReasonOf(machine.CheckStep("g", 4)), Reason::kEpochStale);
  EXPECT_EQ(ReasonOf(machine.CheckStep("g", 6)), Reason::kEpochStale);
  EXPECT_EQ(ReasonOf(machine.CheckStep("h", 5)), Reason::kGroupNotReady);
}

TEST(GroupStateTest, ABrokenGroupSaysWhyAndCanBeLeft) {
  GroupStateMachine machine = Ready();
  machine.OnBroken(5, "rank 3 is lost");
  machine.OnBroken(5, "a later reason");
  const absl::Status status = machine.CheckStep("g", 5);
  EXPECT_EQ(ReasonOf(status), Reason::kGroupBroken);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 3 is lost"));
  EXPECT_EQ(ReasonOf(machine.OnJoinRequest("g", 5).status()), Reason::kEpochStale);
  EXPECT_TRUE(*machine.OnLeaveRequest("g", 5));
  machine.OnLeft();
  EXPECT_EQ(machine.state(), GroupState::kIdle);
  EXPECT_EQ(machine.reason(), "");
}

TEST(GroupStateTest, LeavingWhatIsGoneIsSuccessAndAnOlderEpochIsStale) {
  GroupStateMachine machine = Ready();
  EXPECT_TRUE(*machine.OnLeaveRequest("g", 5));
  EXPECT_EQ(ReasonOf(machine.OnLeaveRequest("g", 4).status()), Reason::kEpochStale);
  EXPECT_FALSE(*machine.OnLeaveRequest("g", 6));
  EXPECT_FALSE(*machine.OnLeaveRequest("h", 5));
  machine.OnLeft();
  EXPECT_FALSE(*machine.OnLeaveRequest("g", 5));
  EXPECT_FALSE(*machine.OnLeaveRequest("", 0));
}

TEST(GroupStateTest, DrainingRefusesStepsAndJoinsUntilResumed) {
  GroupStateMachine machine = Ready();
  machine.OnDrain(true);
  EXPECT_EQ(machine.state(), GroupState::kDraining);
  EXPECT_EQ(ReasonOf(machine.CheckStep("g", 5)), Reason::kDraining);
  EXPECT_EQ(ReasonOf(machine.OnJoinRequest("g", 6).status()), Reason::kDraining);
  machine.OnDrain(false);
  EXPECT_EQ(machine.state(), GroupState::kReady);
  EXPECT_TRUE(machine.CheckStep("g", 5).ok());
}

TEST(GroupStateTest, ADrainDuringAJoinShowsOnceItIsDone) {
  GroupStateMachine machine = Joining();
  machine.OnDrain(true);
  EXPECT_EQ(machine.state(), GroupState::kJoining);
  machine.OnJoined(5);
  EXPECT_EQ(machine.state(), GroupState::kDraining);
}

TEST(GroupStateTest, DrainingOutlivesTheGroup) {
  GroupStateMachine machine = Ready();
  machine.OnDrain(true);
  machine.OnLeft();
  EXPECT_TRUE(machine.draining());
  EXPECT_EQ(ReasonOf(machine.OnJoinRequest("g", 6).status()), Reason::kDraining);
}

TEST(GroupStateTest, TheVersionGrowsWithEveryChangeAndWithNothingElse) {
  GroupStateMachine machine;
  uint64_t version = machine.version();
  const auto changed = [&] { return std::exchange(version, machine.version()) < version; };
  machine.SawEpoch(5);
  EXPECT_TRUE(changed());
  machine.SawEpoch(5);
  EXPECT_FALSE(changed());
  machine.OnJoinRequest("g", 5).IgnoreError();
  EXPECT_TRUE(changed());
  machine.OnJoinRequest("g", 5).IgnoreError();
  machine.OnJoinRequest("g", 4).IgnoreError();
  EXPECT_FALSE(changed());
  machine.OnJoined(5);
  EXPECT_TRUE(changed());
  machine.OnDrain(true);
  EXPECT_TRUE(changed());
  machine.OnDrain(true);
  EXPECT_FALSE(changed());
  machine.OnBroken(5, "x");
  EXPECT_TRUE(changed());
  machine.OnLeft();
  EXPECT_TRUE(changed());
}

TEST(GroupStateTest, StatesHaveNames) {
  EXPECT_EQ(GroupStateName(GroupState::kIdle), "IDLE");
  EXPECT_EQ(GroupStateName(GroupState::kJoining), "JOINING");
  EXPECT_EQ(GroupStateName(GroupState::kReady), "READY");
  EXPECT_EQ(GroupStateName(GroupState::kDraining), "DRAINING");
  EXPECT_EQ(GroupStateName(GroupState::kBroken), "BROKEN");
}

}  // namespace
}  // namespace expertd::engine
