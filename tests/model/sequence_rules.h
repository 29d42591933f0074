// What must hold in the model of sequences; README.md says each rule in words.
#ifndef TESTS_MODEL_SEQUENCE_RULES_H_
#define TESTS_MODEL_SEQUENCE_RULES_H_

#include <string>

#include "tests/model/sequence_model.h"

namespace expertd::model {

inline std::string OpText(uint8_t op) {
  return std::string(engine::OpName(static_cast<OpKind>(op)));
}

inline bool UsesWeights(uint8_t op) {
  return op == static_cast<uint8_t>(OpKind::kForward) ||
         op == static_cast<uint8_t>(OpKind::kBackward);
}

// Rules of every state: S1 order, S2 same operation, S3 once, S6 versions, S7 gradients.
template <int kRanks, int kSequences>
std::string CheckAlways(const SequenceSteps<kRanks, kSequences>& steps,
                        const SequenceState<kRanks, kSequences>& s) {
  for (int r = 0; r < kRanks; ++r) {
    bool open = false;
    for (int q = 1; q <= kSequences; ++q) {
      const Cell& cell = s.cells[r][q];
      if (cell.executed != 0 && open) {
        return StrCat("S1: rank ", r, " executed sequence ", q, " before an earlier one ended");
      }
      open = open || cell.outcome == Outcome::kNone;
      if (cell.executed_twice) return StrCat("S3: rank ", r, " executed sequence ", q, " twice");
    }
  }
  for (int a = 0; a < kRanks; ++a) {
    for (int b = a + 1; b < kRanks; ++b) {
      for (int q = 1; q <= kSequences; ++q) {
        const Cell& one = s.cells[a][q];
        const Cell& two = s.cells[b][q];
        if (one.executed == 0 || two.executed == 0) continue;
        const std::string where = StrCat("ranks ", a, " and ", b, " in sequence ", q);
        if (one.executed != two.executed) {
          return StrCat("S2: ", where, " executed ", OpText(one.executed), " and ",
                        OpText(two.executed));
        }
        if (UsesWeights(one.executed) &&
            steps.RecordOf(one).version != steps.RecordOf(two).version) {
          return StrCat("S6: ", where, " executed with different weights versions");
        }
      }
      if (s.ranks[a].version == s.ranks[b].version && s.ranks[a].content != s.ranks[b].content) {
        return StrCat("S7: ranks ", a, " and ", b, " are both at weights version ",
                      int{s.ranks[a].version}, ", made of different gradients");
      }
    }
  }
  return "";
}

// Rules of states in which only time limits, callers or faults can change anything: S8 a rank waits
// only for ranks that were not asked.
template <int kRanks, int kSequences>
std::string CheckQuiet(const SequenceSteps<kRanks, kSequences>& steps,
                       const SequenceState<kRanks, kSequences>& s) {
  if (s.lost) return "";
  for (int r = 0; r < kRanks; ++r) {
    if (s.ranks[r].phase != Phase::kArriving) continue;
    const int q = steps.NextOf(s.ranks[r]);
    for (int other = 0; other < kRanks; ++other) {
      const Rank& peer = s.ranks[other];
      if (other == r || (s.cells[r][q].arrived & Bit(other)) || steps.Broken(peer)) continue;
      if (steps.NextOf(peer) > q) {
        return StrCat("S8: rank ", r, " waits in sequence ", q, ", which rank ", other,
                      " has left");
      }
      if (steps.NextOf(peer) == q && s.cells[other][q].op != 0) {
        return StrCat("S8: rank ", r, " waits in sequence ", q, " for rank ", other,
                      ", which has a request for it");
      }
    }
  }
  return "";
}

// Rules of states in which everything has ended: S4 told, S5 answered, S9 level.
template <int kRanks, int kSequences>
std::string CheckEnd(const SequenceSteps<kRanks, kSequences>& steps,
                     const SequenceState<kRanks, kSequences>& s) {
  bool broken = false;
  for (const Rank& rank : s.ranks) broken = broken || steps.Broken(rank);
  for (int r = 0; r < kRanks; ++r) {
    for (int q = 1; q <= kSequences; ++q) {
      const Cell& cell = s.cells[r][q];
      for (CallState call : cell.calls) {
        if (call == CallState::kWaiting) {
          return StrCat("S5: a caller of rank ", r, " waits for sequence ", q, " for ever");
        }
      }
      if (cell.outcome != Outcome::kOk) continue;
      for (int other = 0; other < kRanks; ++other) {
        const Cell& there = s.cells[other][q];
        if (there.outcome == Outcome::kNone && !s.lost && !broken) {
          return StrCat("S4: rank ", r, " ended sequence ", q, " well, rank ", other,
                        " knows nothing of it");
        }
        if (cell.committed && cell.executed == static_cast<uint8_t>(OpKind::kApplyGradients) &&
            there.executed != cell.executed) {
          return StrCat("S4: rank ", r, " applied sequence ", q, ", rank ", other,
                        " was not asked whether it can");
        }
      }
    }
    if (!s.lost && !broken && steps.NextOf(s.ranks[r]) != steps.NextOf(s.ranks[0])) {
      return StrCat("S9: nothing was lost, yet rank 0 is at sequence ", steps.NextOf(s.ranks[0]),
                    " and rank ", r, " at ", steps.NextOf(s.ranks[r]));
    }
  }
  return "";
}

template <int kRanks, int kSequences>
std::string TextOfState(const SequenceSteps<kRanks, kSequences>& steps,
                        const SequenceState<kRanks, kSequences>& s) {
  static constexpr const char* kPhases[] = {"idle", "posted", "arriving", "executing", "voting"};
  static constexpr const char* kOutcomes[] = {"-", "ok", "not ok"};
  std::string text;
  for (int r = 0; r < kRanks; ++r) {
    const Rank& rank = s.ranks[r];
    StrAppend(&text, "  rank ", r, ": next ", steps.NextOf(rank), " ",
              kPhases[static_cast<int>(rank.phase)], steps.Broken(rank) ? " BROKEN" : "",
              ", version ", int{rank.version}, ", accumulated mask ", int{rank.accumulated},
              rank.gradients_valid ? "" : " INVALID", "; outcomes");
    for (int q = 1; q <= kSequences; ++q) {
      const Cell& cell = s.cells[r][q];
      StrAppend(&text, " ", q, "=", kOutcomes[static_cast<int>(cell.outcome)],
                cell.executed != 0 ? "(executed)" : "", cell.op != 0 ? "(pending)" : "");
    }
    text += "\n";
  }
  return text;
}

}  // namespace expertd::model

#endif  // TESTS_MODEL_SEQUENCE_RULES_H_
