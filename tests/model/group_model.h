// Daemons that join and leave epochs, and controllers that compete for them.
//
// The functions named as in engine_group.cc and peer_board.cc mirror those; whether a join, leave
// or epoch is allowed is decided by the engine's own GroupStateMachine, and ConcludeJoin ends each
// exchange of join records. One device thread per daemon runs its tasks in order.
#ifndef TESTS_MODEL_GROUP_MODEL_H_
#define TESTS_MODEL_GROUP_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "server/engine/join.h"
#include "tests/model/group_model_state.h"
#include "tests/model/real_pieces.h"

namespace expertd::model {

// What the daemons do.
class GroupSteps {
 public:
  using State = GroupModelState;

  explicit GroupSteps(GroupScope scope) : scope_(scope) {}

  State Initial() {
    State state;
    for (Daemon& daemon : state.daemons) daemon.machine = machines_.New();
    state.early = scope_.early;
    state.leaves = scope_.leaves;
    state.again = scope_.again;
    return state;
  }

  const GroupScope& scope() const { return scope_; }
  int count() const { return scope_.daemons; }
  uint8_t everyone() const { return static_cast<uint8_t>((1 << count()) - 1); }
  const engine::GroupStateMachine& MachineOf(const Daemon& daemon) const {
    return machines_[daemon.machine];
  }
  int EpochOf(const Daemon& daemon) const { return static_cast<int>(MachineOf(daemon).epoch()); }
  bool IsReady(const Daemon& daemon) const {
    return MachineOf(daemon).state() == GroupState::kReady;
  }

  // A controller reads the highest epoch that any daemon has seen, and picks the next.
  void Pick(State& s, int c) {
    uint64_t seen = 0;
    for (const Daemon& d : s.daemons) {
      seen = std::max(seen, MachineOf(d).highest_epoch_seen());
    }
    s.controllers[c].epoch = static_cast<uint8_t>(seen + 1);
  }

  void CreateBootstrapId(State& s, int c) {
    Controller& controller = s.controllers[c];
    Daemon& root = s.daemons[0];
    const auto owner = static_cast<uint8_t>(1 + c);
    const bool mine = s.claim_owner == owner || scope_.mutation == GroupMutation::kShareClaim;
    if (controller.epoch == s.claim_epoch) {
      controller.refused = !mine;
    } else if (controller.epoch <= MachineOf(root).highest_epoch_seen()) {
      controller.refused = 1;
    } else {
      s.claim_epoch = controller.epoch;
      s.claim_owner = owner;
      s.claim_used = 0;
      s.owner[controller.epoch] = owner;
      machines_.SawEpoch(root.machine, controller.epoch);
    }
    controller.claimed = !controller.refused;
  }

  void JoinGroup(State& s, int d, int c) {
    Daemon& daemon = s.daemons[d];
    const int epoch = s.controllers[c].epoch;
    RpcState& call = s.controllers[c].joins[d];
    switch (machines_.OnJoinRequest(daemon.machine, epoch)) {
      case 0:
        call = RpcState::kFailed;
        return;
      case 1 + static_cast<int>(engine::JoinDecision::kAlreadyJoined):
        call = RpcState::kOk;
        return;
      case 1 + static_cast<int>(engine::JoinDecision::kInProgress):
        break;
      default:
        Fence(s, d);
        Post(daemon, static_cast<uint8_t>(2 * epoch));
    }
    call = RpcState::kWaiting;
    daemon.waiters |= static_cast<uint8_t>(1 << c);
  }

  void LeaveGroup(State& s, int d, int epoch) {
    Daemon& daemon = s.daemons[d];
    if (machines_.OnLeaveRequest(daemon.machine, epoch) != 2) return;
    if (MachineOf(daemon).state() == GroupState::kJoining) Fence(s, d);
    Post(daemon, static_cast<uint8_t>(2 * epoch + 1));
  }

  void AbortGroup(State& s, int d, int epoch) {
    Daemon& daemon = s.daemons[d];
    if (machines_.OnLeaveRequest(daemon.machine, epoch) != 2) return;
    Fence(s, d);
    machines_.OnBroken(daemon.machine, epoch);
  }

  void RunTask(State& s, int d) {
    Daemon& daemon = s.daemons[d];
    const int task = daemon.queue[0];
    for (int i = 0; i + 1 < kQueue; ++i) daemon.queue[i] = daemon.queue[i + 1];
    daemon.queue[kQueue - 1] = 0;
    if (task % 2 == 1) return RunLeave(s, d, task / 2);
    RunJoin(s, d, task / 2);
  }

  void RunJoin(State& s, int d, int epoch) {
    Daemon& daemon = s.daemons[d];
    if (EpochOf(daemon) != epoch || MachineOf(daemon).state() != GroupState::kJoining) return;
    if (daemon.waiters == 0) return machines_.OnJoinFailed(daemon.machine, epoch);
    for (int old = 1; old < epoch; ++old) {  // PeerBoard::Begin
      s.records[d][old].config = s.records[d][old].ready = 0;
    }
    daemon.board_open = 1;
    daemon.board_ended = 0;
    daemon.board_epoch = static_cast<uint8_t>(epoch);
    daemon.failed = 0;
    daemon.stage = Stage::kConfig;
    daemon.join_epoch = static_cast<uint8_t>(epoch);
    if (d == 0) {
      const bool mine = s.claim_epoch == epoch && !s.claim_used;
      if (!mine) s.refused[epoch] |= 1;
      if (mine || scope_.mutation == GroupMutation::kSpendAnyClaim) s.claim_used = 1;
    }
    s.records[d][epoch].config |= static_cast<uint8_t>(1 << d);
    Send(s, d, epoch, &Records::config_flight);
  }

