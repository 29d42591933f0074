// plan: what a config needs, without any daemon.
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/memory_plan.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/channel.h"
#include "client/cpp/group_config_file.h"
#include "client/cpp/json.h"
#include "client/expertctl/common.h"
#include "client/expertctl/config_flags.h"
#include "client/expertctl/verbs.h"

namespace expertd::expertctl {
namespace {

using Sizes = std::map<std::string, int64_t>;

std::string SizesJson(const Sizes& sizes) {
  client::JsonObject json;
  for (const auto& [name, value] : sizes) json.Add(name, value);
  return json.Text();
}

void PrintSizes(const std::string& title, const Sizes& sizes) {
  PrintLine(title);
  for (const auto& [name, value] : sizes) {
    const bool rows = name == "recv_rows";
    PrintLine(absl::StrFormat("  %-20s %16d%s", name, value,
                              rows ? " rows" : StrCat("  (", HumanBytes(value), ")")));
  }
}

}  // namespace

absl::StatusOr<int> RunPlan(const Args& args) {
  TargetFlags target;
  GroupFlags group_flags;
  LayerFlags layer_flags;
  int64_t world = 0;
  FlagSet flags("plan", "memory of one rank and message sizes of a config, in bytes");
  target.AddTo(&flags);
  flags.Add("world", "ranks; 0: the number of hosts, or 1", &world);
  group_flags.AddTo(&flags);
  layer_flags.AddTo(&flags);
  RETURN_IF_ERROR(flags.Parse(args));
  ASSIGN_OR_RETURN(v1::GroupFile file, target.Read(TargetFlags::Need::kNoHosts));
  ASSIGN_OR_RETURN(const v1::GroupConfig config, group_flags.Merge(file.config()));
  if (file.layers().empty()) {
    v1::GroupFile::Layer* layer = file.add_layers();
    layer->set_layer_id("from flags");
    ASSIGN_OR_RETURN(*layer->mutable_config(), layer_flags.Make());
  }
  const int64_t hosts = world > 0 ? world : std::max(1, file.hosts_size());
  const GroupSizes group = client::SizesOf(config, hosts);
  ASSIGN_OR_RETURN(Sizes sizes, PlanGroup(group));
  ASSIGN_OR_RETURN(const int64_t message, MaxMessageBytes(group));
  sizes["message_limit"] = client::MessageLimit(message);

  client::JsonObject layers_json;
  if (!target.json) PrintSizes(StrCat("group of ", group.ranks, " ranks, per rank:"), sizes);
  for (const v1::GroupFile::Layer& layer : file.layers()) {
    ASSIGN_OR_RETURN(const Sizes layer_sizes, PlanLayer(group, client::SizesOf(layer.config())));
    layers_json.AddRaw(layer.layer_id(), SizesJson(layer_sizes));
    if (!target.json) PrintSizes(StrCat("layer ", layer.layer_id(), ", per rank:"), layer_sizes);
  }
  if (target.json) {
    client::JsonObject json;
    json.Add("ranks", group.ranks)
        .AddRaw("group", SizesJson(sizes))
        .AddRaw("layers", layers_json.Text());
    PrintLine(json.Text());
  }
  return kExitOk;
}

}  // namespace expertd::expertctl
