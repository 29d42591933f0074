// What the steps of ranks are made of: the real pieces, messages on their way, answers to callers.
#ifndef TESTS_MODEL_SEQUENCE_BASE_H_
#define TESTS_MODEL_SEQUENCE_BASE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "base/error.h"
#include "tests/model/real_pieces.h"
#include "tests/model/sequence_state.h"

namespace expertd::model {

constexpr uint8_t Bit(int rank) { return static_cast<uint8_t>(1 << rank); }
constexpr uint8_t Because(Reason reason) {
  return static_cast<uint8_t>(1 + static_cast<int>(reason));
}

template <int kRanks, int kSequences>
class SequenceBase {
 public:
  using State = SequenceState<kRanks, kSequences>;
  static constexpr int kEpoch = 1;

  explicit SequenceBase(Scope scope) : scope_(std::move(scope)) { arrivals_.push_back({}); }

  State Initial() {
    State state;
    for (Rank& rank : state.ranks) {
      rank.book = books_.New(scope_.window, scope_.kept_replies);
      rank.machine = machines_.New();
      machines_.OnJoinRequest(rank.machine, kEpoch);
      machines_.OnJoined(rank.machine, kEpoch);
    }
    state.faults = scope_.faults;
    state.early = scope_.early;
    state.cancels = scope_.cancels;
    return state;
  }

  const Scope& scope() const { return scope_; }
  const Arrival& RecordOf(const Cell& cell) const { return arrivals_[cell.record]; }
  int NextOf(const Rank& rank) const { return books_.NextOf(rank.book); }
  bool Broken(const Rank& rank) const {
    return machines_[rank.machine].state() == GroupState::kBroken;
  }
  bool Complete(uint8_t there) const { return there == Bit(kRanks) - 1; }
  bool Running(const Rank& rank, int sequence) const {
    return rank.phase != Phase::kIdle && NextOf(rank) == sequence;
  }

 protected:
  // What callers plan for the pending operation of this cell.
  PlannedRequest Planned(const Cell& cell, int sequence) const {
    const size_t index = static_cast<size_t>(sequence) - 1;
    for (const auto* plan : {&scope_.plan_a, &scope_.plan_b}) {
      if (index < plan->size() && static_cast<uint8_t>((*plan)[index].op) == cell.op) {
        return (*plan)[index];
      }
    }
    return {.op = static_cast<OpKind>(cell.op)};
  }

  uint8_t AddRecord(const Arrival& arrival) {
    for (size_t i = 0; i < arrivals_.size(); ++i) {
      if (arrivals_[i].Key() == arrival.Key()) return static_cast<uint8_t>(i);
    }
    arrivals_.push_back(arrival);
    return static_cast<uint8_t>(arrivals_.size() - 1);
  }

  static void Answer(Cell& cell) {
    for (int slot = 0; slot < kCallSlots; ++slot) {
      if (cell.callers & Bit(slot)) cell.calls[slot] = CallState::kAnswered;
    }
    cell.callers = 0;
  }

  // A rank that is past the sequence makes nothing of what comes: not put on its way.
  void Send(State& s, int r, int sequence, uint8_t Cell::*flight) {
    for (int to = 0; to < kRanks; ++to) {
      if (to != r && NextOf(s.ranks[to]) <= sequence) s.cells[to][sequence].*flight |= Bit(r);
    }
  }

  void Close(State& s, int r, int sequence, uint8_t reason) {
    if (scope_.mutation == Mutation::kSkipClose) return;
    s.cells[r][sequence].close_reason = reason;
    Send(s, r, sequence, &Cell::close_flight);
  }

  // The board forgets ended sequences, and so does the model: what still comes for them is ignored.
  void Forget(State& s, int r) {
    const int next = NextOf(s.ranks[r]);
    for (int sequence = 1; sequence < next && sequence <= kSequences; ++sequence) {
      Cell& cell = s.cells[r][sequence];
      cell.arrived = cell.voted = 0;
      cell.arrive_flight = cell.vote_flight = cell.close_flight = 0;
      cell.cancelled = 0;
      cell.closed = 0;
      cell.rejected = 0;
    }
  }

  const Scope scope_;
  Books books_;
  Machines machines_;
  Conclusions conclusions_;
  std::vector<Arrival> arrivals_;
};

}  // namespace expertd::model

#endif  // TESTS_MODEL_SEQUENCE_BASE_H_
