// What tools say about a group, its layers and where every shard lives, as JSON.
#ifndef CLIENT_CPP_REPORT_H_
#define CLIENT_CPP_REPORT_H_

#include <string>
#include <vector>

#include "client/cpp/group_controller.h"
#include "expertd/v1/layer_service.pb.h"

namespace expertd::client {

// A partition spec as callers write it: null, "ep", or ["dp","ep"] per dimension.
std::string SpecJson(const v1::TensorSharding& tensor);

// Mesh, and per tensor its global shape, dtype, spec and shards; 64-bit integers as numbers.
std::string ShardingJson(const v1::GetShardingMetadataResponse& sharding);

// One layer as its ranks see it, and where it lives.
struct LayerReport {
  std::vector<v1::LayerInfo> ranks;  // In rank order.
  v1::GetShardingMetadataResponse sharding;
};

// {"group_id", "epoch", "world", "ranks": [...], "layers": [...]}.
std::string DescribeJson(const Group& group, const std::vector<LayerReport>& layers);

// {"host", "reachable", "error"?, "info"?, "group"?}.
std::string HostJson(const HostReport& report);

// Asks every rank for its layers and any rank for their sharding. Errors: of those calls.
absl::StatusOr<std::vector<LayerReport>> ReadLayers(const Group& group, const CallOptions& options);

}  // namespace expertd::client

#endif  // CLIENT_CPP_REPORT_H_
