// The steps of forming a group, each bounded by the caller's one deadline.
#include "client/cpp/group_controller.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/bootstrap.h"

namespace expertd::client {
namespace {

// After one rank refused, its peers learn it from the daemons' own exchange, or never.
constexpr absl::Duration kJoinGrace = absl::Seconds(3);
// All daemons have just answered: one that is out of reach now has died.
constexpr absl::Duration kJoinRetry = absl::Seconds(5);
constexpr absl::Duration kAbortTimeout = absl::Seconds(5);
// Another controller may be faster; the epoch is chosen anew this often.
constexpr int kClaimAttempts = 3;

using Clients = std::vector<std::unique_ptr<RankClient>>;

std::vector<RankClient*> Pointers(const Clients& clients) {
  std::vector<RankClient*> pointers;
  for (const auto& client : clients) pointers.push_back(client.get());
  return pointers;
}

absl::StatusOr<Clients> Open(const std::vector<std::string>& hosts, const CallOptions& options) {
  Clients clients;
  if (hosts.empty()) {
    return Error(Reason::kConfigInvalid).Text("hosts: got none, need at least one (--hosts)");
  }
  for (const std::string& host : hosts) {
    RETURN_IF_ERROR(CheckAddress(host));
    clients.push_back(
        std::make_unique<RankClient>(Origin{-1, host}, kControlMessageBytes, options.credentials));
  }
  return clients;
}

absl::StatusOr<std::vector<HostInfo>> ReadInfos(const std::vector<std::string>& hosts,
                                                const Clients& clients,
                                                const CallOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<v1::GetServerInfoResponse> responses,
                   AskAll(Pointers(clients), v1::GetServerInfoRequest(), options));
  std::vector<HostInfo> infos;
  for (size_t i = 0; i < hosts.size(); ++i) infos.push_back({hosts[i], responses[i]});
  return infos;
}

// An epoch that is claimed, and the ranks it was claimed for.
struct Claimed {
  std::vector<PlacedRank> ranks;
  Bootstrap bootstrap;
};

absl::StatusOr<Claimed> Claim(const UpRequest& request, const Clients& clients,
                              const CallOptions& options) {
  for (int attempt = 1;; ++attempt) {
    ASSIGN_OR_RETURN(const std::vector<HostInfo> infos, ReadInfos(request.hosts, clients, options));
    ASSIGN_OR_RETURN(std::vector<PlacedRank> ranks, Place(infos));
    uint64_t highest = 0;
    for (const HostInfo& host : infos) {
      highest = std::max({highest, host.info.highest_epoch_seen(), host.info.epoch()});
    }
    ASSIGN_OR_RETURN(const uint64_t epoch, ChooseEpoch(highest, absl::ToUnixMillis(absl::Now())));
    const auto lowest = std::find(request.hosts.begin(), request.hosts.end(), ranks[0].host);
    absl::StatusOr<Bootstrap> bootstrap =
        ClaimEpoch(*clients[lowest - request.hosts.begin()], request.group_id, epoch,
                   request.claimant, options);
    if (bootstrap.ok()) return Claimed{std::move(ranks), *std::move(bootstrap)};
    if (attempt == kClaimAttempts || !HasReason(bootstrap.status(), Reason::kEpochStale)) {
      return AddContext(bootstrap.status(), StrCat("claiming epoch ", epoch));
    }
  }
}

absl::StatusOr<Group> Join(const UpRequest& request, const Claimed& claimed, CallOptions options) {
  Group joining;
  for (const PlacedRank& placed : claimed.ranks) {
    joining.ranks.push_back(std::make_unique<RankClient>(
        Origin{placed.rank, placed.host}, kControlMessageBytes, options.credentials));
  }
  options.grace = std::min(options.grace, kJoinGrace);
  options.retry_window = std::min(options.retry_window, kJoinRetry);
  const auto replies = CallAll(
      joining.clients(),
      MakeJoinRequests(request, claimed.ranks, claimed.bootstrap.epoch, claimed.bootstrap.id),
      options);
  if (const size_t telling = MostTelling(replies.statuses); telling != kAllOk) {
    const absl::Status cause = AddContext(
        replies.statuses[telling],
        StrCat("joining epoch ", claimed.bootstrap.epoch, " of group ", request.group_id));
    const CallOptions bounded{.deadline = absl::Now() + kAbortTimeout,
                              .retry_window = absl::ZeroDuration(),
                              .credentials = options.credentials};
    // What remains of the attempt; the hosts that never joined have nothing to abort.
    (void)Abort(request.hosts, request.group_id, claimed.bootstrap.epoch,
                StrCat("the group was not formed: ", cause.message()), bounded);
    return cause;
  }
  Group group;
  for (size_t i = 0; i < claimed.ranks.size(); ++i) {
    group.infos.push_back(replies.responses[i].group());
    group.ranks.push_back(std::make_unique<RankClient>(
        joining.ranks[i]->origin(), group.infos.back().max_message_bytes(), options.credentials));
  }
  return group;
}

std::string DescribeReport(const HostReport& report) {
  if (!report.status.ok()) return std::string(report.status.message());
  if (report.group.group_id().empty()) return StrCat(report.host, ": in no group");
  return StrCat(report.host, ": ", v1::GroupState_Name(report.group.state()), " in ",
                report.group.group_id(), " epoch ", report.group.epoch(), " as rank ",
                report.group.rank(), " of ", report.group.members_size());
}

}  // namespace

