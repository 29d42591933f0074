// The reason table, the status payload that carries an ErrorDetail, and its byte encoding.
#include "base/error.h"

#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>

#include "absl/strings/cord.h"
#include "absl/types/optional.h"

namespace expertd {
namespace {

using absl::StatusCode;

// Private to this process family: server/rpc re-encodes the detail as google.rpc messages.
constexpr char kPayloadUrl[] = "expertd/error_detail";

struct ReasonRow {
  Reason reason;
  std::string_view name;
  StatusCode code;
};

constexpr ReasonRow kReasons[] = {
    {Reason::kConfigInvalid, "CONFIG_INVALID", StatusCode::kInvalidArgument},
    {Reason::kLayerExists, "LAYER_EXISTS", StatusCode::kInvalidArgument},
    {Reason::kBufferRange, "BUFFER_RANGE", StatusCode::kInvalidArgument},
    {Reason::kShapeMismatch, "SHAPE_MISMATCH", StatusCode::kInvalidArgument},
    {Reason::kDtypeUnsupported, "DTYPE_UNSUPPORTED", StatusCode::kInvalidArgument},
    {Reason::kPayloadSizeMismatch, "PAYLOAD_SIZE_MISMATCH", StatusCode::kInvalidArgument},
    {Reason::kExpertIdRange, "EXPERT_ID_RANGE", StatusCode::kInvalidArgument},
    {Reason::kDuplicateExpert, "DUPLICATE_EXPERT", StatusCode::kInvalidArgument},
    {Reason::kTokensOverLimit, "TOKENS_OVER_LIMIT", StatusCode::kInvalidArgument},
    {Reason::kNonFiniteWeight, "NON_FINITE_WEIGHT", StatusCode::kInvalidArgument},
    {Reason::kShardingMismatch, "SHARDING_MISMATCH", StatusCode::kInvalidArgument},
    {Reason::kConfigMismatch, "CONFIG_MISMATCH", StatusCode::kFailedPrecondition},
    {Reason::kGroupNotReady, "GROUP_NOT_READY", StatusCode::kFailedPrecondition},
    {Reason::kSequenceGap, "SEQUENCE_GAP", StatusCode::kFailedPrecondition},
    {Reason::kSequenceExpired, "SEQUENCE_EXPIRED", StatusCode::kFailedPrecondition},
    {Reason::kLayerNeedsRestore, "LAYER_NEEDS_RESTORE", StatusCode::kFailedPrecondition},
    {Reason::kGradientsInvalid, "GRADIENTS_INVALID", StatusCode::kFailedPrecondition},
    {Reason::kVersionBehind, "VERSION_BEHIND", StatusCode::kFailedPrecondition},
    {Reason::kLayerUnknown, "LAYER_UNKNOWN", StatusCode::kNotFound},
    {Reason::kTicketUnknown, "TICKET_UNKNOWN", StatusCode::kNotFound},
    {Reason::kHandleUnknown, "HANDLE_UNKNOWN", StatusCode::kNotFound},
    {Reason::kBufferUnknown, "BUFFER_UNKNOWN", StatusCode::kNotFound},
    {Reason::kNonFiniteGradient, "NON_FINITE_GRADIENT", StatusCode::kAborted},
    {Reason::kCheckpointCorrupt, "CHECKPOINT_CORRUPT", StatusCode::kDataLoss},
    {Reason::kCancelled, "CANCELLED", StatusCode::kCancelled},
    {Reason::kSequenceConflict, "SEQUENCE_CONFLICT", StatusCode::kAlreadyExists},
    {Reason::kEpochStale, "EPOCH_STALE", StatusCode::kAborted},
    {Reason::kGroupBroken, "GROUP_BROKEN", StatusCode::kAborted},
    {Reason::kPeerLost, "PEER_LOST", StatusCode::kAborted},
    {Reason::kPeerRejected, "PEER_REJECTED", StatusCode::kAborted},
    {Reason::kStepTimeout, "STEP_TIMEOUT", StatusCode::kDeadlineExceeded},
    {Reason::kQueueFull, "QUEUE_FULL", StatusCode::kResourceExhausted},
    {Reason::kBytesInFlight, "BYTES_IN_FLIGHT", StatusCode::kResourceExhausted},
    {Reason::kRecvCapacity, "RECV_CAPACITY", StatusCode::kResourceExhausted},
    {Reason::kTicketMemory, "TICKET_MEMORY", StatusCode::kResourceExhausted},
    {Reason::kMemoryBudget, "MEMORY_BUDGET", StatusCode::kResourceExhausted},
    {Reason::kDiskFull, "DISK_FULL", StatusCode::kResourceExhausted},
    {Reason::kRecipeUnsupported, "RECIPE_UNSUPPORTED", StatusCode::kFailedPrecondition},
    {Reason::kBackendUnsupported, "BACKEND_UNSUPPORTED", StatusCode::kFailedPrecondition},
    {Reason::kDraining, "DRAINING", StatusCode::kUnavailable},
    {Reason::kStarting, "STARTING", StatusCode::kUnavailable},
    {Reason::kUnauthenticated, "UNAUTHENTICATED", StatusCode::kUnauthenticated},
    {Reason::kPermissionDenied, "PERMISSION_DENIED", StatusCode::kPermissionDenied},
    {Reason::kDeviceFault, "DEVICE_FAULT", StatusCode::kInternal},
    {Reason::kNotImplemented, "NOT_IMPLEMENTED", StatusCode::kUnimplemented},
    {Reason::kInternal, "INTERNAL", StatusCode::kInternal},
};

// Length-prefixed strings and 32-bit numbers, little-endian: enough for a detail, and total on any
// input when read back.
void PutU32(std::string& out, uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<char>(value >> shift));
}

void PutString(std::string& out, std::string_view text) {
  PutU32(out, static_cast<uint32_t>(text.size()));
  out.append(text);
}

// Reads what PutU32 and PutString wrote; `ok` turns false at the first field that does not fit.
struct Reader {
  std::string_view bytes;
  bool ok = true;

