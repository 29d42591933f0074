// The model of sequences as the explorer wants it: all that can happen, and how it ends.
#ifndef TESTS_MODEL_SEQUENCE_SPACE_H_
#define TESTS_MODEL_SEQUENCE_SPACE_H_

#include <cstdint>
#include <string>
#include <unordered_set>
#include <utility>

#include "tests/model/explorer.h"
#include "tests/model/sequence_model.h"
#include "tests/model/sequence_rules.h"

namespace expertd::model {

template <int kRanks, int kSequences>
class SequenceSpace {
 public:
  using State = SequenceState<kRanks, kSequences>;
  using Action = SequenceAction;

  explicit SequenceSpace(Scope scope) : steps_(std::move(scope)) {}

  State Initial() { return steps_.Initial(); }

  template <typename Emit>
  Enabled Next(const State& s, const Emit& emit) {
    Enabled enabled;
    for (int r = 0; r < kRanks; ++r) RunsByItself(s, r, emit, &enabled);
    for (int r = 0; r < kRanks; ++r) Messages(s, r, emit, &enabled);
    const bool free = enabled.quiet();
    for (int r = 0; r < kRanks; ++r) TimeLimits(s, r, free, emit, &enabled);
    for (int r = 0; r < kRanks; ++r) Callers(s, r, emit);
    return enabled;
  }

  uint32_t Measure(const State& s) {
    uint32_t sum = 0;
    for (int r = 0; r < kRanks; ++r) {
      for (int q = 1; q <= kSequences; ++q) sum += 1000 * Life(s, r, q) + Loose(s.cells[r][q]);
    }
    return sum + 100u * (s.faults + s.cancels + s.early);
  }

  std::string Check(const State& s, Enabled enabled) {
    std::string problem = CheckAlways(steps_, s);
    if (problem.empty() && enabled.quiet()) problem = CheckQuiet(steps_, s);
    if (problem.empty() && enabled.terminal()) problem = CheckEnd(steps_, s);
    if (problem.empty() && enabled.terminal()) problem = CheckRecovery(s);
    return problem;
  }

  std::string Text(Action action) const { return TextOf(action); }
  std::string Text(const State& s) const { return TextOfState(steps_, s); }

 private:
  // Sent by no plan: only the recovery uses it.
  static constexpr PlannedRequest kHarmless = {.op = OpKind::kFreezeLayer};

  template <typename Emit, typename Change>
  void Do(const State& s, const Emit& emit, Event event, int r, int q, int other,
          const Change& change) {
    State next = s;
    change(next);
    emit(Action{event, static_cast<uint8_t>(r), static_cast<uint8_t>(q),
                static_cast<uint8_t>(other)},
         next);
  }

  // What the wait of this rank has come to: -1 goes on, 0 complete, else 1 + Reason.
  int Verdict(const State& s, int r, uint8_t there, const Cell& cell) const {
    const Rank& rank = s.ranks[r];
    if (cell.cancelled) return rank.cancel;
    if (steps_.Complete(there)) return 0;
    if ((rank.failed & ~there) != 0) return Because(Reason::kPeerLost);
    return -1;
  }

  template <typename Emit>
  void RunsByItself(const State& s, int r, const Emit& emit, Enabled* enabled) {
    const Rank& rank = s.ranks[r];
    if (rank.phase == Phase::kIdle) return;
    const int q = steps_.NextOf(rank);
    const Cell& cell = s.cells[r][q];
    if (rank.phase == Phase::kPosted) {
      enabled->progress = true;
      Do(s, emit, Event::kStart, r, q, 0, [&](State& n) { steps_.Start(n, r, false); });
    } else if (rank.phase == Phase::kExecuting) {
      enabled->progress = true;
      Do(s, emit, Event::kExecuteOk, r, q, 0, [&](State& n) { steps_.Commit(n, r); });
      if (cell.cancelled) {
        Do(s, emit, Event::kExecuteFail, r, q, 0,
           [&](State& n) { steps_.FailInside(n, r, Reason::kCancelled); });
      }
    } else if (rank.phase == Phase::kArriving) {
      const int verdict = Verdict(s, r, cell.arrived, cell);
      if (verdict < 0) return;
      enabled->progress = true;
      Do(s, emit, Event::kArriveEnd, r, q, 0,
         [&](State& n) { steps_.ArriveEnd(n, r, static_cast<uint8_t>(verdict)); });
    } else {
      const int verdict = Verdict(s, r, cell.voted, cell);
      if (verdict < 0) return;
      enabled->progress = true;
      Do(s, emit, Event::kVoteEnd, r, q, 0, [&](State& n) {
        if (verdict == 0) return steps_.Commit(n, r);
        steps_.FailInside(n, r, static_cast<Reason>(verdict - 1));
      });
    }
  }

