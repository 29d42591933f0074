// Runs a short job on one of gRPC's own threads, now or a little later.
#ifndef SERVER_RPC_RUN_SOON_H_
#define SERVER_RPC_RUN_SOON_H_

#include <functional>

namespace expertd::rpc {

// Takes work that is too long for the engine's threads (copying and serializing tensors) off them.
// The job must not block.
void RunSoon(std::function<void()> job);

}  // namespace expertd::rpc

#endif  // SERVER_RPC_RUN_SOON_H_
