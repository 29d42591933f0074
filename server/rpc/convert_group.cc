// Field by field copies of group messages; presence is checked, meaning is the engine's business.
#include "server/rpc/convert_group.h"

#include <string>

#include "base/error.h"
#include "base/strings.h"
#include "server/rpc/convert_config.h"
#include "server/rpc/convert_step.h"

namespace expertd::rpc {
namespace {

// The stage that the engine puts into every record it closes with; a CloseRequest does not carry
// it.
constexpr char kCloseStage[] = "close";

}  // namespace

static_assert(static_cast<int>(v1::GROUP_STATE_IDLE) ==
                  static_cast<int>(engine::GroupState::kIdle) &&
              static_cast<int>(v1::GROUP_STATE_BROKEN) ==
                  static_cast<int>(engine::GroupState::kBroken));

absl::StatusOr<engine::JoinRequest> FromProto(const v1::JoinGroupRequest& request) {
  Violations violations;
  CheckId(request.group_id(), "group_id", &violations);
  if (request.epoch() == 0) {
    violations.Add(Reason::kConfigInvalid, "epoch", "got 0, need a non-zero number");
  }
  if (request.bootstrap_id().empty()) {
    violations.Add(Reason::kConfigInvalid, "bootstrap_id",
                   "got none, need the one that CreateBootstrapId gave");
  }
  if (request.members().empty()) {
    violations.Add(Reason::kConfigInvalid, "members", "got none, need one per rank");
  } else if (request.rank() < 0 || request.rank() >= request.members_size()) {
    violations.Add(Reason::kConfigInvalid, "rank",
                   StrCat("got ", request.rank(), ", need 0 to ", request.members_size() - 1,
                          ", an index of members"));
  }
  engine::JoinRequest out;
  if (request.has_config()) {
    out.config = FromProto(request.config(), "config", &violations);
  } else {
    violations.Add(Reason::kConfigInvalid, "config", "got none, need one");
  }
  out.group_id = request.group_id();
  out.epoch = request.epoch();
  out.rank = request.rank();
  out.bootstrap_id = request.bootstrap_id();
  for (int i = 0; i < request.members_size(); ++i) {
    const v1::Member& member = request.members(i);
    if (member.address().empty()) {
      violations.Add(Reason::kConfigInvalid, StrCat("members[", i, "].address"),
                     "got none, need \"host:port\"");
    }
    out.members.push_back({member.slot(), member.address(), member.incarnation()});
  }
  if (!violations.empty()) return violations.ToStatus("invalid request");
  return out;
}

void ToProto(const engine::GroupInfo& group, v1::GroupInfo* out) {
  out->set_group_id(group.group_id);
  out->set_epoch(group.epoch);
  out->set_state(static_cast<v1::GroupState>(group.state));
  out->set_rank(group.rank);
  for (const engine::Member& member : group.members) {
    v1::Member* added = out->add_members();
    added->set_slot(member.slot);
    added->set_address(member.address);
    added->set_incarnation(member.incarnation);
  }
  if (!group.group_id.empty()) ToProto(group.config, out->mutable_config());
  out->set_next_sequence(group.next_sequence);
  out->set_reason(group.reason);
  out->set_version(group.version);
  out->mutable_memory_bytes()->insert(group.memory_bytes.begin(), group.memory_bytes.end());
  out->set_max_message_bytes(group.max_message_bytes);
  out->set_backend(group.backend);
  for (size_t rank = 0; rank < group.transports.size(); ++rank) {
    v1::PeerTransport* added = out->add_transports();
    added->set_rank(static_cast<int64_t>(rank));
    added->set_transport(group.transports[rank].name);
    added->set_reason(group.transports[rank].reason);
  }
}

void ToProto(const DeviceFacts& device, v1::DeviceInfo* out) {
  out->set_kind(device.kind);
  out->set_name(device.name);
  out->set_uuid(device.uuid);
  out->set_pci_bus_id(device.pci_bus_id);
  out->set_compute_capability(device.compute_capability);
  out->set_memory_bytes(device.memory_bytes);
  out->set_ordinal(device.ordinal);
  out->set_multiprocessors(device.multiprocessors);
  out->set_driver_version(device.driver_version);
  out->set_cuda_driver(device.cuda_driver);
  out->set_cuda_runtime(device.cuda_runtime);
  out->set_nccl_version(device.nccl_version);
  for (const DevicePeer& peer : device.peers) {
    v1::DevicePeer* added = out->add_peers();
    added->set_ordinal(peer.ordinal);
    added->set_name(peer.name);
    added->set_uuid(peer.uuid);
    added->set_pci_bus_id(peer.pci_bus_id);
    added->set_access(peer.access);
    added->set_nvlink(peer.nvlink);
  }
}

void ToProto(const Support& support, v1::Support* out) {
  out->set_name(support.name);
  out->set_supported(support.supported);
  out->set_reason(support.reason);
}

void ToProto(const engine::ServerFacts& facts, v1::GetServerInfoResponse* out) {
  out->set_slot(facts.slot);
  out->set_incarnation(facts.incarnation);
  out->set_boot_id(facts.boot_id);
  out->set_shared_memory_bytes(facts.shared_memory_bytes);
  ToProto(facts.device, out->mutable_device());
  for (const Support& support : facts.backends) ToProto(support, out->add_backends());
  for (const Support& support : facts.recipes) ToProto(support, out->add_recipes());
  for (const Support& support : facts.mlps) ToProto(support, out->add_mlps());
}

engine::PeerRecord FromProto(const v1::DeliverRequest& request) {
  return {.group_id = request.group_id(),
          .epoch = request.epoch(),
          .proof = request.proof(),
          .from_rank = request.from_rank(),
          .stage = request.stage(),
          .sequence = request.sequence(),
          .bytes = request.record()};
}

engine::PeerRecord FromProto(const v1::CloseRequest& request) {
  return {.group_id = request.group_id(),
          .epoch = request.epoch(),
          .proof = request.proof(),
          .from_rank = request.from_rank(),
          .stage = kCloseStage,
          .sequence = request.sequence(),
          .bytes = request.reason()};
}

void ToProto(const engine::PeerRecord& record, v1::DeliverRequest* out) {
  out->set_group_id(record.group_id);
  out->set_epoch(record.epoch);
  out->set_proof(record.proof);
  out->set_from_rank(record.from_rank);
  out->set_stage(record.stage);
  out->set_sequence(record.sequence);
  out->set_record(record.bytes);
}

void ToProto(const engine::PeerRecord& record, v1::CloseRequest* out) {
  out->set_group_id(record.group_id);
  out->set_epoch(record.epoch);
  out->set_proof(record.proof);
  out->set_from_rank(record.from_rank);
  out->set_sequence(record.sequence);
  out->set_reason(record.bytes);
}

}  // namespace expertd::rpc
