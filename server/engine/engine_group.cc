// Group lifecycle of the engine: claim, join, leave, abort, drain, watch.
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
// Forming a group may wait for pods to start: longer than one step may wait for a rank.
constexpr int64_t kJoinTimeouts = 2;
constexpr std::chrono::milliseconds kMinJoinTimeout{10000};

std::string IdFingerprint(std::string_view bootstrap_id) { return Hex(Fingerprint(bootstrap_id)); }

EpGroupConfig EpConfigOf(const GroupConfig& config, int64_t rank) {
  EpGroupConfig ep;
  ep.rank = rank;
  ep.world = config.ep_size;
  ep.max_tokens_per_rank = config.max_tokens_per_rank;
  ep.max_recv_rows = config.max_recv_rows_per_rank;
  ep.max_hidden = config.max_hidden;
  ep.max_top_k = config.max_top_k;
  ep.max_experts = config.max_experts;
  ep.max_token_dtype = config.max_token_dtype;
  ep.capacity_policy = config.capacity_policy;
  ep.comm_sm_count = config.comm_sm_count;
  return ep;
}

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
        .Field("id_fingerprint", IdFingerprint(claim_.bootstrap_id));
  }
  return BootstrapClaim{claim_.bootstrap_id, IdFingerprint(claim_.bootstrap_id),
                        facts_.incarnation};
}

absl::Status EngineImpl::CheckJoinLocked(const JoinRequest& request) {
  Violations violations;
  auto need = [&](bool holds, std::string path, std::string description) {
    if (!holds) violations.Add(Reason::kConfigInvalid, std::move(path), std::move(description));
  };
  const auto members = static_cast<int64_t>(request.members.size());
  need(!request.group_id.empty(), "group_id", "got nothing");
  need(request.epoch != 0, "epoch", "got 0, need at least 1");
  need(!request.bootstrap_id.empty(), "bootstrap_id", "got nothing");
  const GroupConfig& config = request.config;
  const bool small = config.dp_size >= 1 && config.dp_size <= members && config.ep_size >= 1 &&
                     config.ep_size <= members;  // so that their product fits 64 bits
  need(small && members == config.world(), "members",
       StrCat("got ", members, ", need dp_size * ep_size = ", config.dp_size, " * ",
              config.ep_size));
  need(request.rank >= 0 && request.rank < members, "rank",
       StrCat("got ", request.rank, ", need 0..", members - 1));
  RETURN_IF_ERROR(violations.ToStatus("JoinGroup"));
  const Member& self = request.members[static_cast<size_t>(request.rank)];
  if (self.slot != facts_.slot || self.incarnation != facts_.incarnation) {
    return Error(Reason::kConfigMismatch)
        .Text("member ", request.rank, " is not this daemon: got slot ", self.slot, " incarnation ",
              self.incarnation, ", need slot ", facts_.slot, " incarnation ", facts_.incarnation,
              " (it was restarted, or the address is another daemon's)")
        .With("field", StrCat("members[", request.rank, "]"));
  }
  return absl::OkStatus();
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

void EngineImpl::JoinGroup(JoinRequest request, JoinCallback done) {
  Answers answers;
  {
    MutexLock lock(mutex_);
    request.config = WithDefaults(request.config, DefaultEpBackend(*state_.device));
    const absl::Status bad = CheckJoinLocked(request);
    const absl::StatusOr<JoinDecision> decision =
        bad.ok() ? machine_.OnJoinRequest(request.group_id, request.epoch)
                 : absl::StatusOr<JoinDecision>(bad);
    if (!decision.ok()) {
      answers.push_back([done, status = decision.status()] { done(status); });
    } else if (*decision == JoinDecision::kAlreadyJoined) {
      answers.push_back([done, info = DescribeLocked()] { done(info); });
    } else if (*decision == JoinDecision::kInProgress) {
      join_waiters_.push_back(std::move(done));
    } else {
      FenceLocked(Error(Reason::kEpochStale)
                      .Text("epoch ", request.epoch, " fences what was here before")
                      .With("current_epoch", request.epoch),
                  answers);
      members_ = request.members;
      group_config_ = request.config;
      rank_ = request.rank;
      join_waiters_.push_back(std::move(done));
      NotifyLocked(answers);
      device_thread_->Post([this, request = std::move(request)] { RunJoin(request); });
    }
  }
  for (auto& answer : answers) answer();
}

void EngineImpl::RunJoin(const JoinRequest& request) {
  DropSession();
  parting_exchange_.reset();
  auto session = std::make_shared<GroupSession>();
  session->group_id = request.group_id;
  session->epoch = request.epoch;
  session->rank = request.rank;
  session->world = request.config.world();
  session->config = request.config;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    if (machine_.epoch() != request.epoch || machine_.state() != GroupState::kJoining) {
      return;  // fenced before it began; its callers have their answer
    }
    if (join_waiters_.empty()) {             // left, or stopping, before it began
      machine_.OnJoinFailed(request.epoch);  // the watchdog tells those who watch
      return;
    }
    board_->Begin(request.group_id, request.epoch, request.rank, session->world,
                  request.bootstrap_id);
  }
  status = FormGroup(request, *session);
  FinishJoin(request, std::move(session), status);
}

