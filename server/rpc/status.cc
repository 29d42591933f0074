// Packs and unpacks google.rpc.Status within the size limits of trailing metadata.
#include "server/rpc/status.h"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/cord.h"
#include "base/error.h"
#include "base/strings.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace expertd::rpc {
namespace {

constexpr char kDomain[] = "expertd.v1";
constexpr char kLeftOutKey[] = "violations_left_out";
constexpr size_t kMaxKeyBytes = 64;
constexpr size_t kMaxValueBytes = 200;
constexpr size_t kMaxMetadata = 12;
constexpr size_t kMaxPathBytes = 120;
constexpr int kRetryNanos = 100'000'000;

// `text` in at most `limit` bytes: control characters become spaces, UTF-8 is never cut inside a
// character, and a shortened text ends in "...".
std::string Shorten(std::string_view text, size_t limit) {
  std::string out(text.substr(0, limit));
  if (out.size() < text.size()) {
    size_t end = limit - 3;
    while (end > 0 && (static_cast<unsigned char>(out[end]) & 0xC0) == 0x80) --end;
    out.resize(end);
    out += "...";
  }
  std::replace_if(
      out.begin(), out.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; }, ' ');
  return out;
}

google::rpc::ErrorInfo MakeInfo(const ErrorDetail& detail, size_t metadata, size_t left_out) {
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(ReasonName(detail.reason)));
  info.set_domain(kDomain);
  for (size_t i = 0; i < metadata; ++i) {
    const auto& [key, value] = detail.metadata[i];
    (*info.mutable_metadata())[Shorten(key, kMaxKeyBytes)] = Shorten(value, kMaxValueBytes);
  }
  if (left_out > 0) (*info.mutable_metadata())[kLeftOutKey] = StrCat(left_out);
  return info;
}

// The error with the first `violations` violations and the first `metadata` metadata entries.
google::rpc::Status Assemble(const absl::Status& status, const ErrorDetail& detail,
                             const std::string& text, size_t violations, size_t metadata) {
  google::rpc::Status out;
  out.set_code(static_cast<int>(status.code()));
  out.set_message(text);
  out.add_details()->PackFrom(MakeInfo(detail, metadata, detail.violations.size() - violations));
  if (violations > 0) {
    google::rpc::BadRequest bad_request;
    for (size_t i = 0; i < violations; ++i) {
      auto* field = bad_request.add_field_violations();
      field->set_field(Shorten(detail.violations[i].path, kMaxPathBytes));
      field->set_description(Shorten(detail.violations[i].description, kMaxValueBytes));
    }
    out.add_details()->PackFrom(bad_request);
  }
  if (status.code() == absl::StatusCode::kResourceExhausted ||
      status.code() == absl::StatusCode::kUnavailable) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_nanos(kRetryNanos);
    out.add_details()->PackFrom(retry);
  }
  return out;
}

// The largest count up to `count` for which `fits`; fits(0) is taken for granted.
template <typename Fits>
size_t MostThatFit(size_t count, const Fits& fits) {
  size_t low = 0;
  size_t high = count;
  while (low < high) {
    const size_t middle = (low + high + 1) / 2;
    if (fits(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

std::string PackDetails(const absl::Status& status, const std::string& text) {
  const ErrorDetail detail = DetailOf(status);
  const auto fits = [&](size_t violations, size_t metadata) {
    return Assemble(status, detail, text, violations, metadata).ByteSizeLong() <= kMaxStatusBytes;
  };
  // Metadata comes first: it holds the numbers and flags that callers act on.
  const size_t metadata = MostThatFit(std::min(detail.metadata.size(), kMaxMetadata),
                                      [&](size_t n) { return fits(0, n); });
  const size_t violations =
      MostThatFit(detail.violations.size(), [&](size_t n) { return fits(n, metadata); });
  return Assemble(status, detail, text, violations, metadata).SerializeAsString();
}

struct Unpacked {
  std::optional<google::rpc::ErrorInfo> info;
  google::rpc::BadRequest bad_request;
};

Unpacked Unpack(const std::string& bytes) {
  Unpacked unpacked;
  google::rpc::Status status;
  if (bytes.empty() || !status.ParseFromString(bytes)) return unpacked;
  for (const google::protobuf::Any& any : status.details()) {
    google::rpc::ErrorInfo info;
    if (any.UnpackTo(&info) && info.domain() == kDomain) unpacked.info = std::move(info);
    google::rpc::BadRequest bad_request;
    if (any.UnpackTo(&bad_request)) unpacked.bad_request.MergeFrom(bad_request);
  }
  return unpacked;
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string text = Shorten(StdView(status.message()), kMaxTextBytes);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), text,
                      PackDetails(status, text));
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  const Unpacked unpacked = Unpack(status.error_details());
  if (!unpacked.info) return absl::Status(code, status.error_message());
  Error error(ReasonFromName(unpacked.info->reason()));
  for (const auto& [key, value] : unpacked.info->metadata()) std::move(error).With(key, value);
  for (const auto& field : unpacked.bad_request.field_violations()) {
    std::move(error).At(field.field(), field.description());
  }
  // The text already names the violations, so only the detail is taken from `error`.
  absl::Status result(code, status.error_message());
  error.ToStatus().ForEachPayload([&result](absl::string_view url, const absl::Cord& payload) {
    result.SetPayload(url, payload);
  });
  return result;
}

bool HasDetail(const absl::Status& status) {
  bool has = false;
  status.ForEachPayload([&has](absl::string_view, const absl::Cord&) { has = true; });
  return has;
}

}  // namespace expertd::rpc
