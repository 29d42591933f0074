// Assembling reports.
#include "client/cpp/report.h"

#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/json.h"
#include "client/cpp/tensor.h"

namespace expertd::client {
namespace {

template <typename Repeated>
std::string Numbers(const Repeated& values) {
  return JsonArray(std::vector<int64_t>(values.begin(), values.end()));
}

std::string ShardJson(const v1::RankShard& shard) {
  JsonObject json;
  json.Add("rank", shard.rank())
      .Add("slot", shard.slot())
      .Add("host", shard.host())
      .Add("device", shard.device())
      .AddRaw("offsets", Numbers(shard.slice().offsets()))
      .AddRaw("sizes", Numbers(shard.slice().sizes()))
      .AddRaw("expert_ids", Numbers(shard.expert_ids()));
  return json.Text();
}

std::string LayerJson(const LayerReport& report) {
  std::vector<std::string> ranks;
  for (const v1::LayerInfo& info : report.ranks) ranks.push_back(ToJson(info));
  JsonObject json;
  json.Add("layer_id", report.ranks.empty() ? "" : report.ranks.front().layer_id())
      .AddRaw("ranks", JsonArray(ranks))
      .AddRaw("sharding", ShardingJson(report.sharding));
  return json.Text();
}

}  // namespace

std::string SpecJson(const v1::TensorSharding& tensor) {
  std::vector<std::string> dimensions;
  for (const v1::DimensionSpec& dimension : tensor.spec()) {
    std::vector<std::string> axes;
    for (const std::string& axis : dimension.axes()) axes.push_back(JsonString(axis));
    if (axes.empty()) {
      dimensions.push_back("null");
    } else {
      dimensions.push_back(axes.size() == 1 ? axes.front() : JsonArray(axes));
    }
  }
  return JsonArray(dimensions);
}

std::string ShardingJson(const v1::GetShardingMetadataResponse& sharding) {
  JsonObject mesh;
  for (const v1::MeshAxis& axis : sharding.mesh()) mesh.Add(axis.name(), axis.size());
  std::vector<std::string> tensors;
  for (const v1::TensorSharding& tensor : sharding.tensors()) {
    std::vector<std::string> shards;
    for (const v1::RankShard& shard : tensor.shards()) shards.push_back(ShardJson(shard));
    JsonObject json;
    json.Add("name", tensor.name())
        .AddRaw("global_shape", Numbers(tensor.global_shape()))
        .Add("dtype", DTypeName(tensor.dtype()))
        .AddRaw("spec", SpecJson(tensor))
        .AddRaw("shards", JsonArray(shards));
    tensors.push_back(json.Text());
  }
  JsonObject json;
  json.Add("layer_id", sharding.layer_id())
      .Add("group_id", sharding.group_id())
      .Add("epoch", sharding.epoch())
      .AddRaw("mesh", mesh.Text())
      .AddRaw("tensors", JsonArray(tensors));
  return json.Text();
}

std::string DescribeJson(const Group& group, const std::vector<LayerReport>& layers) {
  std::vector<std::string> ranks;
  for (const v1::GroupInfo& info : group.infos) ranks.push_back(ToJson(info));
  std::vector<std::string> layer_texts;
  for (const LayerReport& layer : layers) layer_texts.push_back(LayerJson(layer));
  JsonObject json;
  json.Add("group_id", group.id())
      .Add("epoch", group.epoch())
      .Add("world", group.world())
      .AddRaw("ranks", JsonArray(ranks))
      .AddRaw("layers", JsonArray(layer_texts));
  return json.Text();
}

std::string HostJson(const HostReport& report) {
  JsonObject json;
  json.Add("host", report.host).Add("reachable", report.status.ok());
  if (!report.status.ok()) return json.Add("error", report.status.message()).Text();
  json.AddRaw("info", ToJson(report.info)).AddRaw("group", ToJson(report.group));
  return json.Text();
}

absl::StatusOr<std::vector<LayerReport>> ReadLayers(const Group& group,
                                                    const CallOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<v1::ListLayersResponse> lists,
                   AskAll(group.clients(), v1::ListLayersRequest(), options));
  std::vector<LayerReport> reports;
  for (const v1::LayerInfo& first : lists.front().layers()) {
    LayerReport report;
    for (const v1::ListLayersResponse& list : lists) {
      for (const v1::LayerInfo& info : list.layers()) {
        if (info.layer_id() == first.layer_id()) report.ranks.push_back(info);
      }
    }
    v1::GetShardingMetadataRequest request;
    request.set_layer_id(first.layer_id());
    ASSIGN_OR_RETURN(report.sharding, group.ranks.front()->Call(request, options));
    reports.push_back(std::move(report));
  }
  return reports;
}

}  // namespace expertd::client
