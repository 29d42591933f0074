// Errors on the wire: absl::Status with its detail to grpc::Status with google.rpc details, and
// back.
#ifndef SERVER_RPC_STATUS_H_
#define SERVER_RPC_STATUS_H_

#include <cstddef>

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace expertd::rpc {

// Largest text of an error in bytes; longer ones end in "...".
inline constexpr size_t kMaxTextBytes = 1024;
// Largest serialized google.rpc.Status, text included. With the text a second time, and with both
// encoded for HTTP/2, a call's trailing metadata stays below gRPC's limit of 8 KiB.
inline constexpr size_t kMaxStatusBytes = 2048;

// The same error with ErrorInfo {reason, domain "expertd.v1", metadata}, BadRequest for violations
// and RetryInfo where waiting may help. What does not fit is left out from the end, violations
// first; ErrorInfo.metadata["violations_left_out"] then counts them. The reason is always there.
grpc::Status ToGrpc(const absl::Status& status);

// The inverse. An error without our ErrorInfo (it never reached the service) keeps code and text
// and carries no detail.
absl::Status FromGrpc(const grpc::Status& status);

// True when the service itself made this error, so that its reason can be trusted.
bool HasDetail(const absl::Status& status);

}  // namespace expertd::rpc

#endif  // SERVER_RPC_STATUS_H_