absl::StatusOr<std::vector<JoinRecord>> EngineImpl::ExchangeJoin(const JoinRequest& request,
                                                                 GroupSession& session) {
  JoinRecord record;
  record.status = ValidateGroupConfig(request.config, options_.max_receive_message_bytes);
  if (record.status.ok() && request.rank == 0) {
    MutexLock lock(mutex_);
    const bool mine = claim_.epoch == request.epoch && claim_.group_id == request.group_id &&
                      claim_.bootstrap_id == request.bootstrap_id && !claim_.used;
    if (mine) {
      claim_.used = true;
    } else if (claim_.epoch > request.epoch) {  // between JoinGroup and now; that claim stays good
      record.status = Error(Reason::kEpochStale)
                          .Text("epoch is stale: got ", request.epoch, ", and epoch ", claim_.epoch,
                                " has been claimed since by ", claim_.claimant)
                          .With("epoch", request.epoch)
                          .With("current_epoch", claim_.epoch)
                          .With("claimant", claim_.claimant);
    } else {
      record.status = Error(Reason::kConfigInvalid)
                          .At("bootstrap_id",
                              "got an id that this daemon did not make for this epoch, or a used "
                              "one, need one from CreateBootstrapId at rank 0");
    }
  }
  record.version = options_.version;
  record.slot = facts_.slot;
  record.host = options_.host;
  record.boot_id = facts_.boot_id;
  record.device = facts_.device.kind == "cuda"
                      ? StrCat("cuda:", facts_.device.ordinal, " ", facts_.device.name)
                      : facts_.device.name;
  record.device_uuid = facts_.device.uuid;
  record.bootstrap_fingerprint = IdFingerprint(request.bootstrap_id);
  record.config = FieldsOf(request.config);
  for (const auto& [id, layer] : state_.layers) {
    const LayerInfo& info = layer->info();
    record.layers.push_back({id, info.fingerprint, info.weights_version, info.first_expert,
                             info.local_experts, info.config.expert_count, info.gradients_valid,
                             info.accumulated_backwards, info.frozen});
  }
  const auto timeout = std::max<std::chrono::milliseconds>(
      kMinJoinTimeout, std::chrono::milliseconds(kJoinTimeouts * request.config.base_timeout_ms));
  const SteadyTime deadline = std::min(request.deadline, Clock::Real().Now() + timeout);
  ASSIGN_OR_RETURN(const std::vector<std::string> blobs,
                   session.exchange->AllGather("join/config", EncodeJoin(record), deadline));
  std::vector<JoinRecord> records;
  for (const std::string& blob : blobs) {
    ASSIGN_OR_RETURN(JoinRecord other, DecodeJoin(blob));
    records.push_back(std::move(other));
  }
  RETURN_IF_ERROR(ConcludeJoin(records, request.rank));
  return records;
}

