// Transitions of the group lifecycle.
#include "server/engine/group_state.h"

#include <algorithm>

#include "base/error.h"
#include "base/strings.h"

namespace expertd::engine {
namespace {

absl::Status Stale(uint64_t got, uint64_t need) {
  return Error(Reason::kEpochStale)
      .Text("epoch is stale: got ", got, ", need ", need)
      .With("epoch", got)
      .With("current_epoch", need);
}

absl::Status DrainingError() {
  return Error(Reason::kDraining).Text("this daemon is draining: it takes no new work");
}

}  // namespace

std::string_view GroupStateName(GroupState state) {
  switch (state) {
    case GroupState::kIdle:
      return "IDLE";
    case GroupState::kJoining:
      return "JOINING";
    case GroupState::kReady:
      return "READY";
    case GroupState::kDraining:
      return "DRAINING";
    case GroupState::kBroken:
      return "BROKEN";
  }
  return "IDLE";
}

void GroupStateMachine::SawEpoch(uint64_t epoch) {
  if (epoch <= highest_seen_) return;
  highest_seen_ = epoch;
  Change();
}

absl::StatusOr<JoinDecision> GroupStateMachine::OnJoinRequest(std::string_view group_id,
                                                              uint64_t epoch) {
  if (epoch == epoch_ && group_id == group_id_) {
    if (state_ == GroupState::kReady) return JoinDecision::kAlreadyJoined;
    if (state_ == GroupState::kJoining) return JoinDecision::kInProgress;
  }
  if (epoch <= epoch_ || epoch < highest_seen_) {
    const uint64_t seen = std::max(epoch_, highest_seen_);
    return Error(Reason::kEpochStale)
        .Text("epoch is stale: got ", epoch, ", have seen ", seen, ", need a newer one")
        .With("epoch", epoch)
        .With("current_epoch", seen);
  }
  if (draining_) return DrainingError();
  state_ = GroupState::kJoining;
  group_id_ = std::string(group_id);
  epoch_ = epoch;
  highest_seen_ = std::max(highest_seen_, epoch);
  reason_.clear();
  Change();
  return JoinDecision::kJoin;
}

void GroupStateMachine::OnJoined(uint64_t epoch) {
  if (epoch != epoch_ || state_ != GroupState::kJoining) return;
  state_ = draining_ ? GroupState::kDraining : GroupState::kReady;
  Change();
}

void GroupStateMachine::OnJoinFailed(uint64_t epoch) {
  if (epoch != epoch_ || state_ != GroupState::kJoining) return;
  OnLeft();
}

absl::StatusOr<bool> GroupStateMachine::OnLeaveRequest(std::string_view group_id,
                                                       uint64_t epoch) const {
  if (epoch < epoch_) return Stale(epoch, epoch_);
  return state_ != GroupState::kIdle && epoch == epoch_ && group_id == group_id_;
}

void GroupStateMachine::OnLeft() {
  state_ = GroupState::kIdle;
  group_id_.clear();
  epoch_ = 0;
  reason_.clear();
  Change();
}

void GroupStateMachine::OnBroken(uint64_t epoch, std::string_view reason) {
  if (epoch != epoch_ || state_ == GroupState::kIdle || state_ == GroupState::kBroken) return;
  state_ = GroupState::kBroken;
  reason_ = std::string(reason);
  Change();
}

void GroupStateMachine::OnDrain(bool draining) {
  if (draining == draining_) return;
  draining_ = draining;
  if (draining && state_ == GroupState::kReady) state_ = GroupState::kDraining;
  if (!draining && state_ == GroupState::kDraining) state_ = GroupState::kReady;
  Change();
}

absl::Status GroupStateMachine::CheckStep(std::string_view group_id, uint64_t epoch) const {
  if (state_ == GroupState::kIdle) {
    return Error(Reason::kGroupNotReady)
        .Text("no group is formed here: got a step of group ", group_id, " epoch ", epoch)
        .With("state", GroupStateName(state_));
  }
  if (epoch != epoch_) return Stale(epoch, epoch_);
  if (group_id != group_id_) {
    return Error(Reason::kGroupNotReady)
        .Text("this daemon is in another group: got ", group_id, ", need ", group_id_)
        .With("group_id", group_id_);
  }
  if (state_ == GroupState::kJoining) {
    return Error(Reason::kGroupNotReady)
        .Text("the group is still forming")
        .With("state", GroupStateName(state_));
  }
  if (state_ == GroupState::kBroken) {
    return Error(Reason::kGroupBroken).Text("the group is broken: ", reason_).With("epoch", epoch_);
  }
  if (state_ == GroupState::kDraining) return DrainingError();
  return absl::OkStatus();
}

}  // namespace expertd::engine
