// Field by field copies of sharding messages.
#include "server/rpc/convert_sharding.h"

#include "server/rpc/convert_config.h"

namespace expertd::rpc {
namespace {

void ToProto(const engine::RankShard& shard, v1::RankShard* out) {
  out->set_rank(shard.rank);
  FillSlice(shard.offsets, shard.sizes, out->mutable_slice());
  out->set_slot(shard.slot);
  out->set_host(shard.host);
  out->set_device(shard.device);
  out->mutable_expert_ids()->Assign(shard.expert_ids.begin(), shard.expert_ids.end());
}

void ToProto(const engine::TensorSharding& tensor, v1::TensorSharding* out) {
  out->set_name(tensor.name);
  out->mutable_global_shape()->Assign(tensor.global_shape.begin(), tensor.global_shape.end());
  out->set_dtype(rpc::ToProto(tensor.dtype));
  for (const engine::DimensionSpec& dimension : tensor.spec) {
    out->add_spec()->mutable_axes()->Assign(dimension.begin(), dimension.end());
  }
  for (const engine::RankShard& shard : tensor.shards) ToProto(shard, out->add_shards());
}

}  // namespace

void FillSlice(const std::vector<int64_t>& offsets, const std::vector<int64_t>& sizes,
               v1::Slice* out) {
  out->mutable_offsets()->Assign(offsets.begin(), offsets.end());
  out->mutable_sizes()->Assign(sizes.begin(), sizes.end());
}

void ToProto(const engine::ShardingMetadata& metadata, v1::GetShardingMetadataResponse* out) {
  out->set_layer_id(metadata.layer_id);
  out->set_group_id(metadata.group_id);
  out->set_epoch(metadata.epoch);
  for (const engine::MeshAxis& axis : metadata.mesh) {
    v1::MeshAxis* added = out->add_mesh();
    added->set_name(axis.name);
    added->set_size(axis.size);
  }
  for (const engine::TensorSharding& tensor : metadata.tensors) {
    ToProto(tensor, out->add_tensors());
  }
}

std::vector<engine::DeclaredSharding> FromProto(const v1::CheckShardingRequest& request) {
  std::vector<engine::DeclaredSharding> declared;
  for (const v1::DeclaredSharding& tensor : request.tensors()) {
    engine::DeclaredSharding& added = declared.emplace_back();
    added.name = tensor.name();
    added.global_shape.assign(tensor.global_shape().begin(), tensor.global_shape().end());
    for (const v1::DimensionSpec& dimension : tensor.spec()) {
      added.spec.emplace_back(dimension.axes().begin(), dimension.axes().end());
    }
  }
  return declared;
}

}  // namespace expertd::rpc