std::vector<RankClient*> Group::clients() const { return Pointers(ranks); }

std::vector<v1::JoinGroupRequest> MakeJoinRequests(const UpRequest& request,
                                                   const std::vector<PlacedRank>& ranks,
                                                   uint64_t epoch,
                                                   const std::string& bootstrap_id) {
  v1::JoinGroupRequest common;
  common.set_group_id(request.group_id);
  common.set_epoch(epoch);
  for (const PlacedRank& placed : ranks) *common.add_members() = placed.member;
  *common.mutable_config() = request.config;
  if (request.config.ep_size() == 0) {
    common.mutable_config()->set_ep_size(static_cast<int64_t>(ranks.size()) /
                                         std::max<int64_t>(1, request.config.dp_size()));
  }
  common.set_bootstrap_id(bootstrap_id);
  std::vector<v1::JoinGroupRequest> requests(ranks.size(), common);
  for (size_t i = 0; i < ranks.size(); ++i) requests[i].set_rank(ranks[i].rank);
  return requests;
}

absl::StatusOr<std::vector<size_t>> OrderByRank(const std::vector<HostReport>& reports) {
  const auto world = static_cast<int64_t>(reports.size());
  std::vector<size_t> order(reports.size(), reports.size());
  bool good = true;
  for (size_t i = 0; i < reports.size(); ++i) {
    const v1::GroupInfo& group = reports[i].group;
    good = good && reports[i].status.ok() && group.state() == v1::GROUP_STATE_READY &&
           group.members_size() == world && group.group_id() == reports[0].group.group_id() &&
           group.epoch() == reports[0].group.epoch() && group.rank() >= 0 && group.rank() < world;
    if (good) order[group.rank()] = i;
  }
  good = good && std::count(order.begin(), order.end(), reports.size()) == 0;
  if (good) return order;
  std::string text = StrCat("need one ready group of exactly these ", world,
                            " hosts; form it with `expertctl up`");
  for (const HostReport& report : reports) StrAppend(&text, "; ", DescribeReport(report));
  return Error(Reason::kGroupNotReady).Text(text);
}

