// Layer helpers of the verbs.
#include "client/expertctl/layers.h"

#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/ids.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd::expertctl {
namespace {

constexpr absl::Duration kDeleteTimeout = absl::Seconds(30);

}  // namespace

absl::StatusOr<v1::LayerInfo> EnsureLayer(const std::string& layer_id,
                                          const v1::LayerConfig& config, uint64_t seed,
                                          client::StepDriver* driver) {
  v1::CreateLayerRequest create;
  create.set_layer_id(layer_id);
  *create.mutable_config() = config;
  ASSIGN_OR_RETURN(std::vector<v1::CreateLayerResponse> created, driver->RunSame(create));
  v1::LayerInfo info = std::move(*created.front().mutable_layer());
  for (const v1::CreateLayerResponse& one : created) {
    if (one.layer().state() != v1::LAYER_STATE_NEEDS_RESTORE) continue;
    return Error(Reason::kLayerNeedsRestore)
        .Text("layer ", layer_id, " cannot be used: ", one.layer().reason(),
              "; delete it or start all daemons afresh")
        .With("layer_id", layer_id);
  }
  if (info.weights_version() != 0) return info;
  v1::InitializeWeightsRequest initialize;
  initialize.set_layer_id(layer_id);
  initialize.set_seed(seed);
  ASSIGN_OR_RETURN(const std::vector<v1::InitializeWeightsResponse> initialized,
                   driver->RunSame(initialize));
  info.set_weights_version(initialized.front().weights_version());
  info.set_state(v1::LAYER_STATE_READY);
  return info;
}

absl::Status DeleteLayer(const std::string& layer_id, client::StepDriver* driver) {
  v1::DeleteLayerRequest request;
  request.set_layer_id(layer_id);
  return driver->RunSame(request).status();
}

absl::StatusOr<v1::LayerInfo> FindLayer(const client::Group& group, const std::string& layer_id,
                                        const client::CallOptions& options) {
  ASSIGN_OR_RETURN(const v1::ListLayersResponse list,
                   group.ranks.front()->Call(v1::ListLayersRequest(), options));
  std::vector<std::string> ids;
  for (const v1::LayerInfo& layer : list.layers()) {
    const bool only = layer_id.empty() && list.layers_size() == 1;
    if (only || layer.layer_id() == layer_id) return layer;
    ids.push_back(layer.layer_id());
  }
  return Error(Reason::kLayerUnknown)
      .Text("layer: got \"", layer_id, "\", need one of: ", absl::StrJoin(ids, ", "));
}

absl::Status WithTemporaryLayer(const std::string& prefix, const v1::LayerConfig& config,
                                const Session& session,
                                const std::function<absl::Status(const v1::LayerInfo&)>& body) {
  constexpr uint64_t kSeed = 1;
  const std::string id = StrCat(prefix, "-", Hex(RandomId()));
  const absl::StatusOr<v1::LayerInfo> info = EnsureLayer(id, config, kSeed, session.driver.get());
  absl::Status result = info.ok() ? body(*info) : info.status();
  // A driver of its own: a stop flag that is set must not keep the layer alive.
  client::StepDriver cleaner(session.group, {.timeout = kDeleteTimeout});
  cleaner.Distrust();
  absl::Status deleted = DeleteLayer(id, &cleaner);
  session.driver->Distrust();
  if (HasReason(deleted, Reason::kLayerUnknown)) deleted = absl::OkStatus();  // Never created.
  if (result.ok()) return deleted;
  return result;
}

}  // namespace expertd::expertctl
