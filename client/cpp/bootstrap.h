// The epoch a group is formed with, and its claim at the daemon of the lowest slot.
#ifndef CLIENT_CPP_BOOTSTRAP_H_
#define CLIENT_CPP_BOOTSTRAP_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/rank_client.h"

namespace expertd::client {

// max(1 + highest_seen, unix_ms): newer than all, also after every daemon forgot what it had seen.
// Errors: CONFIG_INVALID when no newer epoch exists.
absl::StatusOr<uint64_t> ChooseEpoch(uint64_t highest_seen, int64_t unix_ms);

// A claimed epoch. The id is secret: never log it.
struct Bootstrap {
  uint64_t epoch = 0;
  std::string id;
  std::string fingerprint;
};

// Errors: those of CreateBootstrapId.
absl::StatusOr<Bootstrap> ClaimEpoch(RankClient& lowest_slot, const std::string& group_id,
                                     uint64_t epoch, const std::string& claimant,
                                     const CallOptions& options);

// "host:pid:hex", different in every process: who claims, for the loser of a race to see.
std::string MakeClaimant();

}  // namespace expertd::client

#endif  // CLIENT_CPP_BOOTSTRAP_H_
