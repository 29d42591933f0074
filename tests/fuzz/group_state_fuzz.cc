// Fuzzes GroupStateMachine: any calls in any order keep its promises about epochs and versions.
#include "server/engine/group_state.h"

#include <string>

#include "base/error.h"
#include "tests/fuzz/fuzz_input.h"

namespace {

using expertd::engine::GroupState;
using expertd::engine::GroupStateMachine;
using expertd::engine::JoinDecision;

struct Seen {
  explicit Seen(const GroupStateMachine& machine)
      : state(machine.state()),
        group_id(machine.group_id()),
        epoch(machine.epoch()),
        highest(machine.highest_epoch_seen()),
        version(machine.version()),
        draining(machine.draining()) {}
  GroupState state;
  std::string group_id;
  uint64_t epoch;
  uint64_t highest;
  uint64_t version;
  bool draining;
};

void Join(GroupStateMachine& machine, const std::string& group, uint64_t epoch) {
  const Seen before(machine);
  const auto decision = machine.OnJoinRequest(group, epoch);
  if (!decision.ok()) {
    FUZZ_CHECK(machine.version() == before.version);
    return;
  }
  FUZZ_CHECK(machine.epoch() == epoch && machine.group_id() == group);
  if (*decision == JoinDecision::kJoin) {
    FUZZ_CHECK(!before.draining && machine.state() == GroupState::kJoining);
    FUZZ_CHECK(epoch > before.epoch && epoch >= before.highest);
  } else {
    FUZZ_CHECK(machine.version() == before.version);
  }
}

void Call(GroupStateMachine& machine, uint8_t method, const std::string& group, uint64_t epoch) {
  switch (method % 9) {
    case 0:
      return machine.SawEpoch(epoch);
    case 1:
      return Join(machine, group, epoch);
    case 2:
      return machine.OnJoined(epoch);
    case 3:
      return machine.OnJoinFailed(epoch);
    case 4: {
      const auto here = machine.OnLeaveRequest(group, epoch);
      FUZZ_CHECK(here.ok() == (epoch >= machine.epoch()));
      if (here.ok() && *here) machine.OnLeft();
      return;
    }
    case 5:
      return machine.OnBroken(epoch, "lost");
    case 6:
      return machine.OnDrain(true);
    case 7:
      return machine.OnDrain(false);
    default: {
      const bool accepted = machine.CheckStep(group, epoch).ok();
      FUZZ_CHECK(accepted == (machine.state() == GroupState::kReady && machine.epoch() == epoch &&
                              machine.group_id() == group));
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  expertd::fuzz::Input input(data, size);
  GroupStateMachine machine;
  while (!input.empty()) {
    const Seen before(machine);
    const uint8_t method = input.Byte();
    Call(machine, method, method < 128 ? "a" : "b", input.Number());
    const Seen after(machine);
    FUZZ_CHECK(after.highest >= before.highest && after.epoch <= after.highest);
    FUZZ_CHECK(after.version >= before.version);
    const bool changed = after.state != before.state || after.epoch != before.epoch ||
                         after.group_id != before.group_id || after.highest != before.highest ||
                         after.draining != before.draining;
    FUZZ_CHECK(!changed || after.version > before.version);
    FUZZ_CHECK((after.state == GroupState::kIdle) == (after.epoch == 0 && after.group_id.empty()));
    FUZZ_CHECK(!after.draining || after.state != GroupState::kReady);
  }
  return 0;
}
