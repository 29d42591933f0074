// Decoding of google.rpc details, and the order in which errors explain a failure.
#include "client/cpp/status.h"

#include <map>
#include <optional>
#include <utility>

#include "absl/strings/cord.h"
#include "base/strings.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace expertd::client {
namespace {

constexpr char kDomain[] = "expertd.v1";

struct Details {
  std::optional<google::rpc::ErrorInfo> info;
  google::rpc::BadRequest bad_request;
};

Details ParseDetails(const std::string& bytes) {
  Details details;
  google::rpc::Status status;
  if (bytes.empty() || !status.ParseFromString(bytes)) return details;
  for (const google::protobuf::Any& any : status.details()) {
    google::rpc::ErrorInfo info;
    if (any.UnpackTo(&info) && info.domain() == kDomain) details.info = std::move(info);
    google::rpc::BadRequest bad_request;
    if (any.UnpackTo(&bad_request)) details.bad_request.MergeFrom(bad_request);
  }
  return details;
}

absl::StatusCode ToCode(const grpc::Status& status) {
  return static_cast<absl::StatusCode>(status.error_code());
}

}  // namespace

std::string ToString(const Origin& origin) {
  if (origin.rank < 0) return origin.address;
  return StrCat("rank ", origin.rank, " (", origin.address, ")");
}

absl::Status FromGrpc(const grpc::Status& status, const Origin& origin) {
  if (status.ok()) return absl::OkStatus();
  const std::string text = StrCat(ToString(origin), ": ", status.error_message());
  const Details details = ParseDetails(status.error_details());
  if (!details.info) return absl::Status(ToCode(status), text);
  const Reason reason = ReasonFromName(details.info->reason());
  if (ReasonCode(reason) != ToCode(status)) {  // A reason that only newer daemons know.
    return absl::Status(ToCode(status), StrCat(text, " [", details.info->reason(), "]"));
  }
  Error error(reason);
  const std::map<std::string, std::string> metadata(details.info->metadata().begin(),
                                                    details.info->metadata().end());
  for (const auto& [key, value] : metadata) std::move(error).With(key, value);
  for (const auto& field : details.bad_request.field_violations()) {
    std::move(error).At(field.field(), field.description());
  }
  // The daemon's text already names the violations, so only the detail is taken from `error`.
  const absl::Status detailed = error;
  absl::Status result(detailed.code(), text);
  detailed.ForEachPayload([&result](absl::string_view url, const absl::Cord& payload) {
    result.SetPayload(url, payload);
  });
  return result;
}

bool HasDetail(const absl::Status& status) {
  bool has = false;
  status.ForEachPayload([&has](absl::string_view, const absl::Cord&) { has = true; });
  return has;
}

absl::Status AddContext(const absl::Status& status, std::string_view context) {
  if (status.ok() || HasDetail(status)) return WithContext(status, context);
  return absl::Status(status.code(), StrCat(context, ": ", status.message()));
}

SequenceFate FateOf(const absl::Status& status) {
  if (status.ok()) return SequenceFate::kConsumed;
  if (!HasDetail(status)) return SequenceFate::kUnknown;
  switch (ReasonOf(status)) {
    case Reason::kGroupNotReady:
    case Reason::kSequenceGap:
    case Reason::kSequenceExpired:
    case Reason::kSequenceConflict:
    case Reason::kCancelled:
    case Reason::kEpochStale:
    case Reason::kGroupBroken:
    case Reason::kPeerLost:
    case Reason::kStepTimeout:
    case Reason::kQueueFull:
    case Reason::kBytesInFlight:
    case Reason::kDraining:
    case Reason::kStarting:
    case Reason::kUnauthenticated:
    case Reason::kPermissionDenied:
    case Reason::kDeviceFault:
    case Reason::kInternal:
      return SequenceFate::kUnknown;
    default:
      return SequenceFate::kConsumed;
  }
}

int Weight(const absl::Status& status) {
  if (status.ok()) return 0;
  if (!HasDetail(status)) {
    switch (status.code()) {
      case absl::StatusCode::kCancelled:
      case absl::StatusCode::kDeadlineExceeded:
        return 1;  // Only says that we stopped waiting.
      case absl::StatusCode::kUnavailable:
        return 5;  // The daemon that its peers miss.
      default:
        return 6;
    }
  }
  switch (ReasonOf(status)) {
    case Reason::kCancelled:
      return 1;
    case Reason::kGroupBroken:
      return 2;
    case Reason::kStepTimeout:
      return 3;
    case Reason::kPeerLost:
    case Reason::kPeerRejected:
      return 4;
    default:
      return 6;
  }
}

size_t MostTelling(absl::Span<const absl::Status> statuses) {
  size_t best = kAllOk;
  int weight = 0;
  for (size_t i = 0; i < statuses.size(); ++i) {
    if (Weight(statuses[i]) <= weight) continue;
    weight = Weight(statuses[i]);
    best = i;
  }
  return best;
}

}  // namespace expertd::client
