// Runs several calls at once and waits for all: deadline, stop flag, retry of UNAVAILABLE.
#ifndef CLIENT_CPP_FAN_OUT_H_
#define CLIENT_CPP_FAN_OUT_H_

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/status.h"
#include "grpcpp/client_context.h"
#include "grpcpp/security/credentials.h"

namespace expertd::client {

struct CallOptions {
  // Of everything: waiting, retries, the calls themselves. Must be finite.
  absl::Time deadline;
  // UNAVAILABLE is retried with the same request until then; the deadline bounds it too.
  absl::Duration retry_window = absl::InfiniteDuration();
  // After one call has failed for good, how long the others may still run before they are
  // cancelled.
  absl::Duration grace = absl::InfiniteDuration();
  // Cancels everything when it turns true; may be null.
  const std::atomic<bool>* stop = nullptr;
  // Of connections that are opened for the call; null: plaintext. Shared with gRPC's channels.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
};

// One call that can be started again: hands `context` and `done` to a stub.
struct PendingCall {
  Origin origin;
  std::function<void(grpc::ClientContext* context, std::function<void(grpc::Status)> done)> start;
};

// The status of each call, in order; returns when none is running any more. Once one call has
// failed for good, those that were waiting to be retried are not.
std::vector<absl::Status> FanOut(const std::vector<PendingCall>& calls, const CallOptions& options);

}  // namespace expertd::client

#endif  // CLIENT_CPP_FAN_OUT_H_
