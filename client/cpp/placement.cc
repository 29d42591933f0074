// Slot order, and the checks that two daemons are not one.
#include "client/cpp/placement.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "base/error.h"
#include "base/strings.h"

namespace expertd::client {
namespace {

// Checks of every pair of daemons; `path` names the second one.
void CheckPair(const HostInfo& a, const HostInfo& b, const std::string& path,
               Violations* violations) {
  const std::string both = StrCat(a.host, " and ", b.host);
  if (a.host == b.host || a.info.incarnation() == b.info.incarnation()) {
    violations->Add(Reason::kConfigInvalid, path,
                    StrCat("got the same daemon twice (", both, "), need each once"));
    return;
  }
  if (a.info.slot() == b.info.slot()) {
    violations->Add(
        Reason::kConfigInvalid, StrCat(path, ".slot"),
        StrCat("got slot ", a.info.slot(), " at ", both, ", need different slots (--slot)"));
  }
  const std::string& uuid = a.info.device().uuid();
  if (!uuid.empty() && uuid == b.info.device().uuid() && !a.info.boot_id().empty() &&
      a.info.boot_id() == b.info.boot_id() && a.info.device().kind() != "cpu") {
    violations->Add(Reason::kConfigInvalid, StrCat(path, ".device"),
                    StrCat("got device ", uuid, " at slots ", a.info.slot(), " and ", b.info.slot(),
                           " (", both, "), need one daemon per device"));
  }
  if (!VersionsFit(a.info.version(), b.info.version())) {
    violations->Add(Reason::kConfigMismatch, StrCat(path, ".version"),
                    StrCat("got ", a.info.version(), " at ", a.host, " and ", b.info.version(),
                           " at ", b.host, ", need at most one minor version apart"));
  }
}

}  // namespace

absl::StatusOr<std::vector<PlacedRank>> Place(const std::vector<HostInfo>& hosts) {
  Violations violations;
  if (hosts.empty()) {
    violations.Add(Reason::kConfigInvalid, "hosts", "got none, need at least one (--hosts)");
  }
  for (size_t j = 0; j < hosts.size(); ++j) {
    for (size_t i = 0; i < j; ++i) {
      CheckPair(hosts[i], hosts[j], StrCat("hosts[", j, "]"), &violations);
    }
  }
  if (!violations.empty()) return violations.ToStatus("placement");
  std::vector<PlacedRank> ranks;
  for (const HostInfo& host : hosts) {
    PlacedRank placed;
    placed.host = host.host;
    placed.member.set_slot(host.info.slot());
    placed.member.set_address(host.info.address().empty() ? host.host : host.info.address());
    placed.member.set_incarnation(host.info.incarnation());
    ranks.push_back(std::move(placed));
  }
  std::sort(ranks.begin(), ranks.end(), [](const PlacedRank& a, const PlacedRank& b) {
    return a.member.slot() < b.member.slot();
  });
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i].rank = static_cast<int64_t>(i);
  return ranks;
}

absl::StatusOr<Version> ParseVersion(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, '.');
  Version version;
  if (parts.size() >= 2 && absl::SimpleAtoi(parts[0], &version.major) &&
      absl::SimpleAtoi(parts[1], &version.minor)) {
    return version;
  }
  return absl::InvalidArgumentError(StrCat("version: got \"", text, "\", need major.minor.patch"));
}

bool VersionsFit(const std::string& a, const std::string& b) {
  if (a == b) return true;
  const absl::StatusOr<Version> first = ParseVersion(a);
  const absl::StatusOr<Version> second = ParseVersion(b);
  if (!first.ok() || !second.ok()) return false;
  return first->major == second->major && std::abs(first->minor - second->minor) <= 1;
}

}  // namespace expertd::client