  template <typename Emit>
  void Messages(const State& s, int r, const Emit& emit, Enabled* enabled) {
    for (int q = 1; q <= kSequences; ++q) {
      const Cell& cell = s.cells[r][q];
      if ((cell.arrive_flight | cell.vote_flight | cell.close_flight) == 0) continue;
      enabled->progress = true;
      for (int from = 0; from < kRanks; ++from) {
        const uint8_t bit = Bit(from);
        const auto fault = [&](Event event, const auto& change) {
          if (s.faults == 0) return;
          Do(s, emit, event, r, q, from, [&](State& n) {
            --n.faults;
            n.lost = 1;
            change(n, n.cells[r][q]);
          });
        };
        if (cell.arrive_flight & bit) {
          Do(s, emit, Event::kDeliverArrival, r, q, from, [&](State& n) {
            n.cells[r][q].arrive_flight ^= bit;
            n.cells[r][q].arrived |= bit;
          });
          fault(Event::kLoseArrival, [&](State&, Cell& c) { c.arrive_flight ^= bit; });
          fault(Event::kRefuseArrival, [&](State& n, Cell& c) {
            c.arrive_flight ^= bit;
            n.ranks[from].failed |= Bit(r);
          });
        }
        if (cell.vote_flight & bit) {
          Do(s, emit, Event::kDeliverVote, r, q, from, [&](State& n) {
            n.cells[r][q].vote_flight ^= bit;
            n.cells[r][q].voted |= bit;
          });
          fault(Event::kLoseVote, [&](State&, Cell& c) { c.vote_flight ^= bit; });
        }
        if (cell.close_flight & bit) {
          Do(s, emit, Event::kDeliverClose, r, q, from, [&](State& n) {
            n.cells[r][q].close_flight ^= bit;
            steps_.OnPeerClose(n, r, q, from);
          });
          fault(Event::kLoseClose, [&](State&, Cell& c) { c.close_flight ^= bit; });
          fault(Event::kDoubleClose, [&](State& n, Cell&) {
            n.lost = s.lost;
            steps_.OnPeerClose(n, r, q, from);
          });
        }
      }
    }
  }

  template <typename Emit>
  void TimeLimits(const State& s, int r, bool free, const Emit& emit, Enabled* enabled) {
    const Rank& rank = s.ranks[r];
    const auto limit = [&](Event event, int q, const auto& change) {
      enabled->timeout = true;
      if (!free && s.early == 0) return;
      Do(s, emit, event, r, q, 0, [&](State& n) {
        if (!free) --n.early;
        change(n);
      });
    };
    for (int q = 1; q <= kSequences; ++q) {
      const Cell& cell = s.cells[r][q];
      if (cell.callers == 0 || steps_.Running(rank, q)) continue;
      limit(Event::kWaitTimeout, q,
            [&](State& n) { steps_.Abandon(n, r, q, Reason::kStepTimeout); });
    }
    if (rank.phase == Phase::kIdle) return;
    const int q = steps_.NextOf(rank);
    const uint8_t timeout = Because(Reason::kStepTimeout);
    switch (rank.phase) {
      case Phase::kPosted:
        return limit(Event::kStartExpired, q, [&](State& n) { steps_.Start(n, r, true); });
      case Phase::kArriving:
        if (Verdict(s, r, s.cells[r][q].arrived, s.cells[r][q]) >= 0) return;
        return limit(Event::kArriveTimeout, q, [&](State& n) { steps_.ArriveEnd(n, r, timeout); });
      case Phase::kVoting:
        if (Verdict(s, r, s.cells[r][q].voted, s.cells[r][q]) >= 0) return;
        return limit(Event::kVoteTimeout, q,
                     [&](State& n) { steps_.FailInside(n, r, Reason::kStepTimeout); });
      case Phase::kExecuting:
        return limit(Event::kExecuteFail, q,
                     [&](State& n) { steps_.FailInside(n, r, Reason::kStepTimeout); });
      case Phase::kIdle:
        return;
    }
  }

