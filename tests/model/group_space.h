// The model of groups as the explorer wants it: all that can happen, and what must hold.
#ifndef TESTS_MODEL_GROUP_SPACE_H_
#define TESTS_MODEL_GROUP_SPACE_H_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "tests/model/explorer.h"
#include "tests/model/group_model.h"

namespace expertd::model {

enum class GroupEvent : uint8_t {
  kPick,
  kClaim,
  kJoin,
  kAgain,
  kLeave,
  kAbort,
  kTask,
  kEndStage,
  kTimeout,
  kDeliverConfig,
  kDeliverReady,
};

struct GroupAction {
  GroupEvent event = GroupEvent::kPick;
  uint8_t daemon = 0;
  uint8_t other = 0;  // a controller, or the daemon a record comes from
  uint8_t epoch = 0;
};

class GroupSpace {
 public:
  using State = GroupModelState;
  using Action = GroupAction;

  explicit GroupSpace(GroupScope scope) : steps_(scope) {}

  State Initial() { return steps_.Initial(); }

  template <typename Emit>
  Enabled Next(const State& s, const Emit& emit) {
    Enabled enabled;
    for (int d = 0; d < steps_.count(); ++d) {
      const Daemon& daemon = s.daemons[d];
      if (daemon.stage == Stage::kNone) {
        if (daemon.queue[0] == 0) continue;
        enabled.progress = true;
        Do(s, emit, GroupEvent::kTask, d, 0, daemon.queue[0] / 2,
           [&](State& n) { steps_.RunTask(n, d); });
      } else if (const int verdict = steps_.Verdict(s, d); verdict != 0) {
        enabled.progress = true;
        Do(s, emit, GroupEvent::kEndStage, d, 0, daemon.join_epoch, [&](State& n) {
          if (verdict == 1) return steps_.EndStage(n, d);
          steps_.FinishJoin(n, d, false);
        });
      }
    }
    for (int d = 0; d < steps_.count(); ++d) Messages(s, d, emit, &enabled);
    const bool free = enabled.quiet();
    for (int d = 0; d < steps_.count(); ++d) TimeLimits(s, d, free, emit, &enabled);
    for (int c = 0; c < kControllers; ++c) Controls(s, c, emit);
    return enabled;
  }

  uint32_t Measure(const State& s) {
    uint32_t sum = 50u * s.early + 2000u * s.leaves + 20000u * s.again;
    for (const Controller& controller : s.controllers) {
      if (controller.epoch == 0) sum += 10000;
      if (!controller.claimed && !controller.refused) sum += 5000;
      for (RpcState call : controller.joins) {
        sum += call == RpcState::kUnsent ? 1000u : call == RpcState::kWaiting ? 100u : 0u;
      }
    }
    for (int d = 0; d < steps_.count(); ++d) {
      const Daemon& daemon = s.daemons[d];
      for (uint8_t task : daemon.queue) sum += task != 0 ? 400u : 0u;
      if (daemon.stage != Stage::kNone) sum += daemon.stage == Stage::kConfig ? 200u : 100u;
      for (const Records& records : s.records[d]) {
        sum += static_cast<uint32_t>(std::popcount(records.config_flight) +
                                     std::popcount(records.ready_flight));
      }
    }
    return sum;
  }

  std::string Check(const State& s, Enabled enabled) {
    for (const Daemon& a : s.daemons) {
      for (const Daemon& b : s.daemons) {
        if (steps_.IsReady(a) && steps_.IsReady(b) && steps_.EpochOf(a) != steps_.EpochOf(b)) {
          return StrCat("G1: daemons are ready in epochs ", steps_.EpochOf(a), " and ",
                        steps_.EpochOf(b), " at the same time");
        }
      }
    }
    const Controller& one = s.controllers[0];
    const Controller& two = s.controllers[1];
    if (one.claimed && two.claimed && one.epoch == two.epoch) {
      return StrCat("G2: two controllers were given epoch ", int{one.epoch});
    }
    for (int d = 0; d < steps_.count(); ++d) {
      const Daemon& daemon = s.daemons[d];
      const auto& records = s.records[d][steps_.EpochOf(daemon)];
      if (steps_.IsReady(daemon) && records.config != steps_.everyone()) {
        return StrCat("G4: daemon ", d, " is ready in an epoch that not all have entered");
      }
      if (steps_.IsReady(daemon) && records.ready != steps_.everyone()) {
        return StrCat("G4: daemon ", d, " is ready before all have said that they can be");
      }
    }
    if (enabled.quiet() && !s.disturbed) return CheckNewest(s);
    return enabled.terminal() ? CheckAnswered(s) : "";
  }

