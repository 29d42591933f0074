// Several daemons that run sequences together: who may do what next, and what it changes.
//
// The functions named as in engine_steps.cc and step_runner.cc mirror those, line by line where
// that matters; the decisions inside are the engine's own (real_pieces.h). Left out because nothing
// here depends on it: queue limits, kept replies' contents, statistics, the device.
#ifndef TESTS_MODEL_SEQUENCE_MODEL_H_
#define TESTS_MODEL_SEQUENCE_MODEL_H_

#include <bit>
#include <cstdint>
#include <vector>

#include "tests/model/sequence_base.h"

namespace expertd::model {

// What the ranks do. REQUIRES: scope.ranks == kRanks, scope.sequences < kSequences.
template <int kRanks, int kSequences>
class SequenceSteps : public SequenceBase<kRanks, kSequences> {
  using Base = SequenceBase<kRanks, kSequences>;

 public:
  using State = typename Base::State;

  using Base::Base;
  using Base::NextOf;
  using Base::RecordOf;
  using Base::Running;

  void Submit(State& s, int r, int sequence, int slot, PlannedRequest request, bool rejected) {
    Rank& rank = s.ranks[r];
    Cell& cell = s.cells[r][sequence];
    CallState& call = cell.calls[slot];
    call = CallState::kAnswered;
    if (!machines_.AcceptsSteps(rank.machine, kEpoch)) return;
    switch (books_.Admit(rank.book, sequence, slot == kCallB ? 2 : 1)) {
      case Admission::kAccepted:
        cell.op = static_cast<uint8_t>(request.op);
        cell.rejected = rejected ? Because(Reason::kShapeMismatch) : 0;
        cell.callers = Bit(slot);
        call = CallState::kWaiting;
        Schedule(s, r);
        break;
      case Admission::kDuplicate:
        cell.callers |= Bit(slot);
        call = CallState::kWaiting;
        break;
      case Admission::kReplay:
        if (scope_.mutation == Mutation::kRerunReplies) {
          cell.executed_twice = cell.executed != 0;
        }
        break;
      case Admission::kClosed:
      case Admission::kRefused:
        break;
    }
  }

  void Schedule(State& s, int r) {
    Rank& rank = s.ranks[r];
    if (rank.phase != Phase::kIdle) return;
    if (scope_.mutation != Mutation::kKeepClosed) {
      while (books_.SkipClosed(rank.book)) {
      }
    }
    Forget(s, r);
    const int next = NextOf(rank);
    if (next > kSequences || !books_.Runnable(rank.book) || s.cells[r][next].op == 0) return;
    books_.Begin(rank.book);
    rank.phase = Phase::kPosted;
    rank.cancel = 0;
  }

  // RunNext and the first half of StepRunner::Run.
  void Start(State& s, int r, bool expired) {
    Rank& rank = s.ranks[r];
    const int sequence = NextOf(rank);
    Cell& cell = s.cells[r][sequence];
    if (cell.op == 0) {
      rank.phase = Phase::kIdle;
      return;
    }
    if (cell.closed) return FinishStep(s, r, false, false);
    if (expired && cell.rejected == 0) cell.rejected = Because(Reason::kStepTimeout);
    if (cell.rejected == 0 && !PassesCheck(rank, sequence, cell)) {
      cell.rejected = Because(Reason::kVersionBehind);
    }
    if (cell.rejected != 0 && scope_.mutation == Mutation::kRejectedStaysAway) {
      return FinishStep(s, r, false, false);
    }
    cell.record =
        AddRecord({.op = cell.op,
                   .reason = cell.rejected,
                   .version = rank.version,
                   .gradients_valid = rank.gradients_valid,
                   .accumulated = scope_.mutation == Mutation::kTrustAccumulators
                                      ? uint8_t{0}
                                      : static_cast<uint8_t>(std::popcount(rank.accumulated))});
    cell.arrived |= Bit(r);
    Send(s, r, sequence, &Cell::arrive_flight);
    rank.phase = Phase::kArriving;
  }

  // StepRunner::Arrive, once the wait has ended. `said`: 0, or 1 + the Reason that the wait failed.
  void ArriveEnd(State& s, int r, uint8_t said) {
    Rank& rank = s.ranks[r];
    const int sequence = NextOf(rank);
    Cell& cell = s.cells[r][sequence];
    if (said != 0) {
      if (EndedHere(said)) Close(s, r, sequence, said);
      const uint8_t status = cell.rejected != 0 ? cell.rejected : said;
      return FinishStep(s, r, false, status == Because(Reason::kPeerLost));
    }
    std::vector<Arrival> arrivals;
    uint64_t key = static_cast<uint64_t>(r);
    for (int other = 0; other < kRanks; ++other) {
      arrivals.push_back(RecordOf(s.cells[other][sequence]));
      key = (key << 8) | s.cells[other][sequence].record;
    }
    const uint8_t verdict = conclusions_.Conclude(key, arrivals, r);
    if (verdict != 0) {
      if (verdict == Because(Reason::kGradientsInvalid)) rank.gradients_valid = 0;
      return FinishStep(s, r, false, false);
    }
    if (cell.executed != 0) cell.executed_twice = 1;
    cell.executed = cell.op;
    Execute(s, r, arrivals);
  }