  template <typename Emit>
  void Callers(const State& s, int r, const Emit& emit) {
    const Scope& scope = steps_.scope();
    for (int q = 1; q <= scope.sequences; ++q) {
      for (int slot = 0; slot < kCallSlots; ++slot) {
        const auto& plan = slot == kCallB ? scope.plan_b : scope.plan_a;
        const CallState call = s.cells[r][q].calls[slot];
        if (plan.empty() || (slot == kRetryA && !scope.retries)) continue;
        if (call == CallState::kWaiting && s.cancels > 0) {
          Do(s, emit, Event::kCancel, r, q, slot, [&](State& n) {
            --n.cancels;
            steps_.CancelOperation(n, r, q);
          });
        }
        if (call != CallState::kUnsent) continue;
        if (slot == kRetryA && s.cells[r][q].calls[kCallA] == CallState::kUnsent) continue;
        const PlannedRequest request = plan[static_cast<size_t>(q) - 1];
        Do(s, emit, Event::kSubmit, r, q, slot,
           [&](State& n) { steps_.Submit(n, r, q, slot, request, false); });
        if (!scope.may_reject) continue;
        Do(s, emit, Event::kSubmitRejected, r, q, slot,
           [&](State& n) { steps_.Submit(n, r, q, slot, request, true); });
      }
    }
  }

  // How far from its end a sequence is on a rank; each stage sends fewer than 1000 messages.
  uint32_t Life(const State& s, int r, int q) const {
    const Rank& rank = s.ranks[r];
    const int next = steps_.NextOf(rank);
    if (q < next) return 0;
    if (q == next && rank.phase != Phase::kIdle) return 6 - static_cast<uint32_t>(rank.phase);
    return 6;
  }

  static uint32_t Loose(const Cell& cell) {
    int flights = std::popcount(cell.arrive_flight) + std::popcount(cell.vote_flight);
    auto sum = static_cast<uint32_t>(flights + std::popcount(cell.close_flight));
    for (CallState call : cell.calls) {
      sum += call == CallState::kUnsent ? 20u : call == CallState::kWaiting ? 10u : 0u;
    }
    return sum;
  }

  // With nothing lost from now on: do agreed requests bring all ranks to a sequence that succeeds?
  std::string CheckRecovery(const State& end) {
    State s = end;
    for (int r = 0; r < kRanks; ++r) {
      if (steps_.Broken(s.ranks[r]) || s.ranks[r].failed != 0) return "";  // needs a new epoch
      for (Cell& cell : s.cells[r]) {
        for (CallState& call : cell.calls) call = CallState::kUnsent;
        cell.outcome = Outcome::kNone;
        cell.executed = 0;
        cell.executed_twice = 0;
      }
    }
    s.faults = s.early = s.cancels = s.lost = 0;
    const std::string key(reinterpret_cast<const char*>(&s), sizeof(s));
    if (!recovered_.insert(key).second) return "";
    for (int round = 0; round <= kSequences; ++round) {
      int highest = 0;
      for (const Rank& rank : s.ranks) highest = std::max(highest, steps_.NextOf(rank));
      if (highest > kSequences) return "";  // no room: a larger scope sees it
      bool level = true;
      for (const Rank& rank : s.ranks) level = level && steps_.NextOf(rank) == highest;
      for (int r = 0; r < kRanks; ++r) {
        const int q = steps_.NextOf(s.ranks[r]);
        if (level || q < highest) steps_.Submit(s, r, q, kCallB, kHarmless, false);
      }
      Settle(s);
      bool all = level;
      for (int r = 0; r < kRanks; ++r) {
        all = all && s.cells[r][highest].outcome == Outcome::kOk;
      }
      if (all) return "";
    }
    return StrCat("no agreed sequence succeeds any more:\n", Text(s));
  }

  void Settle(State& s) {
    while (true) {
      State chosen = s;
      bool found = false;
      const auto first = [&](Action action, const State& next) {
        const bool caller = action.event <= Event::kCancel;
        if (found || caller) return;
        chosen = next;
        found = true;
      };
      Next(s, first);
      if (!found) return;
      s = chosen;
    }
  }

  SequenceSteps<kRanks, kSequences> steps_;
  std::unordered_set<std::string> recovered_;
};

}  // namespace expertd::model

#endif  // TESTS_MODEL_SEQUENCE_SPACE_H_
