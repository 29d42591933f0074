// The engine's connections to the other daemons of its group, over gRPC.
#ifndef SERVER_RPC_PEER_CLIENT_H_
#define SERVER_RPC_PEER_CLIENT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "grpcpp/security/credentials.h"
#include "server/engine/peer_transport.h"
#include "server/rpc/gate.h"

namespace expertd::rpc {

// One channel per member, none to itself. Thread-safe; no method and not the destructor blocks.
//
// The destructor cancels what is in flight. Each DeliveryCallback is still called exactly once,
// with CANCELLED, possibly after the destructor has returned: a callback may only touch what it
// owns. Who must see the end of it all waits at the gate.
class PeerClient final : public engine::PeerTransport {
 public:
  PeerClient(const std::vector<engine::Member>& members, int64_t rank,
             const std::shared_ptr<grpc::ChannelCredentials>& credentials,
             const std::shared_ptr<Gate>& gate);
  ~PeerClient() override;
  PeerClient(const PeerClient&) = delete;
  PeerClient& operator=(const PeerClient&) = delete;

  void Deliver(int64_t to_rank, const engine::PeerRecord& record, SteadyTime deadline, bool patient,
               engine::DeliveryCallback done) override;
  void Close(int64_t to_rank, const engine::PeerRecord& record, SteadyTime deadline) override;

  class Peer;
  class Calls;

 private:
  std::vector<std::shared_ptr<Peer>> peers_;  // by rank; null for this daemon's own
  std::shared_ptr<Calls> calls_;  // shared with the calls, which may end after this object
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_PEER_CLIENT_H_
