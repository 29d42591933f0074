// Turns the gRPC statuses of daemons into absl::Status, and picks the one that explains the most.
#ifndef CLIENT_CPP_STATUS_H_
#define CLIENT_CPP_STATUS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/error.h"
#include "grpcpp/support/status.h"

namespace expertd::client {

// Whom a call went to; a negative rank stands for a daemon outside a group.
struct Origin {
  int64_t rank = -1;
  std::string address;
};

// "rank 2 (10.0.0.3:7070)" or "10.0.0.3:7070".
std::string ToString(const Origin& origin);

// The same error with its google.rpc.ErrorInfo and BadRequest as an ErrorDetail, and the origin
// before its text. A status without ErrorInfo (it never reached the service, or another program
// answered) keeps its code and carries no detail.
absl::Status FromGrpc(const grpc::Status& status, const Origin& origin);

// True when the service itself made this error: its reason and metadata can be trusted.
bool HasDetail(const absl::Status& status);

// WithContext that adds no detail where there was none.
absl::Status AddContext(const absl::Status& status, std::string_view context);

// What a failed collective call means for its sequence.
enum class SequenceFate {
  kConsumed,  // Its rank goes on with the next sequence.
  kUnknown,   // Ask DescribeGroup.
};
SequenceFate FateOf(const absl::Status& status);

// How much an error explains: a rank's own error beats one that only reports another rank's.
int Weight(const absl::Status& status);

// The index of the error that explains the most, the first among equals; npos when all are OK.
inline constexpr size_t kAllOk = static_cast<size_t>(-1);
size_t MostTelling(absl::Span<const absl::Status> statuses);

}  // namespace expertd::client

#endif  // CLIENT_CPP_STATUS_H_
