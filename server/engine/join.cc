// Encoding and comparison of join records.
#include "server/engine/join.h"

#include <chrono>
#include <cstdlib>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "base/error.h"
#include "base/ids.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd::engine {
namespace {

// A layer is one field: its values joined by commas.
std::string LayerText(const JoinLayer& layer) {
  return StrCat(layer.fingerprint, ",", layer.weights_version, ",", layer.first_expert, ",",
                layer.local_experts, ",", layer.gradients_valid ? 1 : 0, ",",
                layer.accumulated_backwards, ",", layer.frozen ? 1 : 0, ",", layer.expert_count,
                ",", layer.weights_lineage);
}

bool ParseLayer(const std::string& text, JoinLayer& layer) {
  const std::vector<std::string> parts = absl::StrSplit(text, ',');
  int64_t valid = 0;
  int64_t frozen = 0;
  const bool ok =
      parts.size() == 9 && absl::SimpleAtoi(parts[0], &layer.fingerprint) &&
      absl::SimpleAtoi(parts[1], &layer.weights_version) &&
      absl::SimpleAtoi(parts[2], &layer.first_expert) &&
      absl::SimpleAtoi(parts[3], &layer.local_experts) && absl::SimpleAtoi(parts[4], &valid) &&
      absl::SimpleAtoi(parts[5], &layer.accumulated_backwards) &&
      absl::SimpleAtoi(parts[6], &frozen) && absl::SimpleAtoi(parts[7], &layer.expert_count) &&
      absl::SimpleAtoi(parts[8], &layer.weights_lineage);
  layer.gradients_valid = valid != 0;
  layer.frozen = frozen != 0;
  return ok;
}

constexpr std::chrono::hours kEpochHorizon{24 * 366};

// What a rank's NCCL may not do, as digits in a fixed order.
std::string LimitsText(const NcclSettings& nccl) {
  return StrCat(nccl.p2p_disabled ? 1 : 0, nccl.p2p_nvlink_only ? 1 : 0, nccl.shm_disabled ? 1 : 0);
}

bool ParseLimits(std::string_view text, NcclSettings& nccl) {
  if (text.size() != 3 || text.find_first_not_of("01") != std::string_view::npos) return false;
  nccl.p2p_disabled = text[0] == '1';
  nccl.p2p_nvlink_only = text[1] == '1';
  nccl.shm_disabled = text[2] == '1';
  return true;
}

constexpr std::string_view kConfigPrefix = "config.";
constexpr std::string_view kLayerPrefix = "layer.";

bool TakePrefix(std::string_view& text, std::string_view prefix) {
  if (text.substr(0, prefix.size()) != prefix) return false;
  text.remove_prefix(prefix.size());
  return true;
}

absl::Status Mismatch(std::string_view field, size_t rank_a, std::string_view a, size_t rank_b,
                      std::string_view b) {
  return Error(Reason::kConfigMismatch)
      .Text("ranks do not fit in ", field, ": rank ", rank_a, " has ", a, ", rank ", rank_b,
            " has ", b)
      .With("field", field)
      .With("rank_a", rank_a)
      .With("value_a", a)
      .With("rank_b", rank_b)
      .With("value_b", b);
}

absl::Status CheckDevices(const std::vector<JoinRecord>& records) {
  for (size_t a = 0; a < records.size(); ++a) {
    for (size_t b = a + 1; b < records.size(); ++b) {
      const JoinRecord& first = records[a];
      const JoinRecord& second = records[b];
      if (first.slot == second.slot) {
        return Mismatch("slot", a, StrCat(first.slot), b, StrCat(second.slot, " (the same)"));
      }
      if (!first.device_uuid.empty() && first.device_uuid == second.device_uuid) {
        return Error(Reason::kConfigMismatch)
            .Text("slots ", first.slot, " and ", second.slot, " claim the same device ",
                  first.device_uuid)
            .With("field", "device_uuid")
            .With("rank_a", a)
            .With("value_a", first.device_uuid)
            .With("rank_b", b)
            .With("value_b", second.device_uuid);
      }
    }
  }
  return absl::OkStatus();
}

std::optional<JoinLayer> FindLayer(const JoinRecord& record, const std::string& layer_id) {
  for (const JoinLayer& layer : record.layers) {
    if (layer.layer_id == layer_id) return layer;
  }
  return std::nullopt;
}

// Why the layer of rank `a` and what rank `b` holds do not fit, or "".
std::string LayerDifference(const JoinLayer& mine, const std::optional<JoinLayer>& other,
                            size_t other_rank) {
  if (!other) return StrCat("rank ", other_rank, " does not have it");
  if (other->fingerprint != mine.fingerprint) {
    return StrCat("rank ", other_rank, " has another config");
  }
  if (other->weights_version != mine.weights_version) {
    return StrCat("weights_version is ", mine.weights_version, " here and ", other->weights_version,
                  " on rank ", other_rank);
  }
  if (other->weights_lineage != mine.weights_lineage) {
    return StrCat("weights of version ", mine.weights_version, " come from another source on rank ",
                  other_rank);
  }
  return "";
}

}  // namespace

