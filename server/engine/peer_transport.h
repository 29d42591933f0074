// How this daemon sends records to the other daemons of its group; implemented over gRPC by
// server/rpc and by a fake in tests.
#ifndef SERVER_ENGINE_PEER_TRANSPORT_H_
#define SERVER_ENGINE_PEER_TRANSPORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"

namespace expertd::engine {

// Mirrors expertd.v1.Member; the index in a list is the rank.
struct Member {
  int64_t slot = 0;
  std::string address;
  uint64_t incarnation = 0;
};

// One record on its way between two ranks of an epoch.
struct PeerRecord {
  std::string group_id;
  uint64_t epoch = 0;
  uint64_t proof = 0;
  int64_t from_rank = 0;
  std::string stage;
  uint64_t sequence = 0;
  std::string bytes;
};

// Called exactly once, from any thread, with how the delivery ended. Errors: PEER_LOST when the
// peer cannot be reached (a connection that is refused or breaks counts at once; while `patient` is
// set it is retried until the deadline); otherwise the peer's own answer.
using DeliveryCallback = std::function<void(absl::Status)>;

// The connections to the members of one epoch. Thread-safe; no call blocks.
class PeerTransport {
 public:
  virtual ~PeerTransport() = default;
  virtual void Deliver(int64_t to_rank, const PeerRecord& record, SteadyTime deadline, bool patient,
                       DeliveryCallback done) = 0;
  // `record.bytes` holds the encoded reason. Best effort.
  virtual void Close(int64_t to_rank, const PeerRecord& record, SteadyTime deadline) = 0;
};

// Makes the connections of an epoch; called when a join starts.
using PeerTransportFactory =
    std::function<std::unique_ptr<PeerTransport>(const std::vector<Member>& members, int64_t rank)>;

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_PEER_TRANSPORT_H_
