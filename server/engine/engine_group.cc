// Group lifecycle of the engine: claim, fence, leave, abort, drain, watch.
#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/ids.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "server/engine/engine_impl.h"

namespace expertd::engine {
namespace {

constexpr size_t kBootstrapIdBytes = 32;

}  // namespace

GroupInfo EngineImpl::DescribeLocked() const {
  GroupInfo info;
  info.group_id = machine_.group_id();
  info.epoch = machine_.epoch();
  info.state = machine_.state();
  info.reason = machine_.reason();
  info.version = machine_.version();
  if (machine_.state() == GroupState::kIdle) return info;
  info.rank = rank_;
  info.members = members_;
  info.config = group_config_;
  info.backend = group_config_.backend;
  info.next_sequence = book_.next();
  if (session_ != nullptr) info.transports = session_->transports;
  if (auto plan = PlanGroup(SizesOf(group_config_)); plan.ok()) {
    info.max_message_bytes = plan->at("message");
    info.memory_bytes = *std::move(plan);
  }
  info.memory_bytes["ticket_memory"] = group_config_.ticket_memory_bytes;
  return info;
}

GroupInfo EngineImpl::DescribeGroup() const {
  MutexLock lock(mutex_);
  return DescribeLocked();
}

void EngineImpl::NotifyLocked(Answers& answers) {
  auto due = std::partition(watchers_.begin(), watchers_.end(), [this](const Watcher& watcher) {
    mutex_.AssertHeld();
    return watcher.known_version == machine_.version();
  });
  for (auto watcher = due; watcher != watchers_.end(); ++watcher) {
    answers.push_back([done = std::move(watcher->done), info = DescribeLocked()] { done(info); });
  }
  watchers_.erase(due, watchers_.end());
}

void EngineImpl::WatchGroup(uint64_t known_version, SteadyTime until,
                            std::function<void(GroupInfo)> done) {
  Answers answers;
  {
    MutexLock lock(mutex_);
    watchers_.push_back({known_version, until, std::move(done)});
    NotifyLocked(answers);
  }
  for (auto& answer : answers) answer();
}

absl::StatusOr<BootstrapClaim> EngineImpl::CreateBootstrapId(const std::string& group_id,
                                                             uint64_t epoch,
                                                             const std::string& claimant) {
  Violations violations;
  if (group_id.empty()) violations.Add(Reason::kConfigInvalid, "group_id", "got nothing");
  if (claimant.empty()) violations.Add(Reason::kConfigInvalid, "claimant", "got nothing");
  if (epoch == 0) violations.Add(Reason::kConfigInvalid, "epoch", "got 0, need at least 1");
  if (epoch > MaxEpoch()) violations.Add(Reason::kConfigInvalid, "epoch", EpochTooFar(epoch));
  RETURN_IF_ERROR(violations.ToStatus("CreateBootstrapId"));
  MutexLock lock(mutex_);
  if (machine_.draining()) {
    return Error(Reason::kDraining).Text("this daemon is draining: it takes no new group");
  }
  if (epoch == claim_.epoch) {
    if (claim_.claimant != claimant || claim_.group_id != group_id) {
      return Error(Reason::kSequenceConflict)
          .Text("epoch ", epoch, " is claimed by ", claim_.claimant, " for group ", claim_.group_id,
                ", got ", claimant, " for ", group_id)
          .With("claimant", claim_.claimant)
          .With("epoch", epoch);
    }
  } else {
    if (epoch <= machine_.highest_epoch_seen()) {
      return Error(Reason::kEpochStale)
          .Text("epoch is stale: got ", epoch, ", need more than ", machine_.highest_epoch_seen())
          .With("epoch", epoch)
          .With("current_epoch", machine_.highest_epoch_seen());
    }
    claim_ = {group_id, epoch, claimant, RandomBytes(kBootstrapIdBytes), false};
    machine_.SawEpoch(epoch);
    Log(LogLevel::kInfo, "epoch_claimed")
        .Field("group", group_id)
        .Field("epoch", epoch)
        .Field("claimant", claimant)
        .Field("id_fingerprint", BootstrapFingerprint(claim_.bootstrap_id));
  }
  return BootstrapClaim{claim_.bootstrap_id, BootstrapFingerprint(claim_.bootstrap_id),
                        facts_.incarnation};
}

void EngineImpl::FenceLocked(const absl::Status& reason, Answers& answers) {
  FailPendingLocked(reason, answers);
  CancelRunningLocked(reason);
  board_->End(reason);
  if (session_ != nullptr && session_->backend != nullptr) {
    session_->backend->Cancel(std::numeric_limits<uint64_t>::max());
  }
  for (JoinCallback& waiter : join_waiters_) {
    answers.push_back([waiter = std::move(waiter), reason] { waiter(reason); });
  }
  join_waiters_.clear();
}

void EngineImpl::DropSession() {
  std::shared_ptr<GroupSession> session;
  {
    MutexLock lock(mutex_);
    session = std::exchange(session_, nullptr);
  }
  tensors_.End();
  if (session == nullptr) return;
  session->backend->Abort();
}

void EngineImpl::RunLeave(uint64_t epoch) {
  {
    MutexLock lock(mutex_);
    if (machine_.epoch() != epoch) return;
  }
  DropSession();
  Answers answers;
  {
    MutexLock lock(mutex_);
    if (machine_.epoch() != epoch) return;
    const absl::Status left = Error(Reason::kGroupNotReady).Text("this daemon has left the group");
    FailPendingLocked(left, answers);
    board_->End(left);
    machine_.OnLeft();
    NotifyLocked(answers);
  }
  Log(LogLevel::kInfo, "group_left").Field("epoch", epoch);
  for (auto& answer : answers) answer();
}

void EngineImpl::LeaveGroup(const std::string& group_id, uint64_t epoch,
                            std::function<void(absl::Status)> done) {
  Answers answers;
  {
    MutexLock lock(mutex_);
    absl::StatusOr<bool> here = machine_.OnLeaveRequest(group_id, epoch);
    if (!here.ok() || !*here) {
      answers.push_back([done, status = here.status()] { done(status); });
    } else {
      if (machine_.state() == GroupState::kJoining) {
        FenceLocked(Error(Reason::kCancelled).Text("LeaveGroup ended the join"), answers);
      }
      device_thread_->Post([this, epoch, done] {
        RunLeave(epoch);
        done(absl::OkStatus());
      });
    }
  }
  for (auto& answer : answers) answer();
}

void EngineImpl::AbortGroup(const std::string& group_id, uint64_t epoch, const std::string& reason,
                            std::function<void(absl::Status)> done) {
  Answers answers;
  {
    MutexLock lock(mutex_);
    absl::StatusOr<bool> here = machine_.OnLeaveRequest(group_id, epoch);
    if (!here.ok() || !*here) {
      answers.push_back([done, status = here.status()] { done(status); });
    } else {
      const bool joining = machine_.state() == GroupState::kJoining;
      const absl::Status broken =
          joining
              ? absl::Status(Error(Reason::kCancelled).Text("the group was aborted: ", reason))
              : absl::Status(Error(Reason::kGroupBroken).Text("the group was aborted: ", reason));
      FenceLocked(broken, answers);
      machine_.OnBroken(epoch, StrCat("aborted: ", reason));
      NotifyLocked(answers);
      Log(LogLevel::kWarning, "group_aborted").Field("epoch", epoch).Field("reason", reason);
      device_thread_->PostUrgent([this, done] {
        DropSession();
        done(absl::OkStatus());
      });
    }
  }
  for (auto& answer : answers) answer();
}

void EngineImpl::Drain(bool resume, std::function<void(absl::Status)> done) {
  Answers answers;
  uint64_t epoch = 0;
  {
    MutexLock lock(mutex_);
    machine_.OnDrain(!resume);
    epoch = machine_.epoch();
    NotifyLocked(answers);
  }
  Log(LogLevel::kInfo, resume ? "drain_ended" : "draining").Field("epoch", epoch);
  for (auto& answer : answers) answer();
  if (resume || epoch == 0) {
    done(absl::OkStatus());
    return;
  }
  device_thread_->Post([this, epoch, done = std::move(done)] { RunDrain(epoch, done); });
}

void EngineImpl::RunDrain(uint64_t epoch, std::function<void(absl::Status)> done) {
  bool resumed = false;
  {
    MutexLock lock(mutex_);
    resumed = !machine_.draining();
    if (running_ && !stopping_) {
      // The next step is behind this task in the queue; those already admitted finish first.
      device_thread_->Post([this, epoch, done = std::move(done)] { RunDrain(epoch, done); });
      return;
    }
  }
  if (!resumed) RunLeave(epoch);
  done(absl::OkStatus());
}

}  // namespace expertd::engine
