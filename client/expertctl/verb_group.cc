// up, down, drain: a group's beginning and end.
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/bootstrap.h"
#include "client/cpp/group_controller.h"
#include "client/cpp/report.h"
#include "client/expertctl/common.h"
#include "client/expertctl/config_flags.h"
#include "client/expertctl/layers.h"
#include "client/expertctl/verbs.h"

namespace expertd::expertctl {
namespace {

void PrintGroup(const client::Group& group, absl::Duration took) {
  PrintLine(absl::StrFormat("group %s epoch %d: %d ranks, backend %s, formed in %s", group.id(),
                            group.epoch(), group.world(), group.infos.front().backend(),
                            absl::FormatDuration(took)));
  for (size_t i = 0; i < group.infos.size(); ++i) {
    const v1::Member& member = group.infos[i].members(static_cast<int>(i));
    PrintLine(absl::StrFormat("  rank %d  slot %d  %s", i, member.slot(), member.address()));
  }
}

}  // namespace

absl::StatusOr<int> RunUp(const Args& args) {
  TargetFlags target;
  GroupFlags group_flags;
  std::string group_id;
  FlagSet flags("up", "forms the group and creates the layers of the group file");
  target.AddTo(&flags);
  flags.Add("group_id", "name of the group; empty: the file's, or \"default\"", &group_id);
  group_flags.AddTo(&flags);
  RETURN_IF_ERROR(flags.Parse(args));
  ASSIGN_OR_RETURN(const v1::GroupFile file, target.Read(TargetFlags::Need::kHosts));

  client::UpRequest request;
  request.group_id = !group_id.empty() ? group_id : file.group_id();
  if (request.group_id.empty()) request.group_id = "default";
  request.hosts = Hosts(file);
  ASSIGN_OR_RETURN(request.config, group_flags.Merge(file.config()));
  request.claimant = client::MakeClaimant();
  const absl::Time start = absl::Now();
  ASSIGN_OR_RETURN(const client::Group group, client::Up(request, target.Options()));
  const absl::Duration took = absl::Now() - start;
  if (!target.json) PrintGroup(group, took);

  client::StepDriver driver(group, {.stop = StopFlag()});
  for (const v1::GroupFile::Layer& layer : file.layers()) {
    ASSIGN_OR_RETURN(const v1::LayerInfo info,
                     EnsureLayer(layer.layer_id(), layer.config(), layer.seed(), &driver));
    if (target.json) continue;
    PrintLine(
        absl::StrFormat("  layer %s  weights version %d", info.layer_id(), info.weights_version()));
  }
  if (target.json) {
    ASSIGN_OR_RETURN(const auto layers, client::ReadLayers(group, target.Options()));
    PrintLine(client::DescribeJson(group, layers));
  }
  return kExitOk;
}

absl::StatusOr<int> RunDown(const Args& args) {
  TargetFlags target;
  FlagSet flags("down", "leaves the group on every daemon; layers and weights stay");
  target.AddTo(&flags);
  RETURN_IF_ERROR(flags.Parse(args));
  ASSIGN_OR_RETURN(const v1::GroupFile file, target.Read(TargetFlags::Need::kHosts));
  RETURN_IF_ERROR(client::Down(Hosts(file), target.QuickOptions()));
  PrintLine(target.json ? "{\"down\":true}"
                        : StrCat(file.hosts_size(), " daemons are in no group"));
  return kExitOk;
}

absl::StatusOr<int> RunDrain(const Args& args) {
  TargetFlags target;
  bool resume = false;
  FlagSet flags("drain", "lets every daemon finish what is queued and take no new work");
  target.AddTo(&flags);
  flags.Add("resume", "take work again", &resume);
  RETURN_IF_ERROR(flags.Parse(args));
  ASSIGN_OR_RETURN(const v1::GroupFile file, target.Read(TargetFlags::Need::kHosts));
  const auto mode = resume ? client::DrainMode::kResume : client::DrainMode::kDrain;
  RETURN_IF_ERROR(client::Drain(Hosts(file), mode, target.QuickOptions()));
  const char* word = resume ? "resumed" : "drained";
  PrintLine(target.json ? StrCat("{\"", word, "\":true}")
                        : StrCat(file.hosts_size(), " daemons ", word));
  return kExitOk;
}

}  // namespace expertd::expertctl
