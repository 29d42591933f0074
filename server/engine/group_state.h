// The group lifecycle as a pure state machine: Idle -> Joining -> Ready -> (Draining | Broken).
//
// Decides whether a join, claim or leave is allowed, and what it fences; performs nothing.
#ifndef SERVER_ENGINE_GROUP_STATE_H_
#define SERVER_ENGINE_GROUP_STATE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace expertd::engine {

enum class GroupState : uint8_t { kIdle = 1, kJoining, kReady, kDraining, kBroken };
std::string_view GroupStateName(GroupState state);

enum class JoinDecision : uint8_t {
  kJoin,           // start joining; first leave whatever epoch is current
  kAlreadyJoined,  // this very epoch and rank is Ready
  kInProgress,     // this very epoch is being joined
};

class GroupStateMachine {
 public:
  GroupState state() const { return state_; }
  const std::string& group_id() const { return group_id_; }
  uint64_t epoch() const { return epoch_; }  // 0 when idle
  uint64_t highest_epoch_seen() const { return highest_seen_; }
  // Grows with every change.
  uint64_t version() const { return version_; }
  const std::string& reason() const { return reason_; }
  bool draining() const { return draining_; }

  // An epoch was claimed here, or a peer spoke of it.
  void SawEpoch(uint64_t epoch);

  // Errors: EPOCH_STALE with both numbers; DRAINING.
  absl::StatusOr<JoinDecision> OnJoinRequest(std::string_view group_id, uint64_t epoch);
  void OnJoined(uint64_t epoch);
  void OnJoinFailed(uint64_t epoch);

  // Whether (group, epoch) may be left. OK and `false` when it is not the current one but an older
  // or unknown one that is already gone. Errors: EPOCH_STALE when a newer epoch is current.
  absl::StatusOr<bool> OnLeaveRequest(std::string_view group_id, uint64_t epoch) const;
  void OnLeft();

  // The communicator can no longer be used.
  void OnBroken(uint64_t epoch, std::string_view reason);

  void OnDrain(bool draining);

  // Whether steps of (group, epoch) may be accepted. Errors: GROUP_NOT_READY, EPOCH_STALE,
  // GROUP_BROKEN with the reason, DRAINING.
  absl::Status CheckStep(std::string_view group_id, uint64_t epoch) const;

 private:
  void Change() { ++version_; }

  GroupState state_ = GroupState::kIdle;
  std::string group_id_;
  uint64_t epoch_ = 0;
  uint64_t highest_seen_ = 0;
  uint64_t version_ = 1;
  std::string reason_;
  bool draining_ = false;
};

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_GROUP_STATE_H_
