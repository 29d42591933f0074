// Sharding metadata and declared specs between proto and engine structs.
#ifndef SERVER_RPC_CONVERT_SHARDING_H_
#define SERVER_RPC_CONVERT_SHARDING_H_

#include <cstdint>
#include <vector>

#include "expertd/v1/layer_service.pb.h"
#include "expertd/v1/types.pb.h"
#include "server/engine/sharding.h"

namespace expertd::rpc {

void ToProto(const engine::ShardingMetadata& metadata, v1::GetShardingMetadataResponse* out);

std::vector<engine::DeclaredSharding> FromProto(const v1::CheckShardingRequest& request);

void FillSlice(const std::vector<int64_t>& offsets, const std::vector<int64_t>& sizes,
               v1::Slice* out);

}  // namespace expertd::rpc

#endif  // SERVER_RPC_CONVERT_SHARDING_H_