  std::string Text(Action action) const {
    const std::string controller = action.other == 0 ? "controller A" : "controller B";
    const std::string daemon = StrCat("daemon ", int{action.daemon});
    const std::string epoch = StrCat("epoch ", int{action.epoch});
    const std::string from = StrCat(" of daemon ", int{action.other}, " for ", epoch, " comes to ");
    switch (action.event) {
      case GroupEvent::kPick:
        return StrCat(controller, " reads the daemons and picks an epoch");
      case GroupEvent::kClaim:
        return StrCat(controller, " claims ", epoch, " at the root");
      case GroupEvent::kJoin:
        return StrCat("JoinGroup of ", controller, " for ", epoch, " comes to ", daemon);
      case GroupEvent::kAgain:
        return StrCat(controller, " has failed and begins anew");
      case GroupEvent::kLeave:
        return StrCat("LeaveGroup of ", epoch, " comes to ", daemon);
      case GroupEvent::kAbort:
        return StrCat("AbortGroup of ", epoch, " comes to ", daemon);
      case GroupEvent::kTask:
        return StrCat(daemon, " takes up its next task, of ", epoch);
      case GroupEvent::kEndStage:
        return StrCat(daemon, " ends a stage of joining ", epoch);
      case GroupEvent::kTimeout:
        return StrCat(daemon, " times out joining ", epoch);
      case GroupEvent::kDeliverConfig:
        return StrCat("the join record", from, daemon);
      case GroupEvent::kDeliverReady:
        return StrCat("the ready record", from, daemon);
    }
    return "?";
  }

  std::string Text(const State& s) const {
    std::string text;
    for (int d = 0; d < steps_.count(); ++d) {
      const engine::GroupStateMachine& machine = steps_.MachineOf(s.daemons[d]);
      StrAppend(&text, "  daemon ", d, ": ", GroupStateName(machine.state()), " epoch ",
                machine.epoch(), ", highest seen ", machine.highest_epoch_seen(), "\n");
    }
    for (const Controller& controller : s.controllers) {
      StrAppend(&text, "  controller: epoch ", int{controller.epoch},
                controller.refused ? " refused" : "", " joins");
      for (RpcState call : controller.joins) StrAppend(&text, " ", static_cast<int>(call));
      text += "\n";
    }
    return text;
  }

 private:
  template <typename Emit, typename Change>
  static void Do(const State& s, const Emit& emit, GroupEvent event, int d, int other, int epoch,
                 const Change& change) {
    State next = s;
    change(next);
    emit(Action{event, static_cast<uint8_t>(d), static_cast<uint8_t>(other),
                static_cast<uint8_t>(epoch)},
         next);
  }

  template <typename Emit>
  void Messages(const State& s, int d, const Emit& emit, Enabled* enabled) {
    for (int epoch = 1; epoch <= kEpochs; ++epoch) {
      const Records& records = s.records[d][epoch];
      for (int from = 0; from < steps_.count(); ++from) {
        const auto bit = static_cast<uint8_t>(1 << from);
        if (records.config_flight & bit) {
          enabled->progress = true;
          Do(s, emit, GroupEvent::kDeliverConfig, d, from, epoch, [&](State& n) {
            n.records[d][epoch].config_flight ^= bit;
            steps_.Deliver(n, from, d, epoch, &Records::config);
          });
        }
        if (records.ready_flight & bit) {
          enabled->progress = true;
          Do(s, emit, GroupEvent::kDeliverReady, d, from, epoch, [&](State& n) {
            n.records[d][epoch].ready_flight ^= bit;
            steps_.Deliver(n, from, d, epoch, &Records::ready);
          });
        }
      }
    }
  }

