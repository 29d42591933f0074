// Forms groups of daemons, finds formed ones, and ends them.
#ifndef CLIENT_CPP_GROUP_CONTROLLER_H_
#define CLIENT_CPP_GROUP_CONTROLLER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/placement.h"
#include "client/cpp/rank_client.h"

namespace expertd::client {

// A ready group: its ranks and how each sees it.
struct Group {
  std::vector<std::unique_ptr<RankClient>> ranks;  // In rank order.
  std::vector<v1::GroupInfo> infos;                // Of each rank, when it was formed or found.

  int64_t world() const { return static_cast<int64_t>(ranks.size()); }
  const std::string& id() const { return infos.front().group_id(); }
  uint64_t epoch() const { return infos.front().epoch(); }
  const v1::GroupConfig& config() const { return infos.front().config(); }
  // For CallAll; valid while the group lives.
  std::vector<RankClient*> clients() const;
};

struct UpRequest {
  std::string group_id;
  std::vector<std::string> hosts;
  v1::GroupConfig config;  // ep_size 0: hosts / dp_size.
  std::string claimant;    // From MakeClaimant.
};

// What one host answered; `info` means something only when the status is OK.
struct HostReport {
  std::string host;
  absl::Status status;
  v1::GetServerInfoResponse info;
  v1::GroupInfo group;
};

// Asks every host for its server info and its group, all at once. Never fails as a whole.
std::vector<HostReport> ReadHosts(const std::vector<std::string>& hosts,
                                  const CallOptions& options);

// Forms a new epoch of the group out of exactly these hosts; ends what they were in. When one rank
// cannot join, the attempt is aborted on all and the most telling error is returned.
// Errors: those of Place, CreateBootstrapId and JoinGroup; UNAVAILABLE for a host out of reach.
absl::StatusOr<Group> Up(const UpRequest& request, const CallOptions& options);

// Finds the ready group that exactly these hosts are in.
// Errors: GROUP_NOT_READY, with what each host is in; UNAVAILABLE.
absl::StatusOr<Group> Attach(const std::vector<std::string>& hosts, const CallOptions& options);

// Leaves whatever group each host is in. Layers and weights stay. Being in none is success.
absl::Status Down(const std::vector<std::string>& hosts, const CallOptions& options);

// Ends the epoch on all hosts at once; `reason` is shown to those whose operation it ends.
absl::Status Abort(const std::vector<std::string>& hosts, const std::string& group_id,
                   uint64_t epoch, const std::string& reason, const CallOptions& options);

// Stops new work on every host, or with kResume takes it again.
enum class DrainMode { kDrain, kResume };
absl::Status Drain(const std::vector<std::string>& hosts, DrainMode mode,
                   const CallOptions& options);

// Pure parts, for tests.
std::vector<v1::JoinGroupRequest> MakeJoinRequests(const UpRequest& request,
                                                   const std::vector<PlacedRank>& ranks,
                                                   uint64_t epoch, const std::string& bootstrap_id);
// Checks that the reports describe one ready group; returns the host index of each rank.
absl::StatusOr<std::vector<size_t>> OrderByRank(const std::vector<HostReport>& reports);

}  // namespace expertd::client

#endif  // CLIENT_CPP_GROUP_CONTROLLER_H_
