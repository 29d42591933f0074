// top: the experts' load, polled.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/json.h"
#include "client/expertctl/common.h"
#include "client/expertctl/verbs.h"

namespace expertd::expertctl {
namespace {

// One layer's routes per expert over all ranks since it was created.
struct Load {
  std::vector<int64_t> routes;
  int64_t dropped = 0;
  int64_t forwards = 0;
};

absl::StatusOr<Load> ReadLoad(const client::Group& group, const std::string& layer_id,
                              const client::CallOptions& options) {
  v1::GetExpertLoadRequest request;
  request.set_layer_id(layer_id);
  ASSIGN_OR_RETURN(const std::vector<v1::GetExpertLoadResponse> responses,
                   client::AskAll(group.clients(), request, options));
  Load load;
  for (const v1::GetExpertLoadResponse& response : responses) {
    load.routes.insert(load.routes.end(), response.routes().begin(), response.routes().end());
    for (int64_t dropped : response.routes_dropped()) load.dropped += dropped;
    load.forwards = std::max(load.forwards, response.forwards());
  }
  return load;
}

std::string LoadJson(const std::string& layer_id, const Load& load, uint64_t next_sequence) {
  client::JsonObject json;
  json.Add("layer_id", layer_id)
      .Add("next_sequence", next_sequence)
      .Add("forwards", load.forwards)
      .Add("routes_dropped", load.dropped)
      .AddRaw("routes", client::JsonArray(load.routes));
  return json.Text();
}

// Since the last reading: forwards, and each expert's share of the fullest one.
std::string LoadLine(const std::string& layer_id, const Load& now, const Load& before) {
  std::string line = absl::StrFormat("%-16s forwards +%d  dropped +%d  routes", layer_id,
                                     now.forwards - before.forwards, now.dropped - before.dropped);
  for (size_t e = 0; e < now.routes.size(); ++e) {
    const int64_t old = e < before.routes.size() ? before.routes[e] : 0;
    StrAppend(&line, " ", now.routes[e] - old);
  }
  return line;
}

}  // namespace

absl::StatusOr<int> RunTop(const Args& args) {
  TargetFlags target;
  double interval = 2;
  int64_t count = 0;
  FlagSet flags("top", "prints each layer's load per expert, as the change since the last line");
  target.AddTo(&flags);
  flags.Add("interval", "seconds between readings", &interval);
  flags.Add("count", "readings; 0: until Ctrl-C", &count);
  RETURN_IF_ERROR(flags.Parse(args));
  if (!(interval > 0)) return UsageError("--interval: need more than 0");
  ASSIGN_OR_RETURN(const Session session, OpenSession(target));
  std::map<std::string, Load> last;
  for (int64_t i = 0; !StopFlag()->load(); ++i) {
    ASSIGN_OR_RETURN(
        const v1::DescribeGroupResponse described,
        session.group.ranks.front()->Call(v1::DescribeGroupRequest(), target.QuickOptions()));
    ASSIGN_OR_RETURN(
        const v1::ListLayersResponse layers,
        session.group.ranks.front()->Call(v1::ListLayersRequest(), target.QuickOptions()));
    for (const v1::LayerInfo& layer : layers.layers()) {
      ASSIGN_OR_RETURN(const Load load,
                       ReadLoad(session.group, layer.layer_id(), target.QuickOptions()));
      PrintLine(target.json ? LoadJson(layer.layer_id(), load, described.group().next_sequence())
                            : LoadLine(layer.layer_id(), load, last[layer.layer_id()]));
      last[layer.layer_id()] = load;
    }
    if (count > 0 && i + 1 >= count) break;
    const absl::Time next = absl::Now() + absl::Seconds(interval);
    while (absl::Now() < next && !StopFlag()->load()) absl::SleepFor(absl::Milliseconds(50));
  }
  return kExitOk;
}

}  // namespace expertd::expertctl