  template <typename Emit>
  void TimeLimits(const State& s, int d, bool free, const Emit& emit, Enabled* enabled) {
    const Daemon& daemon = s.daemons[d];
    if (daemon.stage == Stage::kNone || steps_.Verdict(s, d) != 0) return;
    enabled->timeout = true;
    if (!free && s.early == 0) return;
    Do(s, emit, GroupEvent::kTimeout, d, 0, daemon.join_epoch, [&](State& n) {
      if (!free) --n.early;
      if (daemon.join_epoch == s.claim_epoch) n.disturbed = 1;
      steps_.FinishJoin(n, d, false);
    });
  }

  template <typename Emit>
  void Controls(const State& s, int c, const Emit& emit) {
    const Controller& controller = s.controllers[c];
    if (controller.epoch == 0) {
      State next = s;
      steps_.Pick(next, c);
      if (next.controllers[c].epoch > kEpochs) return;
      emit(Action{GroupEvent::kPick, 0, static_cast<uint8_t>(c), next.controllers[c].epoch}, next);
      return;
    }
    if (!controller.claimed && !controller.refused) {
      Do(s, emit, GroupEvent::kClaim, 0, c, controller.epoch,
         [&](State& n) { steps_.CreateBootstrapId(n, c); });
      return;
    }
    bool failed = controller.refused;
    bool all_answered = true;
    for (int d = 0; d < steps_.count() && controller.claimed; ++d) {
      const RpcState call = controller.joins[d];
      failed = failed || call == RpcState::kFailed;
      all_answered = all_answered && (call == RpcState::kOk || call == RpcState::kFailed);
      if (call == RpcState::kUnsent) {
        // Daemons 1 and 2 are alike: the one that A reaches first may as well be 1.
        if (c == 0 && d == 2 && controller.joins[1] == RpcState::kUnsent) continue;
        Do(s, emit, GroupEvent::kJoin, d, c, controller.epoch,
           [&](State& n) { steps_.JoinGroup(n, d, c); });
      } else if (s.leaves > 0) {
        const auto leave = [&](GroupEvent event, auto&& call_it) {
          Do(s, emit, event, d, c, controller.epoch, [&](State& n) {
            --n.leaves;
            if (controller.epoch == s.claim_epoch) n.disturbed = 1;
            call_it(n);
          });
        };
        leave(GroupEvent::kLeave, [&](State& n) { steps_.LeaveGroup(n, d, controller.epoch); });
        leave(GroupEvent::kAbort, [&](State& n) { steps_.AbortGroup(n, d, controller.epoch); });
      }
    }
    if (!failed || !all_answered || s.again == 0) return;
    Do(s, emit, GroupEvent::kAgain, 0, c, 0, [&](State& n) {
      --n.again;
      n.controllers[c] = {};
    });
  }

  // When the newest claimed epoch has had all its JoinGroup calls and nobody left or timed out in
  // it, it is ready everywhere.
  std::string CheckNewest(const State& s) const {
    for (const Controller& controller : s.controllers) {
      if (!controller.claimed || controller.epoch != s.claim_epoch) continue;
      for (RpcState call : controller.joins) {
        if (call == RpcState::kUnsent) return "";
      }
      for (int d = 0; d < steps_.count(); ++d) {
        const Daemon& daemon = s.daemons[d];
        if (steps_.IsReady(daemon) && steps_.EpochOf(daemon) == s.claim_epoch) continue;
        return StrCat("G6: epoch ", int{s.claim_epoch},
                      " is the newest and undisturbed, yet daemon ", d, " is not ready in it");
      }
    }
    return "";
  }

  std::string CheckAnswered(const State& s) const {
    for (int c = 0; c < kControllers; ++c) {
      for (int d = 0; d < steps_.count(); ++d) {
        if (s.controllers[c].joins[d] == RpcState::kWaiting) {
          return StrCat("G3: JoinGroup of ", c == 0 ? "controller A" : "controller B",
                        " to daemon ", d, " is never answered");
        }
      }
    }
    return "";
  }

  GroupSteps steps_;
};

}  // namespace expertd::model

#endif  // TESTS_MODEL_GROUP_SPACE_H_
