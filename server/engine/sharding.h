// Where every parameter and activation lies: mesh, partition specs and per-rank slices. Pure.
#ifndef SERVER_ENGINE_SHARDING_H_
#define SERVER_ENGINE_SHARDING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/types.h"
#include "server/engine/config.h"
#include "server/engine/peer_transport.h"

namespace expertd::engine {

// Axis names one dimension is split over, outermost first; empty: replicated.
using DimensionSpec = std::vector<std::string>;
using PartitionSpec = std::vector<DimensionSpec>;

struct RankShard {
  int64_t rank = 0;
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  int64_t slot = 0;
  std::string host;
  std::string device;
  std::vector<int64_t> expert_ids;  // for tensors split over experts
};

struct TensorSharding {
  std::string name;
  std::vector<int64_t> global_shape;
  DType dtype = DType::kInvalid;
  PartitionSpec spec;
  std::vector<RankShard> shards;  // in rank order
};

struct MeshAxis {
  std::string name;
  int64_t size = 0;
};

struct ShardingMetadata {
  std::string layer_id;
  std::string group_id;
  uint64_t epoch = 0;
  std::vector<MeshAxis> mesh;
  std::vector<TensorSharding> tensors;
};

// Where a rank runs, for the report.
struct RankPlace {
  int64_t slot = 0;
  std::string host;
  std::string device;
};

// tokens_per_rank: one count per rank, or empty for max_tokens_per_rank on each.
// Errors: CONFIG_INVALID when the number of counts is not the world size or one is out of range.
absl::StatusOr<ShardingMetadata> DescribeSharding(const std::string& layer_id,
                                                  const LayerConfig& layer,
                                                  const GroupConfig& group,
                                                  const std::vector<RankPlace>& places,
                                                  const std::vector<int64_t>& tokens_per_rank);

// What a caller says of one tensor.
struct DeclaredSharding {
  std::string name;
  std::vector<int64_t> global_shape;
  PartitionSpec spec;
};

// Errors: SHARDING_MISMATCH listing every tensor that is unknown, undeclared, or differs in shape
// or spec, with both sides.
absl::Status CheckSharding(const ShardingMetadata& actual,
                           const std::vector<DeclaredSharding>& declared);

// "[["ep"], [], []]" in a form people read: [ep, -, -]; ["dp","ep"] is dp*ep.
std::string SpecText(const PartitionSpec& spec);

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_SHARDING_H_
