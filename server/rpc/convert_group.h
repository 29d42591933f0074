// Group lifecycle messages and facts about the daemon between proto and engine structs.
#ifndef SERVER_RPC_CONVERT_GROUP_H_
#define SERVER_RPC_CONVERT_GROUP_H_

#include "absl/status/statusor.h"
#include "expertd/v1/control_service.pb.h"
#include "expertd/v1/peer_service.pb.h"
#include "server/engine/engine.h"
#include "server/engine/peer_transport.h"

namespace expertd::rpc {

// Errors: CONFIG_INVALID with everything that is missing or unknown. The deadline is not set.
absl::StatusOr<engine::JoinRequest> FromProto(const v1::JoinGroupRequest& request);

void ToProto(const engine::GroupInfo& group, v1::GroupInfo* out);
void ToProto(const DeviceFacts& device, v1::DeviceInfo* out);
void ToProto(const Support& support, v1::Support* out);
// Everything of GetServerInfo that the engine knows.
void ToProto(const engine::ServerFacts& facts, v1::GetServerInfoResponse* out);

engine::PeerRecord FromProto(const v1::DeliverRequest& request);
// The record's stage is "close" and its bytes are the reason.
engine::PeerRecord FromProto(const v1::CloseRequest& request);
void ToProto(const engine::PeerRecord& record, v1::DeliverRequest* out);
void ToProto(const engine::PeerRecord& record, v1::CloseRequest* out);

}  // namespace expertd::rpc

#endif  // SERVER_RPC_CONVERT_GROUP_H_