std::vector<HostReport> ReadHosts(const std::vector<std::string>& hosts,
                                  const CallOptions& options) {
  std::vector<HostReport> reports(hosts.size());
  Clients clients;
  std::vector<size_t> index;  // Of each client's report.
  for (size_t i = 0; i < hosts.size(); ++i) {
    reports[i].host = hosts[i];
    reports[i].status = CheckAddress(hosts[i]);
    if (!reports[i].status.ok()) continue;
    clients.push_back(std::make_unique<RankClient>(Origin{-1, hosts[i]}, kControlMessageBytes,
                                                   options.credentials));
    index.push_back(i);
  }
  const auto infos =
      CallAll(Pointers(clients), std::vector<v1::GetServerInfoRequest>(clients.size()), options);
  Clients reached;
  std::vector<size_t> reached_index;
  for (size_t k = 0; k < index.size(); ++k) {
    reports[index[k]].status = infos.statuses[k];
    reports[index[k]].info = infos.responses[k];
    if (!infos.statuses[k].ok()) continue;
    reached.push_back(std::move(clients[k]));
    reached_index.push_back(index[k]);
  }
  const auto groups =
      CallAll(Pointers(reached), std::vector<v1::DescribeGroupRequest>(reached.size()), options);
  for (size_t k = 0; k < reached.size(); ++k) {
    reports[reached_index[k]].status = groups.statuses[k];
    reports[reached_index[k]].group = groups.responses[k].group();
  }
  return reports;
}

absl::StatusOr<Group> Up(const UpRequest& request, const CallOptions& options) {
  if (request.group_id.empty()) {
    return Error(Reason::kConfigInvalid).Text("group_id: got \"\", need a name (--group_id)");
  }
  ASSIGN_OR_RETURN(const Clients clients, Open(request.hosts, options));
  ASSIGN_OR_RETURN(const Claimed claimed, Claim(request, clients, options));
  return Join(request, claimed, options);
}

absl::StatusOr<Group> Attach(const std::vector<std::string>& hosts, const CallOptions& options) {
  RETURN_IF_ERROR(Open(hosts, options).status());
  const std::vector<HostReport> reports = ReadHosts(hosts, options);
  for (const HostReport& report : reports) RETURN_IF_ERROR(report.status);
  ASSIGN_OR_RETURN(const std::vector<size_t> order, OrderByRank(reports));
  Group group;
  for (size_t rank = 0; rank < order.size(); ++rank) {
    const HostReport& report = reports[order[rank]];
    group.infos.push_back(report.group);
    group.ranks.push_back(
        std::make_unique<RankClient>(Origin{static_cast<int64_t>(rank), report.host},
                                     report.group.max_message_bytes(), options.credentials));
  }
  return group;
}

absl::Status Down(const std::vector<std::string>& hosts, const CallOptions& options) {
  ASSIGN_OR_RETURN(const Clients clients, Open(hosts, options));
  ASSIGN_OR_RETURN(const std::vector<v1::DescribeGroupResponse> groups,
                   AskAll(Pointers(clients), v1::DescribeGroupRequest(), options));
  std::vector<RankClient*> members;
  std::vector<v1::LeaveGroupRequest> requests;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].group().group_id().empty()) continue;
    members.push_back(clients[i].get());
    requests.emplace_back().set_group_id(groups[i].group().group_id());
    requests.back().set_epoch(groups[i].group().epoch());
  }
  const auto replies = CallAll(members, requests, options);
  const size_t telling = MostTelling(replies.statuses);
  return telling == kAllOk ? absl::OkStatus() : replies.statuses[telling];
}

absl::Status Abort(const std::vector<std::string>& hosts, const std::string& group_id,
                   uint64_t epoch, const std::string& reason, const CallOptions& options) {
  ASSIGN_OR_RETURN(const Clients clients, Open(hosts, options));
  v1::AbortGroupRequest request;
  request.set_group_id(group_id);
  request.set_epoch(epoch);
  request.set_reason(reason);
  return AskAll(Pointers(clients), request, options).status();
}

absl::Status Drain(const std::vector<std::string>& hosts, DrainMode mode,
                   const CallOptions& options) {
  ASSIGN_OR_RETURN(const Clients clients, Open(hosts, options));
  v1::DrainRequest request;
  request.set_resume(mode == DrainMode::kResume);
  return AskAll(Pointers(clients), request, options).status();
}

}  // namespace expertd::client