  uint32_t U32() {
    if (bytes.size() < 4) {
      ok = false;
      return 0;
    }
    uint32_t value = 0;
    for (int i = 3; i >= 0; --i) value = (value << 8) | static_cast<uint8_t>(bytes[i]);
    bytes.remove_prefix(4);
    return value;
  }

  std::string String() {
    const uint32_t size = U32();
    if (!ok || size > bytes.size()) {
      ok = false;
      return {};
    }
    std::string text(bytes.substr(0, size));
    bytes.remove_prefix(size);
    return text;
  }
};

std::string EncodeDetail(const ErrorDetail& detail) {
  std::string out;
  PutString(out, ReasonName(detail.reason));
  PutU32(out, static_cast<uint32_t>(detail.metadata.size()));
  for (const auto& [key, value] : detail.metadata) {
    PutString(out, key);
    PutString(out, value);
  }
  PutU32(out, static_cast<uint32_t>(detail.violations.size()));
  for (const FieldViolation& violation : detail.violations) {
    PutString(out, violation.path);
    PutString(out, violation.description);
  }
  return out;
}

std::optional<ErrorDetail> DecodeDetail(std::string_view bytes) {
  Reader reader{bytes};
  ErrorDetail detail;
  detail.reason = ReasonFromName(reader.String());
  for (uint32_t n = reader.U32(); reader.ok && n > 0; --n) {
    std::string key = reader.String();
    detail.metadata.emplace_back(std::move(key), reader.String());
  }
  for (uint32_t n = reader.U32(); reader.ok && n > 0; --n) {
    std::string path = reader.String();
    detail.violations.push_back({std::move(path), reader.String()});
  }
  if (!reader.ok) return std::nullopt;
  return detail;
}

// For statuses that were not made by Error: the reason whose meaning is nearest to the code.
Reason ReasonForCode(StatusCode code) {
  switch (code) {
    case StatusCode::kCancelled:
      return Reason::kCancelled;
    case StatusCode::kInvalidArgument:
      return Reason::kConfigInvalid;
    case StatusCode::kDeadlineExceeded:
      return Reason::kStepTimeout;
    case StatusCode::kAborted:
      return Reason::kGroupBroken;
    case StatusCode::kUnimplemented:
      return Reason::kNotImplemented;
    case StatusCode::kUnavailable:
      return Reason::kPeerLost;
    default:
      return Reason::kInternal;
  }
}

absl::Status MakeStatus(StatusCode code, std::string_view text, const ErrorDetail& detail) {
  absl::Status status(code, AbslView(text));
  status.SetPayload(kPayloadUrl, absl::Cord(EncodeDetail(detail)));
  return status;
}

}  // namespace

