// State and scope of the model of daemons that form groups.
#ifndef TESTS_MODEL_GROUP_MODEL_STATE_H_
#define TESTS_MODEL_GROUP_MODEL_STATE_H_

#include <cstdint>

namespace expertd::model {

inline constexpr int kDaemons = 3;  // at most
inline constexpr int kEpochs = 3;   // 1..kEpochs
inline constexpr int kControllers = 2;
inline constexpr int kQueue = 4;

// A deliberate fault in what surrounds the real pieces.
enum class GroupMutation : uint8_t {
  kNone,
  kSpendAnyClaim,  // a join that its root refuses spends whatever claim the root holds
  kShareClaim,     // a second claimant of an epoch is given it too
  kForgetWaiters,  // a newer epoch fences an older join without answering its callers
  kReadyAlone,     // a rank is ready when its own communicator is
  kLateFinish,     // the end of a fenced join still counts
};

enum class Stage : uint8_t { kNone, kConfig, kReady };
enum class RpcState : uint8_t { kUnsent, kWaiting, kOk, kFailed };

struct Daemon {
  uint16_t machine = 0;
  uint8_t board_epoch = 0;
  uint8_t board_open : 1 = 0;
  uint8_t board_ended : 1 = 0;  // End was called, and Begin not since
  uint8_t unused : 6 = 0;
  Stage stage = Stage::kNone;  // of the join that the device thread is in
  uint8_t join_epoch = 0;
  uint8_t failed = 0;          // daemons that refused a record of that join
  uint8_t waiters = 0;         // JoinGroup calls to answer: a bit per controller
  uint8_t queue[kQueue] = {};  // 2 * epoch + (1: leave); 0: none
};

// Records of one epoch at one daemon. Masks have a bit per sending daemon.
struct Records {
  uint8_t config = 0;
  uint8_t config_flight = 0;
  uint8_t ready = 0;
  uint8_t ready_flight = 0;
};

struct Controller {
  uint8_t epoch = 0;  // picked; 0: not begun
  uint8_t claimed : 1 = 0;
  uint8_t refused : 1 = 0;  // the claim
  uint8_t unused : 6 = 0;
  RpcState joins[kDaemons] = {};
};

struct GroupModelState {
  Daemon daemons[kDaemons];
  Records records[kDaemons][kEpochs + 1];
  uint8_t owner[kEpochs + 1] = {};    // 1 + controller that the root gave the epoch to
  uint8_t refused[kEpochs + 1] = {};  // daemons whose join record refuses
  Controller controllers[kControllers];
  uint8_t claim_epoch = 0;  // at the root, daemon 0
  uint8_t claim_owner = 0;
  uint8_t claim_used = 0;
  uint8_t early = 0;      // time limits that may pass before everything settles
  uint8_t leaves = 0;     // LeaveGroup or AbortGroup calls that may still come
  uint8_t again = 0;      // controllers that failed and may still begin anew
  uint8_t disturbed = 0;  // the newest epoch was left or timed out somewhere
  uint8_t unused = 0;
};

struct GroupScope {
  int daemons = kDaemons;
  uint8_t early = 0;
  uint8_t leaves = 0;
  uint8_t again = 0;
  GroupMutation mutation = GroupMutation::kNone;
};

}  // namespace expertd::model

#endif  // TESTS_MODEL_GROUP_MODEL_STATE_H_
