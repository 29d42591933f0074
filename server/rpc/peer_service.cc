// Both methods only put the record where the engine's threads find it.
#include "server/rpc/peer_service.h"

#include "server/rpc/convert_group.h"
#include "server/rpc/unary_call.h"

namespace expertd::rpc {

grpc::ServerUnaryReactor* PeerService::Deliver(grpc::CallbackServerContext* context,
                                               const v1::DeliverRequest* request,
                                               v1::DeliverResponse*) {
  return AnswerNow(context, engine_.OnPeerRecord(FromProto(*request)));
}

grpc::ServerUnaryReactor* PeerService::Close(grpc::CallbackServerContext* context,
                                             const v1::CloseRequest* request, v1::CloseResponse*) {
  return AnswerNow(context, engine_.OnPeerClose(FromProto(*request)));
}

}  // namespace expertd::rpc