std::string_view ReasonName(Reason reason) {
  for (const ReasonRow& row : kReasons) {
    if (row.reason == reason) return row.name;
  }
  return "INTERNAL";
}

Reason ReasonFromName(std::string_view name) {
  for (const ReasonRow& row : kReasons) {
    if (row.name == name) return row.reason;
  }
  return Reason::kInternal;
}

absl::StatusCode ReasonCode(Reason reason) {
  for (const ReasonRow& row : kReasons) {
    if (row.reason == reason) return row.code;
  }
  return StatusCode::kInternal;
}

absl::Status Error::ToStatus() const {
  std::string text = text_;
  if (!detail_.violations.empty()) {
    const FieldViolation& first = detail_.violations.front();
    StrAppend(&text, text.empty() ? "" : ": ", first.description, " (", first.path, ")");
  }
  return MakeStatus(ReasonCode(detail_.reason), text, detail_);
}

ErrorDetail DetailOf(const absl::Status& status) {
  if (absl::optional<absl::Cord> payload = status.GetPayload(kPayloadUrl)) {
    if (std::optional<ErrorDetail> detail = DecodeDetail(std::string(*payload))) return *detail;
  }
  ErrorDetail detail;
  detail.reason = ReasonForCode(status.code());
  return detail;
}

Reason ReasonOf(const absl::Status& status) { return DetailOf(status).reason; }

bool HasReason(const absl::Status& status, Reason reason) {
  return !status.ok() && ReasonOf(status) == reason;
}

absl::Status WithContext(const absl::Status& status, std::string_view context) {
  if (status.ok()) return status;
  return MakeStatus(status.code(), StrCat(context, ": ", status.message()), DetailOf(status));
}

absl::Status WithPathPrefix(const absl::Status& status, std::string_view prefix) {
  if (status.ok()) return status;
  ErrorDetail detail = DetailOf(status);
  for (FieldViolation& violation : detail.violations) {
    violation.path = StrCat(prefix, violation.path);
    if (violation.path.back() == '.') violation.path.pop_back();  // the whole of it
  }
  return MakeStatus(status.code(), std::string(status.message()), detail);
}

void Violations::Add(Reason reason, std::string path, std::string description) {
  if (violations_.empty()) reason_ = reason;
  violations_.push_back({std::move(path), std::move(description)});
}

absl::Status Violations::ToStatus(std::string_view what) const {
  if (violations_.empty()) return absl::OkStatus();
  std::string text(what);
  const char* separator = ": ";
  for (const FieldViolation& violation : violations_) {
    StrAppend(&text, separator, violation.path, ": ", violation.description);
    separator = "; ";
  }
  ErrorDetail detail;
  detail.reason = reason_;
  detail.violations = violations_;
  return MakeStatus(ReasonCode(reason_), text, detail);
}

std::string EncodeStatus(const absl::Status& status) {
  std::string out;
  PutU32(out, static_cast<uint32_t>(status.code()));
  if (status.ok()) return out;
  PutString(out, StdView(status.message()));
  out += EncodeDetail(DetailOf(status));
  return out;
}

absl::Status DecodeStatus(std::string_view bytes) {
  Reader reader{bytes};
  const auto code = static_cast<StatusCode>(reader.U32());
  if (reader.ok && code == StatusCode::kOk) return absl::OkStatus();
  const std::string text = reader.String();
  std::optional<ErrorDetail> detail;
  if (reader.ok) detail = DecodeDetail(reader.bytes);
  if (!detail) return Error(Reason::kInternal).Text("a peer sent a status that cannot be read");
  return MakeStatus(code, text, *detail);
}

}  // namespace expertd
