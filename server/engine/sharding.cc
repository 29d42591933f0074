// Sharding metadata and its comparison with what a caller declares.
#include "server/engine/sharding.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd::engine {
namespace {

std::string ShapeText(const std::vector<int64_t>& shape) {
  return StrCat("[", absl::StrJoin(shape, ","), "]");
}

// Puts the shards of all ranks together.
class Describer {
 public:
  Describer(const LayerConfig& layer, const GroupConfig& group,
            const std::vector<RankPlace>& places)
      : layer_(layer), world_(group.world()), places_(places) {}

  // [E, rest...], split over ep.
  TensorSharding Experts(std::string name, std::vector<int64_t> rest, DType dtype) const {
    TensorSharding tensor;
    tensor.name = std::move(name);
    tensor.global_shape = std::move(rest);
    tensor.global_shape.insert(tensor.global_shape.begin(), layer_.expert_count);
    tensor.dtype = dtype;
    tensor.spec.resize(tensor.global_shape.size());
    tensor.spec[0] = {"ep"};
    const int64_t local = layer_.expert_count / world_;
    for (int64_t rank = 0; rank < world_; ++rank) {
      RankShard shard = Whole(tensor, rank);
      shard.offsets[0] = rank * local;
      shard.sizes[0] = local;
      shard.expert_ids.resize(static_cast<size_t>(local));
      std::iota(shard.expert_ids.begin(), shard.expert_ids.end(), rank * local);
      tensor.shards.push_back(std::move(shard));
    }
    return tensor;
  }

  // The same on every rank.
  TensorSharding Replicated(std::string name, std::vector<int64_t> shape, DType dtype) const {
    TensorSharding tensor;
    tensor.name = std::move(name);
    tensor.global_shape = std::move(shape);
    tensor.dtype = dtype;
    tensor.spec.resize(tensor.global_shape.size());
    for (int64_t rank = 0; rank < world_; ++rank) tensor.shards.push_back(Whole(tensor, rank));
    return tensor;
  }

  // [tokens of all ranks, H], split over dp and ep.
  TensorSharding Activations(std::string name, const std::vector<int64_t>& tokens) const {
    TensorSharding tensor;
    tensor.name = std::move(name);
    tensor.global_shape = {std::accumulate(tokens.begin(), tokens.end(), int64_t{0}),
                           layer_.hidden};
    tensor.dtype = layer_.token_dtype;
    tensor.spec = {{"dp", "ep"}, {}};
    int64_t offset = 0;
    for (int64_t rank = 0; rank < world_; ++rank) {
      RankShard shard = Whole(tensor, rank);
      shard.offsets[0] = offset;
      shard.sizes[0] = tokens[static_cast<size_t>(rank)];
      offset += shard.sizes[0];
      tensor.shards.push_back(std::move(shard));
    }
    return tensor;
  }

 private:
  RankShard Whole(const TensorSharding& tensor, int64_t rank) const {
    RankShard shard;
    shard.rank = rank;
    shard.offsets.assign(tensor.global_shape.size(), 0);
    shard.sizes = tensor.global_shape;
    const RankPlace& place = places_[static_cast<size_t>(rank)];
    shard.slot = place.slot;
    shard.host = place.host;
    shard.device = place.device;
    return shard;
  }

  const LayerConfig& layer_;
  const int64_t world_;
  const std::vector<RankPlace>& places_;
};

absl::StatusOr<std::vector<int64_t>> TokenCounts(const GroupConfig& group,
                                                 const std::vector<int64_t>& given) {
  const auto world = static_cast<size_t>(group.world());
  if (given.empty()) return std::vector<int64_t>(world, group.max_tokens_per_rank);
  Violations violations;
  if (given.size() != world) {
    violations.Add(Reason::kConfigInvalid, "tokens_per_rank",
                   StrCat("got ", given.size(), " counts, need one per rank: ", world));
  }
  for (size_t rank = 0; rank < given.size(); ++rank) {
    if (given[rank] >= 0 && given[rank] <= group.max_tokens_per_rank) continue;
    violations.Add(Reason::kConfigInvalid, StrCat("tokens_per_rank[", rank, "]"),
                   StrCat("got ", given[rank], ", need 0..", group.max_tokens_per_rank));
  }
  RETURN_IF_ERROR(violations.ToStatus("sharding"));
  return given;
}

std::string DeclaredText(const std::vector<int64_t>& shape, const PartitionSpec& spec) {
  return StrCat("shape ", ShapeText(shape), " spec ", SpecText(spec));
}

}  // namespace

