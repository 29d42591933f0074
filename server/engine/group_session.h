// What a formed epoch consists of on this rank. Device thread only, once the join has begun.
#ifndef SERVER_ENGINE_GROUP_SESSION_H_
#define SERVER_ENGINE_GROUP_SESSION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ep_backend.h"
#include "kernels/transport.h"
#include "server/engine/config.h"
#include "server/engine/peer_exchange.h"
#include "server/engine/sharding.h"
#include "server/engine/tickets.h"

namespace expertd::engine {

// Members are destroyed in reverse order: tickets and handles before the backend they came from,
// the backend before the exchange it was formed with.
struct GroupSession {
  std::string group_id;
  uint64_t epoch = 0;
  int64_t rank = 0;
  int64_t world = 1;
  GroupConfig config;  // defaults filled in
  std::vector<RankPlace> places;
  std::vector<Transport> transports;  // how each rank is reached; not changed once formed
  std::unique_ptr<PeerExchange> exchange;
  std::unique_ptr<EpBackend> backend;
  EpochStore<HandleState> handles;
  EpochStore<TicketState> tickets;
  int64_t ticket_bytes = 0;
};

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_GROUP_SESSION_H_
