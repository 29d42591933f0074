// Keepalive numbers that the two ends of a connection must agree on.
#ifndef SERVER_RPC_KEEPALIVE_H_
#define SERVER_RPC_KEEPALIVE_H_

namespace expertd::rpc {

// A server takes pings this often, also without calls; a client that pings more often is cut off
// with "too_many_pings". Clients in client/cpp ping less often.
inline constexpr int kMinPingIntervalMs = 10'000;
// How often the server and its connections to other daemons ping, and how long an answer may take.
inline constexpr int kPingIntervalMs = 20'000;
inline constexpr int kPingTimeoutMs = 10'000;
static_assert(kPingIntervalMs > kMinPingIntervalMs);

}  // namespace expertd::rpc

#endif  // SERVER_RPC_KEEPALIVE_H_
