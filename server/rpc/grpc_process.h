// gRPC's process-wide state, set up once and never torn down.
#ifndef SERVER_RPC_GRPC_PROCESS_H_
#define SERVER_RPC_GRPC_PROCESS_H_

namespace expertd::rpc {

// Turns on the default health service, reflection and channelz for the servers that are built from
// here on, and keeps gRPC's library initialised until the process ends: when its last object goes,
// it would otherwise wait up to 10 seconds for its own poller after large messages. Thread-safe.
void InitGrpcOnce();

}  // namespace expertd::rpc

#endif  // SERVER_RPC_GRPC_PROCESS_H_