  void RunLeave(State& s, int d, int epoch) {
    Daemon& daemon = s.daemons[d];
    if (EpochOf(daemon) != epoch) return;
    End(s, d);
    machines_.OnLeft(daemon.machine);
  }

  // All records of this stage are there.
  void EndStage(State& s, int d) {
    Daemon& daemon = s.daemons[d];
    const int epoch = daemon.join_epoch;
    if (daemon.stage == Stage::kReady) return FinishJoin(s, d, true);
    if (!FitTogether(s, d, epoch)) return FinishJoin(s, d, false);
    if (scope_.mutation == GroupMutation::kReadyAlone) return FinishJoin(s, d, true);
    s.records[d][epoch].ready |= static_cast<uint8_t>(1 << d);
    Send(s, d, epoch, &Records::ready_flight);
    daemon.stage = Stage::kReady;
  }

  void FinishJoin(State& s, int d, bool ok) {
    Daemon& daemon = s.daemons[d];
    const int epoch = daemon.join_epoch;
    daemon.stage = Stage::kNone;
    daemon.join_epoch = 0;
    daemon.failed = 0;
    if (scope_.mutation != GroupMutation::kLateFinish && EpochOf(daemon) != epoch) return;
    if (ok) {
      machines_.OnJoined(daemon.machine, epoch);
    } else {
      machines_.OnJoinFailed(daemon.machine, epoch);
      End(s, d);
    }
    Answer(s, d, ok);
  }

  // A record of `epoch` from `from` comes to `to`: OnPeerRecord and PeerBoard::Post.
  void Deliver(State& s, int from, int to, int epoch, uint8_t Records::*kept) {
    Daemon& daemon = s.daemons[to];
    machines_.SawEpoch(daemon.machine, epoch);
    const bool current = epoch == daemon.board_epoch;
    const bool early =
        epoch > daemon.board_epoch || (current && !daemon.board_open && !daemon.board_ended);
    if (early || (current && daemon.board_open)) {
      s.records[to][epoch].*kept |= static_cast<uint8_t>(1 << from);
    } else if (s.daemons[from].join_epoch == epoch) {  // the sender learns of the refusal
      s.daemons[from].failed |= static_cast<uint8_t>(1 << to);
    }
  }

  // Of the join that is running: 0 it waits, 1 all is there, 2 it cannot end well any more.
  int Verdict(const State& s, int d) const {
    const Daemon& daemon = s.daemons[d];
    const Records& records = s.records[d][daemon.join_epoch];
    const uint8_t there = daemon.stage == Stage::kConfig ? records.config : records.ready;
    if (!daemon.board_open) return 2;
    if (there == everyone()) return 1;
    return (daemon.failed & ~there) != 0 ? 2 : 0;
  }

 private:
  static void Post(Daemon& daemon, uint8_t task) {
    for (uint8_t& place : daemon.queue) {
      if (place != 0) continue;
      place = task;
      return;
    }
  }

  void Answer(State& s, int d, bool ok) {
    for (int c = 0; c < kControllers; ++c) {
      if ((s.daemons[d].waiters >> c) % 2 == 0) continue;
      s.controllers[c].joins[d] = ok ? RpcState::kOk : RpcState::kFailed;
    }
    s.daemons[d].waiters = 0;
  }

  void Fence(State& s, int d) {
    End(s, d);
    if (scope_.mutation == GroupMutation::kForgetWaiters) {
      s.daemons[d].waiters = 0;
    } else {
      Answer(s, d, false);
    }
  }

  // PeerBoard::End; records of newer epochs stay, set aside.
  static void End(State& s, int d) {
    Daemon& daemon = s.daemons[d];
    daemon.board_open = 0;
    daemon.board_ended = 1;
    s.records[d][daemon.board_epoch].config = 0;
    s.records[d][daemon.board_epoch].ready = 0;
  }

  void Send(State& s, int d, int epoch, uint8_t Records::*flight) const {
    for (int to = 0; to < count(); ++to) {
      if (to != d) s.records[to][epoch].*flight |= static_cast<uint8_t>(1 << d);
    }
  }

  // ConcludeJoin over records that differ only in what the root says of the bootstrap id.
  bool FitTogether(const State& s, int d, int epoch) {
    std::vector<engine::JoinRecord> records(static_cast<size_t>(count()));
    for (int i = 0; i < count(); ++i) {
      records[i].version = "1.0.0";
      records[i].slot = i;
      records[i].bootstrap_fingerprint = StrCat("of owner ", int{s.owner[epoch]});
      if ((s.refused[epoch] >> i) % 2 != 0) {
        records[i].status = Error(Reason::kConfigInvalid).Text("not an id of mine");
      }
    }
    return engine::ConcludeJoin(records, d).ok();
  }

  const GroupScope scope_;
  Machines machines_;
};

}  // namespace expertd::model

#endif  // TESTS_MODEL_GROUP_MODEL_H_