std::string BootstrapFingerprint(std::string_view bootstrap_id) {
  return Hex(Fingerprint(bootstrap_id));
}

uint64_t MaxEpoch() {
  const auto limit = std::chrono::system_clock::now() + kEpochHorizon;
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(limit.time_since_epoch()).count());
}

std::string EpochTooFar(uint64_t epoch) {
  return StrCat("got ", epoch, ", need at most ", MaxEpoch(),
                " (unix time in ms, a year from now)");
}

std::string EncodeJoin(const JoinRecord& record) {
  std::vector<ConfigField> fields = {
      {"status", EncodeStatus(record.status)},
      {"version", record.version},
      {"slot", StrCat(record.slot)},
      {"host", record.host},
      {"boot_id", record.boot_id},
      {"device", record.device},
      {"device_uuid", record.device_uuid},
      {"bootstrap_fingerprint", record.bootstrap_fingerprint},
      {"pci_bus_id", record.transport.pci_bus_id},
      {"nccl_host", record.transport.host_key},
      {"nccl_limits", LimitsText(record.transport.nccl)},
  };
  for (const ConfigField& field : record.config) {
    fields.push_back({StrCat(kConfigPrefix, field.name), field.value});
  }
  for (const JoinLayer& layer : record.layers) {
    fields.push_back({StrCat(kLayerPrefix, layer.layer_id), LayerText(layer)});
  }
  return EncodeFields(fields);
}

absl::StatusOr<JoinRecord> DecodeJoin(std::string_view bytes) {
  ASSIGN_OR_RETURN(const std::vector<ConfigField> fields, DecodeFields(bytes));
  JoinRecord record;
  bool ok = true;
  for (const ConfigField& field : fields) {
    std::string_view name = field.name;
    if (TakePrefix(name, kConfigPrefix)) {
      record.config.push_back({std::string(name), field.value});
    } else if (TakePrefix(name, kLayerPrefix)) {
      JoinLayer layer;
      layer.layer_id = std::string(name);
      ok = ok && ParseLayer(field.value, layer);
      record.layers.push_back(std::move(layer));
    } else if (name == "status") {
      record.status = DecodeStatus(field.value);
    } else if (name == "version") {
      record.version = field.value;
    } else if (name == "slot") {
      ok = ok && absl::SimpleAtoi(field.value, &record.slot);
    } else if (name == "host") {
      record.host = field.value;
    } else if (name == "boot_id") {
      record.boot_id = field.value;
    } else if (name == "device") {
      record.device = field.value;
    } else if (name == "device_uuid") {
      record.device_uuid = field.value;
      record.transport.device_uuid = field.value;
    } else if (name == "pci_bus_id") {
      record.transport.pci_bus_id = field.value;
    } else if (name == "nccl_host") {
      record.transport.host_key = field.value;
    } else if (name == "nccl_limits") {
      ok = ok && ParseLimits(field.value, record.transport.nccl);
    } else if (name == "bootstrap_fingerprint") {
      record.bootstrap_fingerprint = field.value;
    }
    // Other names come from a newer minor version and are ignored.
  }
  if (!ok) return Error(Reason::kInternal).Text("a peer sent a join record that cannot be read");
  return record;
}