absl::Status EngineImpl::FormGroup(const JoinRequest& request, GroupSession& session) {
  session.exchange = std::make_unique<PeerExchange>(
      request.group_id, request.epoch, request.rank, session.world, request.bootstrap_id, board_,
      options_.peer_transport ? options_.peer_transport(request.members, request.rank) : nullptr);
  ASSIGN_OR_RETURN(const std::vector<JoinRecord> records, ExchangeJoin(request, session));
  for (const JoinRecord& record : records) {
    session.places.push_back({record.slot, record.host, record.device});
  }
  EpBootstrap bootstrap;
  bootstrap.group_id = request.group_id;
  bootstrap.epoch = request.epoch;
  bootstrap.bootstrap_id = request.bootstrap_id;
  bootstrap.listen_host = options_.data_host;
  bootstrap.exchange = session.exchange.get();
  bootstrap.deadline =
      std::min(request.deadline, Clock::Real().Now() + std::chrono::milliseconds(std::max<int64_t>(
                                                           request.config.base_timeout_ms, 10000)));
  absl::StatusOr<std::unique_ptr<EpBackend>> backend = CreateEpBackend(
      request.config.backend, *state_.device, EpConfigOf(request.config, request.rank), bootstrap);
  // Every rank says how it went before any of them is ready.
  const absl::StatusOr<std::vector<std::string>> outcomes =
      session.exchange->AllGather("join/ready", EncodeStatus(backend.status()), bootstrap.deadline);
  RETURN_IF_ERROR(backend.status());
  RETURN_IF_ERROR(outcomes.status());
  for (size_t rank = 0; rank < outcomes->size(); ++rank) {
    const absl::Status outcome = DecodeStatus((*outcomes)[rank]);
    if (outcome.ok()) continue;
    return Error(Reason::kPeerRejected)
        .Text("rank ", rank, " could not form the communicator: ", ReasonName(ReasonOf(outcome)),
              ": ", StdView(outcome.message()))
        .With("rank", rank)
        .With("peer_reason", ReasonName(ReasonOf(outcome)));
  }
  session.backend = *std::move(backend);
  session.handles.Begin(request.epoch);
  session.tickets.Begin(request.epoch);
  AdoptLayers(records, request.rank);
  return absl::OkStatus();
}

void EngineImpl::AdoptLayers(const std::vector<JoinRecord>& records, int64_t rank) {
  for (const auto& [id, reason] : LayersToRestore(records, rank)) {
    LayerInfo& info = state_.layers[id]->info();
    info.state = LayerState::kNeedsRestore;
    info.reason = reason;
    Log(LogLevel::kWarning, "layer_needs_restore").Field("layer", id).Field("reason", reason);
  }
  for (const std::string& id : LayersWithInvalidGradients(records, rank)) {
    state_.layers[id]->info().gradients_valid = false;
  }
  RefreshLayers();
}

void EngineImpl::FinishJoin(const JoinRequest& request, std::shared_ptr<GroupSession> session,
                            const absl::Status& status) {
  Answers answers;
  {
    MutexLock lock(mutex_);
    if (machine_.epoch() != request.epoch) return;  // fenced meanwhile; callers have their answer
    std::vector<JoinCallback> waiters = std::exchange(join_waiters_, {});
    if (status.ok()) {
      machine_.OnJoined(request.epoch);
      session_ = std::move(session);
      SequenceOptions options;
      options.window = request.config.sequence_window;
      options.kept_replies = request.config.kept_replies;
      book_ = SequenceBook(options);
      kept_.clear();
      outcomes_.clear();
      cancel_reason_ = absl::OkStatus();
    } else {
      machine_.OnJoinFailed(request.epoch);
      board_->End(status);
      parting_exchange_ = std::move(session->exchange);
    }
    NotifyLocked(answers);
    const absl::StatusOr<GroupInfo> answer = status.ok()
                                                 ? absl::StatusOr<GroupInfo>(DescribeLocked())
                                                 : absl::StatusOr<GroupInfo>(status);
    for (JoinCallback& waiter : waiters) {
      answers.push_back([waiter = std::move(waiter), answer] { waiter(answer); });
    }
  }
  Log(status.ok() ? LogLevel::kInfo : LogLevel::kWarning,
      status.ok() ? "group_ready" : "group_join_failed")
      .Field("group", request.group_id)
      .Field("epoch", request.epoch)
      .Field("rank", request.rank)
      .Field("world", request.members.size())
      .Field("backend", request.config.backend)
      .Field("reason", StdView(status.message()));
  for (auto& answer : answers) answer();
}

void EngineImpl::DropSession() {
  std::shared_ptr<GroupSession> session;
  {
    MutexLock lock(mutex_);
    session = std::exchange(session_, nullptr);
  }
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
