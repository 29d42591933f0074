// save, load: checkpoints of one layer.
#include <string>

#include "base/status_macros.h"
#include "base/strings.h"
#include "client/expertctl/common.h"
#include "client/expertctl/verbs.h"

namespace expertd::expertctl {
namespace {

template <typename Request>
absl::StatusOr<int> RunCheckpoint(const char* verb, const char* summary, const Args& args) {
  TargetFlags target;
  std::string layer;
  std::string path;
  FlagSet flags(verb, summary);
  target.AddTo(&flags);
  flags.Add("layer", "id of the layer", &layer);
  flags.Add("path", "of the checkpoint, as the daemons see it", &path);
  RETURN_IF_ERROR(flags.Parse(args));
  if (layer.empty() || path.empty()) return UsageError("need --layer and --path");
  ASSIGN_OR_RETURN(const Session session, OpenSession(target));
  Request request;
  request.set_layer_id(layer);
  request.set_path(path);
  ASSIGN_OR_RETURN(const auto responses, session.driver->RunSame(request));
  const uint64_t version = responses.front().weights_version();
  PrintLine(target.json ? StrCat("{\"weights_version\":", version, "}")
                        : StrCat("layer ", layer, ": weights version ", version));
  return kExitOk;
}

}  // namespace

absl::StatusOr<int> RunSave(const Args& args) {
  return RunCheckpoint<v1::SaveWeightsRequest>("save", "saves a layer's weights", args);
}

absl::StatusOr<int> RunLoad(const Args& args) {
  return RunCheckpoint<v1::LoadWeightsRequest>("load", "loads a layer's weights", args);
}

}  // namespace expertd::expertctl
