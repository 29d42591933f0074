// Which daemon becomes which rank: a pure function of what the daemons say about themselves.
#ifndef CLIENT_CPP_PLACEMENT_H_
#define CLIENT_CPP_PLACEMENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "expertd/v1/control_service.pb.h"

namespace expertd::client {

// One daemon: how the client reaches it and what it answered.
struct HostInfo {
  std::string host;
  v1::GetServerInfoResponse info;
};

struct PlacedRank {
  int64_t rank = 0;
  std::string host;   // As the client reaches it.
  v1::Member member;  // As the other daemons do.
};

// Ranks in slot order. Errors, all at once with every pair named:
//   CONFIG_INVALID: no hosts, a host listed twice, two daemons with one slot or one device.
//   CONFIG_MISMATCH: versions more than one minor apart.
absl::StatusOr<std::vector<PlacedRank>> Place(const std::vector<HostInfo>& hosts);

// "1.4.2" -> {1, 4}. Errors: INVALID_ARGUMENT.
struct Version {
  int64_t major = 0;
  int64_t minor = 0;
  friend bool operator==(const Version&, const Version&) = default;
};
absl::StatusOr<Version> ParseVersion(const std::string& text);

// Daemons of one group may be one minor version apart, for rolling upgrades.
bool VersionsFit(const std::string& a, const std::string& b);

}  // namespace expertd::client

#endif  // CLIENT_CPP_PLACEMENT_H_
