// Encoding of arrival records and the conclusion that every rank draws alike.
#include "server/engine/arrival.h"

#include <cstring>
#include <optional>

#include "base/error.h"
#include "base/ids.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd::engine {
namespace {

// The fixed part of a record as it travels, little-endian; fields and status text follow.
struct WireHeader {
  uint64_t epoch;
  uint64_t sequence;
  uint64_t layer_fingerprint;
  uint64_t forward_sequence;
  int64_t token_count;
  uint64_t weights_version;
  uint64_t weights_lineage;
  int64_t accumulated_backwards;
  uint32_t arguments_bytes;
  uint8_t op;
  uint8_t dtype;
  uint8_t gradients_valid;
  uint8_t reserved;
};
static_assert(sizeof(WireHeader) == 72);

bool UsesWeights(OpKind op) {
  return op == OpKind::kForward || op == OpKind::kBackward || op == OpKind::kApplyGradients;
}

bool NeedsGradients(OpKind op) { return op == OpKind::kBackward || op == OpKind::kApplyGradients; }

absl::Status Conflict(std::string_view field, size_t rank, std::string_view first,
                      std::string_view other) {
  return Error(Reason::kSequenceConflict)
      .Text("ranks disagree about this sequence in ", field, ": rank 0 has ", first, ", rank ",
            rank, " has ", other)
      .With("field", field)
      .With("rank_a", 0)
      .With("value_a", first)
      .With("rank_b", rank)
      .With("value_b", other);
}

// The first way in which `b` of `rank` is another operation than rank 0's `a`.
absl::Status CompareRecords(const ArrivalRecord& a, const ArrivalRecord& b, size_t rank) {
  if (a.op != b.op) return Conflict("operation", rank, OpName(a.op), OpName(b.op));
  if (a.layer_fingerprint != b.layer_fingerprint) {
    return Conflict("layer", rank, StrCat(a.layer_fingerprint), StrCat(b.layer_fingerprint));
  }
  if (a.forward_sequence != b.forward_sequence) {
    return Conflict("forward_sequence", rank, StrCat(a.forward_sequence),
                    StrCat(b.forward_sequence));
  }
  if (a.dtype != b.dtype) return Conflict("dtype", rank, DTypeName(a.dtype), DTypeName(b.dtype));
  return absl::OkStatus();
}

absl::Status CompareGradients(const ArrivalRecord& first, const ArrivalRecord& other, size_t rank) {
  if (!other.gradients_valid) {
    return Error(Reason::kGradientsInvalid)
        .Text("gradients are invalid on rank ", rank,
              ": a backward failed there half-way; ClearGradients, then replay")
        .With("rank", rank);
  }
  if (other.accumulated_backwards == first.accumulated_backwards) return absl::OkStatus();
  return Error(Reason::kGradientsInvalid)
      .Text("gradients hold different backwards: rank 0 has ", first.accumulated_backwards,
            ", rank ", rank, " has ", other.accumulated_backwards, "; ClearGradients, then replay")
      .With("rank", rank);
}

absl::Status CompareWeights(const ArrivalRecord& first, const ArrivalRecord& other, size_t rank) {
  if (other.weights_version != first.weights_version) {
    return Error(Reason::kLayerNeedsRestore)
        .Text("weights versions differ: rank 0 has ", first.weights_version, ", rank ", rank,
              " has ", other.weights_version)
        .With("rank", rank);
  }
  if (other.weights_lineage == first.weights_lineage) return absl::OkStatus();
  return Error(Reason::kLayerNeedsRestore)
      .Text("weights of version ", first.weights_version,
            " come from different sources: rank 0 has ", Hex(first.weights_lineage), ", rank ",
            rank, " has ", Hex(other.weights_lineage))
      .With("rank", rank);
}

absl::Status CompareState(const std::vector<ArrivalRecord>& records) {
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const ArrivalRecord& record = records[rank];
    if (NeedsGradients(record.op)) RETURN_IF_ERROR(CompareGradients(records[0], record, rank));
    if (UsesWeights(record.op)) RETURN_IF_ERROR(CompareWeights(records[0], record, rank));
  }
  return absl::OkStatus();
}

}  // namespace

