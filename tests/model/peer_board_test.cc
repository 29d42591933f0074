// Tries every short course of calls on the real PeerBoard against what it may hand out.
//
// Two epochs, two ranks, one stage and two sequences. A course is replayed from a fresh board; the
// oracle is the plain list of what was posted and when.
#include "server/engine/peer_board.h"

#include <gtest/gtest.h>

#include <array>
#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/strings.h"
#include "tests/model/explorer.h"

namespace expertd::model {
namespace {

using engine::PeerBoard;
using engine::PeerRecord;

constexpr char kStage[] = "arrive";

std::string IdOf(uint64_t epoch) { return StrCat("id of ", epoch); }

PeerRecord RecordOf(uint64_t epoch, uint64_t sequence, bool forged) {
  PeerRecord record;
  record.group_id = "g";
  record.epoch = epoch;
  record.from_rank = 1;
  record.stage = kStage;
  record.sequence = sequence;
  record.bytes = StrCat("peer e", epoch, " s", sequence);
  record.proof = engine::ProofOf(record, forged ? "another id" : IdOf(epoch));
  return record;
}

enum class Step {
  kBegin1,
  kBegin2,
  kEnd,
  kPost1,      // record of epoch 1, sequence 1
  kPost1Next,  // record of epoch 1, sequence 2
  kPost2,      // record of epoch 2, sequence 1
  kForge2,     // the same without knowing the epoch's id
  kCancel,     // sequence 1
  kForget,     // sequence 1
  kFail,       // the peer, for epoch 1
  kWait,       // for sequence 1, without patience
  kWaitNext,   // for sequence 2
  kCount,
};
constexpr std::array<const char*, 12> kNames = {
    "Begin(1)", "Begin(2)",  "End",       "Post(e1 s1)", "Post(e1 s2)", "Post(e2 s1)",
    "forged",   "Cancel(1)", "Forget(1)", "Fail(e1)",    "Wait(1)",     "Wait(2)"};

// What a correct board knows.
struct Oracle {
  uint64_t epoch = 0;
  bool open = false;
  bool ended = false;
  bool cancelled = false;
  uint64_t forgotten = 0;
  std::map<std::pair<uint64_t, uint64_t>, bool> there;  // (epoch, sequence) -> a good record came

  void Begin(uint64_t next) {
    if (next <= epoch) return;  // the engine never begins an older epoch, nor one twice
    epoch = next;
    open = true;
    ended = cancelled = false;
    forgotten = 0;
  }
};

class Course {
 public:
  // False when the course asks for something that the engine never does.
  bool Run(const std::vector<Step>& steps) {
    for (Step step : steps) {
      if (!Do(step)) return false;
      if (!problem_.empty()) return true;
    }
    return true;
  }
  const std::string& problem() const { return problem_; }

 private:
  bool Do(Step step) {
    switch (step) {
      case Step::kBegin1:
      case Step::kBegin2: {
        const uint64_t epoch = step == Step::kBegin1 ? 1 : 2;
        if (epoch <= oracle_.epoch) return false;
        oracle_.Begin(epoch);
        board_.Begin("g", epoch, 0, 2, IdOf(epoch));
        return true;
      }
      case Step::kEnd:
        oracle_.open = false;
        oracle_.ended = true;
        board_.End(Error(Reason::kGroupNotReady).Text("left"));
        return true;
      case Step::kPost1:
        return Post(1, 1, false);
      case Step::kPost1Next:
        return Post(1, 2, false);
      case Step::kPost2:
        return Post(2, 1, false);
      case Step::kForge2:
        return Post(2, 1, true);
      case Step::kCancel:
        oracle_.cancelled = true;
        board_.Cancel(1, Error(Reason::kCancelled).Text("cancelled"));
        return oracle_.open;
      case Step::kForget:
        oracle_.forgotten = 1;
        oracle_.cancelled = false;
        board_.Forget(1);
        return oracle_.open;
      case Step::kFail:
        board_.Fail(1, 1, Error(Reason::kPeerLost).Text("lost"));
        return true;
      case Step::kWait:
        // The engine waits only once an epoch has begun, and never for an ended sequence.
        return oracle_.forgotten < 1 && oracle_.epoch != 0 && Wait(1);
      case Step::kWaitNext:
        return oracle_.epoch != 0 && Wait(2);
      case Step::kCount:
        return false;
    }
    return false;
  }

  bool Post(uint64_t epoch, uint64_t sequence, bool forged) {
    const absl::Status status = board_.Post(RecordOf(epoch, sequence, forged));
    const bool early = epoch > oracle_.epoch;
    const bool current = epoch == oracle_.epoch && oracle_.open;
    if (early && !forged) oracle_.there[{epoch, sequence}] = true;
    if (current && !forged && sequence > oracle_.forgotten) {
      oracle_.there[{epoch, sequence}] = true;
    }
    if (current && status.ok() == forged) {
      problem_ = StrCat("a ", forged ? "forged" : "good", " record was answered ",
                        StdView(status.ToString()));
    }
    if (!early && !current && !HasReason(status, Reason::kEpochStale) && !NeverBegun(epoch)) {
      problem_ = StrCat("a record of a past epoch was answered ", StdView(status.ToString()));
    }
    return true;
  }

  bool NeverBegun(uint64_t epoch) const { return epoch == oracle_.epoch && oracle_.epoch == 0; }

  bool Wait(uint64_t sequence) {
    const auto records = board_.Wait(kStage, sequence, "own", SteadyTime::min());
    if (!records.ok()) {
      const bool due = oracle_.open && !(oracle_.cancelled && sequence == 1) &&
                       oracle_.there[{oracle_.epoch, sequence}];
      if (due) problem_ = StrCat("Wait said ", StdView(records.status().ToString()));
      return true;
    }
    const std::string need = StrCat("peer e", oracle_.epoch, " s", sequence);
    if (!oracle_.open) problem_ = "Wait gave records of an epoch that has ended";
    if (records->size() != 2 || (*records)[0] != "own" || (*records)[1] != need) {
      problem_ = StrCat("Wait gave another record than ", need, ": ", (*records)[1]);
    }
    if (oracle_.cancelled && sequence == 1) problem_ = "Wait gave records of a cancelled sequence";
    if (!oracle_.there[{oracle_.epoch, sequence}]) problem_ = "Wait gave a record nobody sent";
    return true;
  }

  PeerBoard board_;
  Oracle oracle_;
  std::string problem_;
};

TEST(PeerBoardModelTest, NoRecordEntersAnotherEpochOrSequence) {
  const int length = StateLimit() == 0 ? 6 : 5;
  uint64_t courses = 0;
  std::vector<Step> steps(static_cast<size_t>(length), Step::kBegin1);
  while (true) {
    Course course;
    if (course.Run(steps)) ++courses;
    if (!course.problem().empty()) {
      std::string text;
      for (Step step : steps) StrAppend(&text, kNames[static_cast<size_t>(step)], " ");
      FAIL() << course.problem() << " after " << text;
    }
    int at = length - 1;
    while (at >= 0 && static_cast<int>(steps[at]) + 1 == static_cast<int>(Step::kCount)) {
      steps[at--] = Step::kBegin1;
    }
    if (at < 0) break;
    steps[at] = static_cast<Step>(static_cast<int>(steps[at]) + 1);
  }
  std::cout << "tried " << courses << " courses of " << length << " calls\n";
}

}  // namespace
}  // namespace expertd::model
