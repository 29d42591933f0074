// Admission of operations by sequence and request id.
#include "server/engine/sequence.h"

#include <iterator>

#include "base/error.h"
#include "base/strings.h"

namespace expertd::engine {
namespace {

AdmissionResult Refuse(absl::Status status) { return {Admission::kRefused, std::move(status)}; }

absl::Status OtherRequest(uint64_t sequence, uint64_t have, uint64_t got) {
  return Error(Reason::kSequenceConflict)
      .Text("sequence ", sequence, " belongs to request id ", have, ", got request id ", got,
            ": two callers use the same sequence")
      .With("sequence", sequence)
      .With("request_id", have);
}

}  // namespace

AdmissionResult SequenceBook::Admit(uint64_t sequence, uint64_t request_id) {
  if (sequence < next_) {
    if (auto closed = closed_.find(sequence); closed != closed_.end()) {
      return {Admission::kClosed, closed->second};
    }
    auto kept = finished_.find(sequence);
    if (kept == finished_.end()) {
      return Refuse(
          Error(Reason::kSequenceExpired)
              .Text("sequence ", sequence, " is past and its reply is not kept: next is ", next_)
              .With("sequence", sequence)
              .With("next_sequence", next_));
    }
    if (kept->second != request_id) {
      return Refuse(OtherRequest(sequence, kept->second, request_id));
    }
    return {Admission::kReplay, absl::OkStatus()};
  }
  if (auto waiting = waiting_.find(sequence); waiting != waiting_.end()) {
    if (waiting->second.request_id != request_id) {
      return Refuse(OtherRequest(sequence, waiting->second.request_id, request_id));
    }
    return {Admission::kDuplicate, absl::OkStatus()};
  }
  if (auto closed = closed_.find(sequence); closed != closed_.end()) {
    return {Admission::kClosed, closed->second};
  }
  if (sequence - next_ >= static_cast<uint64_t>(options_.window)) {
    return Refuse(Error(Reason::kSequenceGap)
                      .Text("sequence ", sequence, " is too far ahead: next is ", next_,
                            ", window is ", options_.window)
                      .With("sequence", sequence)
                      .With("next_sequence", next_)
                      .With("window", options_.window));
  }
  waiting_[sequence] = {request_id, false};
  return {Admission::kAccepted, absl::OkStatus()};
}

bool SequenceBook::Runnable() const {
  auto entry = waiting_.find(next_);
  return entry != waiting_.end() && !entry->second.running;
}

void SequenceBook::Begin() {
  auto entry = waiting_.find(next_);
  if (entry != waiting_.end()) entry->second.running = true;
}

void SequenceBook::End() {
  auto entry = waiting_.find(next_);
  if (entry != waiting_.end()) {
    finished_[next_] = entry->second.request_id;
    waiting_.erase(entry);
  }
  ++next_;
  const uint64_t keep = static_cast<uint64_t>(options_.kept_replies);
  while (!finished_.empty() && finished_.begin()->first + keep < next_) {
    finished_.erase(finished_.begin());
  }
  const uint64_t outcomes = static_cast<uint64_t>(options_.kept_outcomes);
  while (!closed_.empty() && closed_.begin()->first + outcomes < next_) {
    closed_.erase(closed_.begin());
  }
}

bool SequenceBook::ReplyKept(uint64_t sequence) const { return finished_.count(sequence) != 0; }

SequenceBook::CloseEffect SequenceBook::Close(uint64_t sequence, const absl::Status& reason) {
  if (sequence < next_) return CloseEffect::kIgnored;
  if (waiting_.count(sequence) != 0) return CloseEffect::kCancelled;
  // Further ahead than the window too: the others do not wait for this rank. Bounded all the same.
  const auto ahead = std::distance(closed_.lower_bound(next_), closed_.end());
  if (ahead >= options_.kept_outcomes) return CloseEffect::kIgnored;
  closed_.emplace(sequence, reason);
  return CloseEffect::kRecorded;
}

bool SequenceBook::SkipClosed() {
  if (waiting_.count(next_) != 0 || closed_.count(next_) == 0) return false;
  End();
  return true;
}

}  // namespace expertd::engine
