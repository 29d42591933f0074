// status, describe: what there is.
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/json.h"
#include "client/cpp/report.h"
#include "client/cpp/tensor.h"
#include "client/expertctl/common.h"
#include "client/expertctl/verbs.h"

namespace expertd::expertctl {
namespace {

std::string StateName(v1::GroupState state) {
  return std::string(absl::StripPrefix(v1::GroupState_Name(state), "GROUP_STATE_"));
}

void PrintHost(const client::HostReport& report) {
  if (!report.status.ok()) {
    PrintLine(absl::StrFormat("%-22s UNREACHABLE  %s", report.host, report.status.message()));
    return;
  }
  const v1::GetServerInfoResponse& info = report.info;
  std::string line =
      absl::StrFormat("%-22s slot %d  %s  %s  %s", report.host, info.slot(), info.version(),
                      info.device().kind(), StateName(report.group.state()));
  if (!report.group.group_id().empty()) {
    absl::StrAppendFormat(&line, "  %s epoch %d rank %d/%d next sequence %d",
                          report.group.group_id(), report.group.epoch(), report.group.rank(),
                          report.group.members_size(), report.group.next_sequence());
  }
  if (!report.group.reason().empty()) StrAppend(&line, "  (", report.group.reason(), ")");
  PrintLine(line);
}

// How one rank reaches the others, in one line: "rank 0 reaches 1 2 by nvlink p2p, 3 by network".
void PrintWays(const v1::GroupInfo& rank) {
  std::map<std::string, std::string> ranks;  // by transport
  for (const v1::PeerTransport& way : rank.transports()) {
    if (way.rank() == rank.rank()) continue;
    std::string& list = ranks[way.transport()];
    StrAppend(&list, list.empty() ? "" : " ", way.rank());
  }
  std::string line;
  for (const auto& [transport, list] : ranks) {
    StrAppend(&line, line.empty() ? "" : ", ", list, " by ", transport);
  }
  if (!line.empty()) PrintLine(absl::StrFormat("rank %d reaches %s", rank.rank(), line));
}

void PrintLayer(const client::LayerReport& layer) {
  const v1::LayerInfo& info = layer.ranks.front();
  PrintLine(absl::StrFormat(
      "layer %s: %s, %d experts, hidden %d, intermediate %d, top_k %d, "
      "weights version %d%s",
      info.layer_id(),
      std::string(absl::StripPrefix(v1::LayerState_Name(info.state()), "LAYER_STATE_")),
      info.config().expert_count(), info.config().hidden(), info.config().intermediate(),
      info.config().top_k(), info.weights_version(), info.frozen() ? ", frozen" : ""));
  for (const v1::TensorSharding& tensor : layer.sharding.tensors()) {
    PrintLine(absl::StrFormat("  %-14s [%s] %s  spec %s", tensor.name(),
                              absl::StrJoin(tensor.global_shape(), ","),
                              client::DTypeName(tensor.dtype()), client::SpecJson(tensor)));
  }
}

}  // namespace

absl::StatusOr<int> RunStatus(const Args& args) {
  TargetFlags target;
  FlagSet flags("status", "what every daemon is and is in; exit code 1 when one is out of reach");
  target.AddTo(&flags);
  RETURN_IF_ERROR(flags.Parse(args));
  ASSIGN_OR_RETURN(const v1::GroupFile file, target.Read(TargetFlags::Need::kHosts));
  const auto reports = client::ReadHosts(Hosts(file), target.QuickOptions());
  std::vector<std::string> rows;
  int code = kExitOk;
  for (const client::HostReport& report : reports) {
    if (!report.status.ok()) code = kExitFailed;
    if (target.json) {
      rows.push_back(client::HostJson(report));
    } else {
      PrintHost(report);
    }
  }
  if (target.json) PrintLine(client::JsonArray(rows));
  return code;
}

absl::StatusOr<int> RunDescribe(const Args& args) {
  TargetFlags target;
  FlagSet flags("describe", "the group, its layers and where every shard lives");
  target.AddTo(&flags);
  RETURN_IF_ERROR(flags.Parse(args));
  ASSIGN_OR_RETURN(const Session session, OpenSession(target));
  ASSIGN_OR_RETURN(const auto layers, client::ReadLayers(session.group, target.QuickOptions()));
  if (target.json) {
    PrintLine(client::DescribeJson(session.group, layers));
    return kExitOk;
  }
  const v1::GroupInfo& info = session.group.infos.front();
  PrintLine(absl::StrFormat("group %s epoch %d: dp %d x ep %d, backend %s, messages up to %s",
                            info.group_id(), info.epoch(), info.config().dp_size(),
                            info.config().ep_size(), info.backend(),
                            HumanBytes(info.max_message_bytes())));
  for (const v1::GroupInfo& rank : session.group.infos) PrintWays(rank);
  for (const client::LayerReport& layer : layers) PrintLayer(layer);
  return kExitOk;
}

}  // namespace expertd::expertctl