  void Execute(State& s, int r, const std::vector<Arrival>& arrivals) {
    Rank& rank = s.ranks[r];
    const int sequence = NextOf(rank);
    Cell& cell = s.cells[r][sequence];
    switch (static_cast<OpKind>(cell.op)) {
      case OpKind::kForward:
      case OpKind::kBackward:
        rank.phase = Phase::kExecuting;
        return;
      case OpKind::kApplyGradients: {
        for (const Arrival& arrival : arrivals) {
          if (arrival.version != rank.version) return FinishStep(s, r, false, false);
        }
        if (rank.version == Planned(cell, sequence).expected_version + 1) {
          return FinishStep(s, r, true, false);
        }
        if (scope_.mutation == Mutation::kApplyWithoutVote) return Commit(s, r);
        cell.voted |= Bit(r);
        Send(s, r, sequence, &Cell::vote_flight);
        rank.phase = Phase::kVoting;
        return;
      }
      case OpKind::kClearGradients:
        rank.accumulated = 0;
        rank.gradients_valid = 1;
        return FinishStep(s, r, true, false);
      default:  // local, and the model gives it no effect
        return FinishStep(s, r, true, false);
    }
  }

  // Past arrival, and it went well here.
  void Commit(State& s, int r) {
    Rank& rank = s.ranks[r];
    const int sequence = NextOf(rank);
    s.cells[r][sequence].committed = 1;
    if (s.cells[r][sequence].op == static_cast<uint8_t>(OpKind::kBackward)) {
      rank.accumulated |= Bit(sequence);
    }
    if (s.cells[r][sequence].op == static_cast<uint8_t>(OpKind::kApplyGradients)) {
      rank.content = static_cast<uint8_t>(7 * rank.content + rank.accumulated + 1);
      rank.accumulated = 0;
      ++rank.version;
    }
    FinishStep(s, r, true, false);
  }

  // Past arrival, and it failed here in a way that the others need not share.
  void FailInside(State& s, int r, Reason reason) {
    Rank& rank = s.ranks[r];
    const int sequence = NextOf(rank);
    const Cell& cell = s.cells[r][sequence];
    if (cell.op == static_cast<uint8_t>(OpKind::kBackward) &&
        scope_.mutation != Mutation::kTrustAccumulators) {
      rank.gradients_valid = 0;
    }
    Close(s, r, sequence, Because(reason));
    FinishStep(s, r, false, !scope_.survives_cancel);
  }

  void FinishStep(State& s, int r, bool ok, bool broken) {
    Rank& rank = s.ranks[r];
    const int sequence = NextOf(rank);
    Cell& cell = s.cells[r][sequence];
    rank.phase = Phase::kIdle;
    Answer(cell);
    cell.op = 0;
    cell.outcome = ok ? Outcome::kOk : Outcome::kNotOk;
    books_.End(rank.book);
    if (scope_.mutation == Mutation::kEndTwice) books_.End(rank.book);
    Forget(s, r);
    if (!broken) return Schedule(s, r);
    machines_.OnBroken(rank.machine, kEpoch);
    for (Cell& pending : s.cells[r]) {  // FailPendingLocked
      Answer(pending);
      pending.op = 0;
    }
  }

  void Abandon(State& s, int r, int sequence, Reason reason) {
    Cell& cell = s.cells[r][sequence];
    Answer(cell);
    cell.rejected = Because(reason);
    if (scope_.mutation == Mutation::kForgetAbandoned) cell.op = 0;
  }

  void CancelRunning(State& s, int r, uint8_t reason) {
    Rank& rank = s.ranks[r];
    if (rank.phase == Phase::kIdle) return;
    if (rank.cancel == 0) rank.cancel = reason;
    s.cells[r][NextOf(rank)].cancelled = 1;
  }

  void CancelOperation(State& s, int r, int sequence) {
    const Cell& cell = s.cells[r][sequence];
    if (std::popcount(cell.callers) > 1) return;
    if (Running(s.ranks[r], sequence)) return CancelRunning(s, r, Because(Reason::kCancelled));
    Abandon(s, r, sequence, Reason::kCancelled);
  }

  void OnPeerClose(State& s, int r, int sequence, int from) {
    using Effect = engine::SequenceBook::CloseEffect;
    Rank& rank = s.ranks[r];
    Cell& cell = s.cells[r][sequence];
    switch (books_.Close(rank.book, sequence)) {
      case Effect::kIgnored:
        // Further ahead than the window: as good as lost.
        if (sequence >= NextOf(rank)) s.lost = 1;
        return;
      case Effect::kRecorded:
        cell.outcome = Outcome::kNotOk;
        return Schedule(s, r);
      case Effect::kCancelled:
        if (Running(rank, sequence)) {
          CancelRunning(s, r, s.cells[from][sequence].close_reason);
        } else if (cell.op != 0) {
          cell.closed = 1;
        }
    }
  }

 private:
  using Base::AddRecord;
  using Base::Answer;
  using Base::books_;
  using Base::Close;
  using Base::conclusions_;
  using Base::Forget;
  using Base::kEpoch;
  using Base::machines_;
  using Base::Planned;
  using Base::scope_;
  using Base::Send;

  static bool EndedHere(uint8_t reason) {
    return reason == Because(Reason::kStepTimeout) || reason == Because(Reason::kCancelled) ||
           reason == Because(Reason::kPeerLost);
  }

  // ValidateApply; other operations pass.
  bool PassesCheck(const Rank& rank, int sequence, const Cell& cell) const {
    if (cell.op != static_cast<uint8_t>(OpKind::kApplyGradients)) return true;
    const int expected = Planned(cell, sequence).expected_version;
    return rank.version == expected || rank.version == expected + 1;
  }
};

}  // namespace expertd::model

#endif  // TESTS_MODEL_SEQUENCE_MODEL_H_
