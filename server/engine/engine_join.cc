// Forming an epoch: the join request, what ranks compare, the communicator, and how it ends.
#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/ids.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "server/engine/engine_impl.h"

namespace expertd::engine {
namespace {

// Forming a group may wait for pods to start: longer than one step may wait for a rank.
constexpr int64_t kJoinTimeouts = 2;
constexpr std::chrono::milliseconds kMinJoinTimeout{10000};

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

// All that a JoinGroup says, named, so that a repeated one can be compared.
std::vector<ConfigField> FieldsOf(const JoinRequest& request) {
  std::vector<ConfigField> fields = {
      {"rank", StrCat(request.rank)},
      {"bootstrap_id", BootstrapFingerprint(request.bootstrap_id)},
      {"members", absl::StrJoin(request.members, " ", [](std::string* out, const Member& member) {
         StrAppend(out, member.slot, "@", member.address, "#", member.incarnation);
       })}};
  for (ConfigField& field : FieldsOf(request.config)) fields.push_back(std::move(field));
  return fields;
}

// The ranks of this join do not even agree on how many they are.
bool WorldsDiffer(const std::vector<JoinRecord>& records) {
  const auto mesh = [](const JoinRecord& record) {
    std::vector<ConfigField> fields = record.config;
    std::erase_if(fields, [](const ConfigField& field) {
      return field.name != "ep_size" && field.name != "dp_size";
    });
    return fields;
  };
  return std::any_of(records.begin(), records.end(),
                     [&](const JoinRecord& record) { return mesh(record) != mesh(records[0]); });
}

}  // namespace

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
  if (request.epoch > MaxEpoch()) {
    violations.Add(Reason::kConfigInvalid, "epoch", EpochTooFar(request.epoch));
  }
  RETURN_IF_ERROR(violations.ToStatus("JoinGroup"));
  if (members > 1 && !options_.peer_transport) {
    return Error(Reason::kBackendUnsupported)
        .Text("this daemon has no way to reach peers: got ", members, " members, need 1");
  }
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
    } else if (*decision != JoinDecision::kJoin) {
      const absl::Status other =
          CompareFields(Reason::kConfigMismatch, "the join of this epoch (rank 0: here, 1: asked)",
                        {join_fields_, FieldsOf(request)});
      if (!other.ok()) {
        answers.push_back([done, other] { done(other); });
      } else if (*decision == JoinDecision::kAlreadyJoined) {
        answers.push_back([done, info = DescribeLocked()] { done(info); });
      } else {
        join_waiters_.push_back(std::move(done));
      }
    } else {
      FenceLocked(Error(Reason::kEpochStale)
                      .Text("epoch ", request.epoch, " fences what was here before")
                      .With("current_epoch", request.epoch),
                  answers);
      members_ = request.members;
      group_config_ = request.config;
      rank_ = request.rank;
      join_fields_ = FieldsOf(request);
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
  record.status = WithPathPrefix(
      ValidateGroupConfig(request.config, options_.max_receive_message_bytes), "config.");
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
  record.transport = {NcclHostKey(facts_.device.nccl, options_.host, facts_.boot_id),
                      facts_.device.uuid, facts_.device.pci_bus_id, facts_.device.nccl};
  record.bootstrap_fingerprint = BootstrapFingerprint(request.bootstrap_id);
  record.config = FieldsOf(request.config);
  // Addresses may differ from where one looks; who is meant may not.
  record.config.push_back(
      {"members", absl::StrJoin(request.members, " ", [](std::string* out, const Member& member) {
         StrAppend(out, member.slot, "#", member.incarnation);
       })});
  for (const auto& [id, layer] : state_.layers) {
    const LayerInfo& info = layer->info();
    record.layers.push_back({.layer_id = id,
                             .fingerprint = info.fingerprint,
                             .weights_version = info.weights_version,
                             .weights_lineage = info.weights_lineage,
                             .first_expert = info.first_expert,
                             .local_experts = info.local_experts,
                             .expert_count = info.config.expert_count,
                             .gradients_valid = info.gradients_valid,
                             .accumulated_backwards = info.accumulated_backwards,
                             .frozen = info.frozen});
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
  const absl::Status conclusion = ConcludeJoin(records, request.rank);
  // A rank that expects more members than there are would wait for them until its deadline.
  if (WorldsDiffer(records)) session.exchange->Close(session.exchange->Others(), 0, conclusion);
  RETURN_IF_ERROR(conclusion);
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
  session.transports =
      TransportsOf(records, request.rank, request.config.backend, facts_.device.peers);
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
      tensors_.Begin(request.epoch);
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

}  // namespace expertd::engine