std::string EncodeArrival(const ArrivalRecord& record) {
  const std::string arguments = EncodeFields(record.arguments);
  WireHeader header = {};
  header.epoch = record.epoch;
  header.sequence = record.sequence;
  header.layer_fingerprint = record.layer_fingerprint;
  header.forward_sequence = record.forward_sequence;
  header.token_count = record.token_count;
  header.weights_version = record.weights_version;
  header.weights_lineage = record.weights_lineage;
  header.accumulated_backwards = record.accumulated_backwards;
  header.arguments_bytes = static_cast<uint32_t>(arguments.size());
  header.op = static_cast<uint8_t>(record.op);
  header.dtype = static_cast<uint8_t>(record.dtype);
  header.gradients_valid = record.gradients_valid ? 1 : 0;
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes += arguments;
  bytes += EncodeStatus(record.status);
  return bytes;
}

absl::StatusOr<ArrivalRecord> DecodeArrival(std::string_view bytes) {
  const absl::Status bad =
      Error(Reason::kInternal).Text("a peer sent an arrival record that cannot be read");
  WireHeader header;
  if (bytes.size() < sizeof(header)) return bad;
  std::memcpy(&header, bytes.data(), sizeof(header));
  bytes.remove_prefix(sizeof(header));
  if (header.arguments_bytes > bytes.size()) return bad;
  if (header.op < static_cast<uint8_t>(OpKind::kForward) ||
      header.op > static_cast<uint8_t>(OpKind::kClearGradients) ||
      header.dtype > static_cast<uint8_t>(DType::kI64) || header.token_count < 0 ||
      header.accumulated_backwards < 0) {
    return bad;
  }
  ArrivalRecord record;
  record.epoch = header.epoch;
  record.sequence = header.sequence;
  record.op = static_cast<OpKind>(header.op);
  record.layer_fingerprint = header.layer_fingerprint;
  record.forward_sequence = header.forward_sequence;
  record.dtype = static_cast<DType>(header.dtype);
  record.token_count = header.token_count;
  record.gradients_valid = header.gradients_valid != 0;
  record.weights_version = header.weights_version;
  record.weights_lineage = header.weights_lineage;
  record.accumulated_backwards = header.accumulated_backwards;
  absl::StatusOr<std::vector<ConfigField>> arguments =
      DecodeFields(bytes.substr(0, header.arguments_bytes));
  if (!arguments.ok()) return bad;
  record.arguments = *std::move(arguments);
  record.status = DecodeStatus(bytes.substr(header.arguments_bytes));
  return record;
}

absl::Status Conclude(const std::vector<ArrivalRecord>& records, int64_t rank) {
  const absl::Status& own = records[static_cast<size_t>(rank)].status;
  if (!own.ok()) return own;
  for (size_t other = 0; other < records.size(); ++other) {
    const absl::Status& status = records[other].status;
    if (status.ok()) continue;
    const std::string_view reason = ReasonName(ReasonOf(status));
    return Error(Reason::kPeerRejected)
        .Text("rank ", other, " refused its request: ", reason, ": ", StdView(status.message()))
        .With("rank", other)
        .With("peer_reason", reason);
  }
  std::vector<std::vector<ConfigField>> arguments;
  for (size_t other = 0; other < records.size(); ++other) {
    RETURN_IF_ERROR(CompareRecords(records[0], records[other], other));
    arguments.push_back(records[other].arguments);
  }
  RETURN_IF_ERROR(CompareFields(Reason::kSequenceConflict, "this sequence", arguments));
  return CompareState(records);
}

}  // namespace expertd::engine