std::string SpecText(const PartitionSpec& spec) {
  std::vector<std::string> dimensions;
  for (const DimensionSpec& dimension : spec) {
    dimensions.push_back(dimension.empty() ? "-" : absl::StrJoin(dimension, "*"));
  }
  return StrCat("[", absl::StrJoin(dimensions, ", "), "]");
}

absl::StatusOr<ShardingMetadata> DescribeSharding(const std::string& layer_id,
                                                  const LayerConfig& layer,
                                                  const GroupConfig& group,
                                                  const std::vector<RankPlace>& places,
                                                  const std::vector<int64_t>& tokens_per_rank) {
  ASSIGN_OR_RETURN(const std::vector<int64_t> tokens, TokenCounts(group, tokens_per_rank));
  const Describer describer(layer, group, places);
  ShardingMetadata metadata;
  metadata.layer_id = layer_id;
  metadata.mesh = {{"dp", group.dp_size}, {"ep", group.ep_size}};
  std::vector<TensorSharding>& tensors = metadata.tensors;
  tensors.push_back(
      describer.Experts("gate_up", {layer.hidden, 2 * layer.intermediate}, layer.weight_dtype));
  tensors.push_back(
      describer.Experts("down", {layer.intermediate, layer.hidden}, layer.weight_dtype));
  if (layer.gate_up_bias) {
    tensors.push_back(describer.Experts("gate_up_bias", {2 * layer.intermediate}, DType::kF32));
  }
  if (layer.down_bias) {
    tensors.push_back(describer.Experts("down_bias", {layer.hidden}, DType::kF32));
  }
  if (layer.router_on_server) {
    tensors.push_back(
        describer.Replicated("router", {layer.hidden, layer.expert_count}, DType::kF32));
    if (layer.router.selection_bias) {
      tensors.push_back(describer.Replicated("router_bias", {layer.expert_count}, DType::kF32));
    }
  }
  tensors.push_back(describer.Activations("tokens", tokens));
  tensors.push_back(describer.Activations("output", tokens));
  return metadata;
}

absl::Status CheckSharding(const ShardingMetadata& actual,
                           const std::vector<DeclaredSharding>& declared) {
  Violations violations;
  for (const TensorSharding& tensor : actual.tensors) {
    const std::string need = DeclaredText(tensor.global_shape, tensor.spec);
    const auto same_name = [&](const DeclaredSharding& d) { return d.name == tensor.name; };
    const auto count = std::count_if(declared.begin(), declared.end(), same_name);
    if (count != 1) {
      violations.Add(
          Reason::kShardingMismatch, tensor.name,
          StrCat("got ", count == 0 ? "no spec" : "more than one spec", ", need ", need));
      continue;
    }
    const DeclaredSharding& got = *std::find_if(declared.begin(), declared.end(), same_name);
    if (got.global_shape != tensor.global_shape || got.spec != tensor.spec) {
      violations.Add(Reason::kShardingMismatch, tensor.name,
                     StrCat("got ", DeclaredText(got.global_shape, got.spec), ", need ", need));
    }
  }
  for (const DeclaredSharding& got : declared) {
    const bool known =
        std::any_of(actual.tensors.begin(), actual.tensors.end(),
                    [&](const TensorSharding& tensor) { return tensor.name == got.name; });
    if (!known) {
      violations.Add(Reason::kShardingMismatch, got.name.empty() ? "(unnamed)" : got.name,
                     StrCat("got ", DeclaredText(got.global_shape, got.spec),
                            ", need no such tensor in this layer"));
    }
  }
  return violations.ToStatus("sharding");
}

}  // namespace expertd::engine
