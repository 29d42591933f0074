// The product's errors: absl::Status with a reason, metadata and field violations attached.
//
// Usage:
//   return Error(Reason::kRecvCapacity)
//       .Text("receive rows over capacity: got ", rows, ", need at most ", capacity)
//       .With("rows", rows).With("limit", capacity).With("flag", "max_recv_rows_per_rank");
// An Error converts to absl::Status and absl::StatusOr<T>. server/rpc turns the status into a gRPC
// status with google.rpc details; nothing else knows how.
#ifndef BASE_ERROR_H_
#define BASE_ERROR_H_

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/strings.h"

namespace expertd {

// Every reason of the public error table, with the canonical code it always travels with.
enum class Reason {
  kConfigInvalid,
  kLayerExists,
  kBufferRange,
  kShapeMismatch,
  kDtypeUnsupported,
  kPayloadSizeMismatch,
  kExpertIdRange,
  kDuplicateExpert,
  kTokensOverLimit,
  kNonFiniteWeight,
  kShardingMismatch,
  kConfigMismatch,
  kGroupNotReady,
  kSequenceGap,
  kSequenceExpired,
  kLayerNeedsRestore,
  kGradientsInvalid,
  kVersionBehind,
  kLayerUnknown,
  kTicketUnknown,
  kHandleUnknown,
  kBufferUnknown,
  kNonFiniteGradient,
  kCheckpointCorrupt,
  kCancelled,
  kSequenceConflict,
  kEpochStale,
  kGroupBroken,
  kPeerLost,
  kPeerRejected,
  kStepTimeout,
  kQueueFull,
  kBytesInFlight,
  kRecvCapacity,
  kTicketMemory,
  kMemoryBudget,
  kDiskFull,
  kRecipeUnsupported,
  kBackendUnsupported,
  kDraining,
  kStarting,
  kUnauthenticated,
  kPermissionDenied,
  kDeviceFault,
  kNotImplemented,
  kInternal,
};

// "RECV_CAPACITY" for kRecvCapacity, and so on.
std::string_view ReasonName(Reason reason);
// Inverse of ReasonName; kInternal when the name is unknown.
Reason ReasonFromName(std::string_view name);
absl::StatusCode ReasonCode(Reason reason);

struct FieldViolation {
  std::string path;         // "tokens.shape[1]", "topk_ids[17,3]"
  std::string description;  // "got 12, need 16"
  friend bool operator==(const FieldViolation&, const FieldViolation&) = default;
};

struct ErrorDetail {
  Reason reason = Reason::kInternal;
  std::vector<std::pair<std::string, std::string>> metadata;
  std::vector<FieldViolation> violations;
};

// Builder of one error; see the file comment.
class Error {
 public:
  explicit Error(Reason reason) { detail_.reason = reason; }

  template <typename... Parts>
  Error&& Text(const Parts&... parts) && {
    StrAppend(&text_, parts...);
    return std::move(*this);
  }
  template <typename Value>
  Error&& With(std::string_view key, const Value& value) && {
    detail_.metadata.emplace_back(std::string(key), StrCat(value));
    return std::move(*this);
  }
  // Names a request field; appended to the text as " (path)" too when it is the first one.
  Error&& At(std::string path, std::string description) && {
    detail_.violations.push_back({std::move(path), std::move(description)});
    return std::move(*this);
  }

  absl::Status ToStatus() const;
  operator absl::Status() const { return ToStatus(); }  // NOLINT: errors are returned as statuses
  template <typename T>
  operator absl::StatusOr<T>() const {  // NOLINT: see above
    return ToStatus();
  }

 private:
  ErrorDetail detail_;
  std::string text_;
};

// The detail of a status made by Error; for other statuses a detail with a reason that fits the
// code.
ErrorDetail DetailOf(const absl::Status& status);
Reason ReasonOf(const absl::Status& status);
bool HasReason(const absl::Status& status, Reason reason);

// The same error with `context` and ": " before its text; keeps the detail.
absl::Status WithContext(const absl::Status& status, std::string_view context);

// The same error with `prefix` before the path of every field violation: "hidden" of a config that
// is the request's field `config` becomes "config.hidden".
absl::Status WithPathPrefix(const absl::Status& status, std::string_view prefix);

// Collects every violation of one request, then reports them as a single INVALID_ARGUMENT error.
class Violations {
 public:
  // The first reason added names the whole error.
  void Add(Reason reason, std::string path, std::string description);
  bool empty() const { return violations_.empty(); }
  size_t size() const { return violations_.size(); }
  // OK when empty; otherwise "<what>: <path>: <description>; ..." with all violations attached.
  absl::Status ToStatus(std::string_view what) const;

 private:
  Reason reason_ = Reason::kConfigInvalid;
  std::vector<FieldViolation> violations_;
};

// A status as bytes for exchange between daemons, and back. Round trip keeps code, text and detail.
std::string EncodeStatus(const absl::Status& status);
absl::Status DecodeStatus(std::string_view bytes);

}  // namespace expertd

#endif  // BASE_ERROR_H_
