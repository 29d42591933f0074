// Steps of the engine: admission, running in sequence order, cancellation, deadlines.
#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/strings.h"
#include "server/engine/buffer_places.h"
#include "server/engine/engine_impl.h"

namespace expertd::engine {
namespace {

constexpr size_t kKeptOutcomes = 1024;

// A request that is refused without taking its sequence.
void Refuse(const std::shared_ptr<Operation>& op, const absl::Status& status,
            const OperationCallback& done) {
  op->status = status;
  op->keep_alive.reset();
  done(op);
}

}  // namespace

void EngineImpl::Submit(std::shared_ptr<Operation> op, OperationCallback done) {
  op->submitted = Clock::Real().Now();
  const uint64_t sequence = op->header.sequence;
  absl::Status refusal;
  std::shared_ptr<const Operation> stored;
  {
    MutexLock lock(mutex_);
    refusal = machine_.CheckStep(op->header.group_id, op->header.epoch);
    // A retry takes no room of its own.
    const bool fresh = sequence >= book_.next() && pending_.count(sequence) == 0;
    if (refusal.ok() && fresh && counters_.queue_length >= options_.queue_capacity) {
      refusal = Error(Reason::kQueueFull)
                    .Text("too many operations wait: ", counters_.queue_length, ", limit ",
                          options_.queue_capacity, " (flag --queue_capacity)")
                    .With("limit", options_.queue_capacity)
                    .With("flag", "queue_capacity");
    }
    if (refusal.ok() && fresh &&
        counters_.bytes_in_flight + op->request_bytes > options_.bytes_in_flight) {
      refusal =
          Error(Reason::kBytesInFlight)
              .Text("request of ", op->request_bytes, " bytes beside ", counters_.bytes_in_flight,
                    " in flight, limit ", options_.bytes_in_flight, " (flag --bytes_in_flight)")
              .With("limit", options_.bytes_in_flight)
              .With("flag", "bytes_in_flight");
    }
    if (refusal.ok()) {
      AdmissionResult result = book_.Admit(sequence, op->header.request_id);
      switch (result.admission) {
        case Admission::kAccepted: {
          ++counters_.queue_length;
          counters_.bytes_in_flight += op->request_bytes;
          Pending& pending = pending_[sequence];
          pending.bytes = op->request_bytes;
          // A place that is not there takes its sequence, as any other bad request does.
          if (op->rejected.ok()) op->rejected = PinPlaces(*op, tensors_);
          pending.op = std::move(op);
          pending.callbacks.push_back(std::move(done));
          ScheduleLocked();
          return;
        }
        case Admission::kDuplicate:
          pending_[sequence].callbacks.push_back(std::move(done));
          return;
        case Admission::kReplay:
          stored = kept_[sequence];
          break;
        case Admission::kClosed:
        case Admission::kRefused:
          refusal = result.status;
          break;
      }
    }
    if (!refusal.ok()) {
      ++counters_.steps_failed;
      ++counters_.failures_by_reason[std::string(ReasonName(ReasonOf(refusal)))];
    }
  }
  if (stored != nullptr) {
    done(stored);
  } else {
    Refuse(op, refusal, done);
  }
}

void EngineImpl::ScheduleLocked() {
  if (running_ || session_ == nullptr) return;
  while (book_.SkipClosed()) {
  }
  auto pending = pending_.find(book_.next());
  // Fenced operations stay in the book and are gone from here.
  if (!book_.Runnable() || pending == pending_.end()) return;
  book_.Begin();
  running_ = true;
  cancel_reason_ = absl::OkStatus();
  const Operation& op = *pending->second.op;
  running_deadline_ = std::min(
      op.deadline, Clock::Real().Now() + std::chrono::milliseconds(group_config_.base_timeout_ms));
  const uint64_t epoch = machine_.epoch();
  device_thread_->Post([this, epoch] { RunNext(epoch); });
}

void EngineImpl::RunNext(uint64_t epoch) {
  std::shared_ptr<Operation> op;
  std::shared_ptr<GroupSession> session;
  absl::Status closed;
  {
    MutexLock lock(mutex_);
    auto pending = pending_.find(book_.next());
    if (machine_.epoch() != epoch || session_ == nullptr || pending == pending_.end()) {
      running_ = false;
      return;  // fenced: its callers have their answer
    }
    op = pending->second.op;
    closed = pending->second.closed;
    session = session_;
  }
  tensors_.Sweep();
  absl::Status group_status;
  if (!closed.ok()) {
    op->status = closed;
    if (HasReason(closed, Reason::kPeerLost))
      group_status = closed;  // as for the rank that said so
  } else {
    if (op->rejected.ok() && Clock::Real().Now() >= op->deadline) {
      op->rejected = Error(Reason::kStepTimeout)
                         .Text("the caller's deadline passed before the operation could start");
    }
    group_status = StepRunner(state_, *session).Run(*op);
  }
  session->exchange->board().Forget(op->header.sequence);
  RefreshLayers();
  FinishStep(epoch, std::move(op), group_status);
}

void EngineImpl::CountLocked(const Operation& op) {
  const std::string name(OpName(op.kind));
  ++counters_.operations[name];
  counters_.operation_micros[name] += static_cast<uint64_t>(op.stats.total_us);
  counters_.routes_dropped += static_cast<uint64_t>(op.stats.routes_dropped);
  counters_.device_block_allocations = state_.device->block_allocations();
  if (op.status.ok()) {
    ++counters_.steps_succeeded;
    if (op.kind == OpKind::kForward) {
      const auto& forward = static_cast<const ForwardOp&>(op);
      if (!forward.tokens.shape.empty()) {
        counters_.tokens += static_cast<uint64_t>(forward.tokens.shape[0]);
      }
    }
  } else {
    ++counters_.steps_failed;
    ++counters_.failures_by_reason[std::string(ReasonName(ReasonOf(op.status)))];
  }
}

void EngineImpl::AnswerLocked(Pending& pending, Answers& answers) {
  --counters_.queue_length;
  counters_.bytes_in_flight -= pending.bytes;
  std::shared_ptr<const Operation> op = pending.op;
  for (OperationCallback& done : pending.callbacks) {
    answers.push_back([done = std::move(done), op] { done(op); });
  }
  pending.callbacks.clear();
}

void EngineImpl::FinishStep(uint64_t epoch, std::shared_ptr<Operation> op,
                            const absl::Status& group_status) {
  Answers answers;
  const uint64_t sequence = op->header.sequence;
  {
    MutexLock lock(mutex_);
    running_ = false;
    // What the backend calls a cancellation has a better name; other failures speak for themselves.
    if (HasReason(op->status, Reason::kCancelled) && !cancel_reason_.ok()) {
      op->status = cancel_reason_;
    }
    op->keep_alive.reset();
    ReleasePlaces(*op);
    CountLocked(*op);
    auto pending = pending_.find(sequence);
    if (machine_.epoch() == epoch && pending != pending_.end() && pending->second.op == op) {
      AnswerLocked(pending->second, answers);
      pending_.erase(pending);
      book_.End();
      kept_[sequence] = op;
      std::erase_if(kept_, [this](const auto& entry) {
        mutex_.AssertHeld();
        return !book_.ReplyKept(entry.first);
      });
      outcomes_[sequence] = {op->status.ok() ? StepState::kSucceeded : StepState::kFailed, op->kind,
                             op->header.request_id, op->status};
      while (outcomes_.size() > kKeptOutcomes) outcomes_.erase(outcomes_.begin());
      if (session_ != nullptr) {
        counters_.tickets = static_cast<int64_t>(session_->tickets.states().size());
        counters_.ticket_bytes = session_->ticket_bytes;
      }
    }
    if (!group_status.ok() && machine_.epoch() == epoch) {
      const std::string reason = StrCat(OpName(op->kind), " of sequence ", sequence, ": ",
                                        StdView(group_status.message()));
      BreakLocked(epoch, reason, answers);
    } else {
      ScheduleLocked();
    }
  }
  if (!op->status.ok()) {
    Log(LogLevel::kWarning, "step_failed")
        .Field("operation", OpName(op->kind))
        .Field("sequence", sequence)
        .Field("reason", ReasonName(ReasonOf(op->status)))
        .Field("message", StdView(op->status.message()));
  }
  for (auto& answer : answers) answer();
}

void EngineImpl::BreakLocked(uint64_t epoch, std::string_view reason, Answers& answers) {
  machine_.OnBroken(epoch, reason);
  FailPendingLocked(Error(Reason::kGroupBroken).Text("the group is broken: ", reason), answers);
  NotifyLocked(answers);
  Log(LogLevel::kError, "group_broken").Field("epoch", epoch).Field("reason", reason);
}

void EngineImpl::FailPendingLocked(const absl::Status& reason, Answers& answers) {
  for (auto& [sequence, pending] : pending_) {
    // The running one is in the device thread's hands: its callers are answered with a stand-in.
    auto stand_in = std::make_shared<Operation>(pending.op->kind);
    stand_in->header = pending.op->header;
    stand_in->status = reason;
    pending.op = std::move(stand_in);
    AnswerLocked(pending, answers);
  }
  pending_.clear();
}

void EngineImpl::AbandonLocked(uint64_t sequence, const absl::Status& reason, Answers& answers) {
  auto found = pending_.find(sequence);
  if (found == pending_.end()) return;
  Pending& pending = found->second;
  std::shared_ptr<Operation> original = pending.op;
  auto answer = std::make_shared<Operation>(original->kind);
  answer->header = original->header;
  answer->status = reason;
  for (OperationCallback& done : pending.callbacks) {
    answers.push_back([done = std::move(done), answer] { done(answer); });
  }
  pending.callbacks.clear();
  pending.cancelled = 0;
  // Still arrives when its turn comes, so that the other ranks learn of it at once.
  auto stand_in = std::make_shared<Operation>(original->kind);
  stand_in->header = original->header;
  stand_in->rejected = reason;
  stand_in->submitted = original->submitted;
  pending.op = std::move(stand_in);
  counters_.bytes_in_flight -= pending.bytes;
  pending.bytes = 0;
}

void EngineImpl::CancelRunningLocked(const absl::Status& reason) {
  if (!running_ || session_ == nullptr) return;
  if (cancel_reason_.ok()) cancel_reason_ = reason;
  const uint64_t sequence = book_.next();
  session_->exchange->board().Cancel(sequence, reason);
  session_->backend->Cancel(sequence);
}

void EngineImpl::CancelOperation(const StepHeader& header) {
  Answers answers;
  {
    MutexLock lock(mutex_);
    auto pending = pending_.find(header.sequence);
    if (header.epoch != machine_.epoch() || pending == pending_.end()) return;
    if (pending->second.op->header.request_id != header.request_id) return;
    // Someone else may still wait for the same operation: the last to leave ends it.
    if (++pending->second.cancelled < pending->second.callbacks.size()) return;
    const absl::Status reason =
        Error(Reason::kCancelled)
            .Text("the caller of rank ", rank_, " cancelled sequence ", header.sequence)
            .With("rank", rank_);
    if (running_ && header.sequence == book_.next()) {
      CancelRunningLocked(reason);
    } else {
      AbandonLocked(header.sequence, reason, answers);
    }
  }
  for (auto& answer : answers) answer();
}

absl::Status EngineImpl::OnPeerClose(const PeerRecord& record) {
  const absl::Status checked = board_->Check(record);
  if (!checked.ok()) return checked;
  Answers answers;
  {
    MutexLock lock(mutex_);
    if (record.epoch != machine_.epoch()) return absl::OkStatus();
    if (record.sequence == 0) {  // the join
      board_->Cancel(0, WithContext(DecodeStatus(record.bytes),
                                    StrCat("rank ", record.from_rank, " left the join")));
      return absl::OkStatus();
    }
    if (session_ == nullptr) return absl::OkStatus();
    const absl::Status sent = DecodeStatus(record.bytes);
    const absl::Status reason =
        WithContext(sent.ok() ? Error(Reason::kStepTimeout).Text("closed").ToStatus() : sent,
                    StrCat("rank ", record.from_rank, " left sequence ", record.sequence));
    switch (book_.Close(record.sequence, reason)) {
      case SequenceBook::CloseEffect::kIgnored:
        break;
      case SequenceBook::CloseEffect::kRecorded:
        outcomes_[record.sequence] = {StepState::kFailed, OpKind::kForward, 0, reason};
        // A lost peer has broken the sender's group, and so this one's, step or no step.
        if (HasReason(reason, Reason::kPeerLost) && !running_) {
          BreakLocked(record.epoch, StdView(reason.message()), answers);
        } else {
          ScheduleLocked();
        }
        break;
      case SequenceBook::CloseEffect::kCancelled:
        if (running_ && record.sequence == book_.next()) {
          CancelRunningLocked(reason);
        } else if (auto pending = pending_.find(record.sequence); pending != pending_.end()) {
          pending->second.closed = reason;
        }
    }
  }
  for (auto& answer : answers) answer();
  return absl::OkStatus();
}

absl::StatusOr<StepOutcome> EngineImpl::GetStepOutcome(uint64_t epoch, uint64_t sequence) const {
  MutexLock lock(mutex_);
  if (epoch != machine_.epoch()) {
    return Error(Reason::kEpochStale)
        .Text("epoch is not current: got ", epoch, ", need ", machine_.epoch())
        .With("current_epoch", machine_.epoch());
  }
  if (auto outcome = outcomes_.find(sequence); outcome != outcomes_.end()) return outcome->second;
  if (auto pending = pending_.find(sequence); pending != pending_.end()) {
    const bool now = running_ && sequence == book_.next();
    const Operation& op = *pending->second.op;
    return StepOutcome{now ? StepState::kRunning : StepState::kWaiting, op.kind,
                       op.header.request_id, absl::OkStatus()};
  }
  if (sequence >= book_.next()) return StepOutcome{};
  return Error(Reason::kSequenceExpired)
      .Text("the outcome of sequence ", sequence, " is not kept: next is ", book_.next())
      .With("next_sequence", book_.next());
}

}  // namespace expertd::engine