std::vector<Transport> TransportsOf(const std::vector<JoinRecord>& records, int64_t rank,
                                    std::string_view backend,
                                    const std::vector<DevicePeer>& peers) {
  const auto self = static_cast<size_t>(rank);
  std::vector<Transport> transports;
  for (size_t other = 0; other < records.size(); ++other) {
    transports.push_back(other == self ? Transport{"self", ""}
                                       : TransportBetween(backend, records[self].transport,
                                                          records[other].transport, peers));
  }
  return transports;
}

absl::Status ConcludeJoin(const std::vector<JoinRecord>& records, int64_t rank) {
  const absl::Status& own = records[static_cast<size_t>(rank)].status;
  if (!own.ok()) return own;
  std::vector<std::vector<ConfigField>> configs;
  for (size_t other = 0; other < records.size(); ++other) {
    const JoinRecord& record = records[other];
    if (!record.status.ok()) {
      const std::string_view reason = ReasonName(ReasonOf(record.status));
      return Error(Reason::kPeerRejected)
          .Text("rank ", other, " refused to join: ", reason, ": ",
                StdView(record.status.message()))
          .With("rank", other)
          .With("peer_reason", reason);
    }
    if (!VersionsFit(records[0].version, record.version)) {
      return Mismatch("version", 0, records[0].version, other, record.version);
    }
    if (record.bootstrap_fingerprint != records[0].bootstrap_fingerprint) {
      return Mismatch("bootstrap_id", 0, records[0].bootstrap_fingerprint, other,
                      record.bootstrap_fingerprint);
    }
    configs.push_back(record.config);
  }
  RETURN_IF_ERROR(CompareFields(Reason::kConfigMismatch, "the group config", configs));
  return CheckDevices(records);
}

std::map<std::string, std::string> LayersToRestore(const std::vector<JoinRecord>& records,
                                                   int64_t rank) {
  std::map<std::string, std::string> verdicts;
  const auto world = static_cast<int64_t>(records.size());
  for (const JoinLayer& mine : records[static_cast<size_t>(rank)].layers) {
    const int64_t local = mine.expert_count / world;
    if (local * world != mine.expert_count || mine.local_experts != local ||
        mine.first_expert != rank * local) {
      verdicts[mine.layer_id] = StrCat("it holds ", mine.local_experts, " of ", mine.expert_count,
                                       " experts from ", mine.first_expert, " and rank ", rank,
                                       " of ", world, " needs ", local, " from ", rank * local);
      continue;
    }
    for (size_t other = 0; other < records.size(); ++other) {
      const std::string difference =
          LayerDifference(mine, FindLayer(records[other], mine.layer_id), other);
      if (difference.empty()) continue;
      verdicts[mine.layer_id] = difference;
      break;
    }
  }
  return verdicts;
}

std::vector<std::string> LayersWithInvalidGradients(const std::vector<JoinRecord>& records,
                                                    int64_t rank) {
  std::vector<std::string> layers;
  for (const JoinLayer& mine : records[static_cast<size_t>(rank)].layers) {
    for (const JoinRecord& record : records) {
      const std::optional<JoinLayer> other = FindLayer(record, mine.layer_id);
      if (!other) continue;
      if (other->gradients_valid && other->accumulated_backwards == mine.accumulated_backwards) {
        continue;
      }
      layers.push_back(mine.layer_id);
      break;
    }
  }
  return layers;
}

bool VersionsFit(std::string_view a, std::string_view b) {
  if (a == b) return true;
  auto parse = [](std::string_view text, int64_t& major, int64_t& minor) {
    const std::vector<std::string> parts = absl::StrSplit(AbslView(text), '.');
    return parts.size() >= 2 && absl::SimpleAtoi(parts[0], &major) &&
           absl::SimpleAtoi(parts[1], &minor) && minor >= 0;
  };
  int64_t major_a = 0;
  int64_t minor_a = 0;
  int64_t major_b = 0;
  int64_t minor_b = 0;
  if (!parse(a, major_a, minor_a) || !parse(b, major_b, minor_b)) return false;
  return major_a == major_b && std::abs(minor_a - minor_b) <= 1;
}

}  // namespace expertd::engine
