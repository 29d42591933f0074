// State, scope and actions of the model of several daemons that run sequences.
#ifndef TESTS_MODEL_SEQUENCE_STATE_H_
#define TESTS_MODEL_SEQUENCE_STATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/strings.h"
#include "server/engine/operations.h"

namespace expertd::model {

// A call is what one caller sends to one rank for one sequence.
enum CallSlot : uint8_t { kCallA, kCallB, kRetryA, kCallSlots };  // A's retry has A's request id
enum class CallState : uint8_t { kUnsent, kWaiting, kAnswered };

enum class Phase : uint8_t {
  kIdle,
  kPosted,     // handed to the device thread
  kArriving,   // waits for the arrival records
  kExecuting,  // past arrival, inside the backend
  kVoting,     // past arrival, waits for the votes of ApplyGradients
};
enum class Outcome : uint8_t { kNone, kOk, kNotOk };  // kNotOk: failed, or left by the others

// A deliberate fault in what surrounds the real pieces; the exploration must find it.
enum class Mutation : uint8_t {
  kNone,
  kSkipClose,          // a rank that leaves a sequence tells nobody
  kRejectedStaysAway,  // a rank that refused its request does not arrive
  kForgetAbandoned,    // a timed-out waiting operation leaves no stand-in
  kKeepClosed,         // a sequence that the others closed is not skipped
  kEndTwice,           // the end of one sequence counts for two
  kRerunReplies,       // a retry of a finished request runs again
  kApplyWithoutVote,   // ApplyGradients commits right after arrival
  kTrustAccumulators,  // nothing is said of what the gradient accumulators hold
};

// One sequence on one rank. Masks have a bit per rank.
struct Cell {
  uint8_t op = 0;             // of the pending operation; 0: none is pending
  uint8_t callers = 0;        // of the pending operation: a bit per CallSlot
  uint8_t closed : 1 = 0;     // the pending operation's sequence was left by others
  uint8_t cancelled : 1 = 0;  // at the board
  uint8_t executed_twice : 1 = 0;
  uint8_t committed : 1 = 0;  // changed lasting state, past arrival
  uint8_t unused : 4 = 0;
  uint8_t rejected = 0;  // 1 + Reason, of the pending operation
  Outcome outcome = Outcome::kNone;
  uint8_t executed = 0;       // op that went past arrival here
  uint8_t record = 0;         // index of the arrival record sent
  uint8_t arrived = 0;        // ranks whose record is on this board
  uint8_t arrive_flight = 0;  // ranks whose record is on its way here
  uint8_t voted = 0;
  uint8_t vote_flight = 0;
  uint8_t close_flight = 0;
  uint8_t close_reason = 0;  // 1 + Reason that this rank closed with
  CallState calls[kCallSlots] = {};
};

struct Rank {
  uint16_t book = 0;
  uint16_t machine = 0;
  Phase phase = Phase::kIdle;
  uint8_t cancel = 0;  // 1 + Reason given to CancelRunning
  uint8_t failed = 0;  // ranks that cannot be reached any more
  uint8_t version = 0;
  uint8_t gradients_valid = 1;
  uint8_t accumulated = 0;  // sequences of the backwards in the accumulators
  uint8_t content = 0;      // stands for the weights
  uint8_t unused = 0;
};

template <int kRanks, int kSequences>
struct SequenceState {
  Rank ranks[kRanks];
  Cell cells[kRanks][kSequences + 1];  // [0] is not used
  uint8_t faults = 0;                  // messages that may still be lost or doubled
  uint8_t early = 0;                   // time limits that may still pass before everything settles
  uint8_t cancels = 0;                 // calls that may still be cancelled
  uint8_t lost = 0;                    // whether a message was lost
};

struct PlannedRequest {
  engine::OpKind op = engine::OpKind::kFreezeLayer;
  uint8_t expected_version = 0;  // ApplyGradients
};

struct Scope {
  int ranks = 2;
  int sequences = 2;  // that callers use; the state has room for more, for the recovery
  // What callers A and B ask for in sequence i + 1; B's may be absent.
  std::vector<PlannedRequest> plan_a;
  std::vector<PlannedRequest> plan_b;
  bool retries = false;
  bool may_reject = false;  // a request may be one that the rank refuses
  bool survives_cancel = false;
  uint8_t faults = 0;
  uint8_t early = 0;
  uint8_t cancels = 0;
  int64_t window = 8;
  int64_t kept_replies = 2;
  Mutation mutation = Mutation::kNone;
};

enum class Event : uint8_t {
  kSubmit,
  kSubmitRejected,
  kCancel,
  kStart,
  kStartExpired,
  kArriveEnd,
  kArriveTimeout,
  kExecuteOk,
  kExecuteFail,
  kVoteEnd,
  kVoteTimeout,
  kWaitTimeout,
  kDeliverArrival,
  kDeliverVote,
  kDeliverClose,
  kLoseArrival,
  kRefuseArrival,
  kLoseVote,
  kLoseClose,
  kDoubleClose,
};

struct SequenceAction {
  Event event = Event::kSubmit;
  uint8_t rank = 0;
  uint8_t sequence = 0;
  uint8_t other = 0;  // a call slot, or the rank a message comes from
};

inline std::string TextOf(const SequenceAction& action) {
  const std::string rank = StrCat("rank ", int{action.rank});
  const std::string sequence = StrCat("sequence ", int{action.sequence});
  const std::string from =
      StrCat(" from rank ", int{action.other}, " to rank ", int{action.rank}, " for ", sequence);
  const char* const callers[] = {"caller A", "caller B", "caller A again"};
  const std::string caller = action.other < kCallSlots ? callers[action.other] : "?";
  switch (action.event) {
    case Event::kSubmit:
      return StrCat(caller, " submits ", sequence, " to ", rank);
    case Event::kSubmitRejected:
      return StrCat(caller, " submits a bad ", sequence, " to ", rank);
    case Event::kCancel:
      return StrCat(caller, " cancels ", sequence, " at ", rank);
    case Event::kStart:
      return StrCat(rank, " starts ", sequence, " and sends its record");
    case Event::kStartExpired:
      return StrCat(rank, " starts ", sequence, " after the caller's deadline");
    case Event::kArriveEnd:
      return StrCat(rank, " ends the arrival of ", sequence);
    case Event::kArriveTimeout:
      return StrCat(rank, " times out in the arrival of ", sequence);
    case Event::kExecuteOk:
      return StrCat(rank, " executes ", sequence, " well");
    case Event::kExecuteFail:
      return StrCat(rank, " fails inside ", sequence);
    case Event::kVoteEnd:
      return StrCat(rank, " ends the vote of ", sequence);
    case Event::kVoteTimeout:
      return StrCat(rank, " times out in the vote of ", sequence);
    case Event::kWaitTimeout:
      return StrCat(rank, ": ", sequence, " waits past its deadline");
    case Event::kDeliverArrival:
      return StrCat("the record", from, " is delivered");
    case Event::kDeliverVote:
      return StrCat("the vote", from, " is delivered");
    case Event::kDeliverClose:
      return StrCat("Close", from, " is delivered");
    case Event::kLoseArrival:
      return StrCat("the record", from, " is lost");
    case Event::kRefuseArrival:
      return StrCat("the record", from, " cannot be delivered, and its sender knows");
    case Event::kLoseVote:
      return StrCat("the vote", from, " is lost");
    case Event::kLoseClose:
      return StrCat("Close", from, " is lost");
    case Event::kDoubleClose:
      return StrCat("Close", from, " is delivered, and once more later");
  }
  return "?";
}

}  // namespace expertd::model

#endif  // TESTS_MODEL_SEQUENCE_STATE_H_
