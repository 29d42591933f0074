// Runs a short job at once on a thread that is neither the caller's nor the device's.
#ifndef SERVER_RPC_RUN_SOON_H_
#define SERVER_RPC_RUN_SOON_H_

#include <functional>

namespace expertd::rpc {

// Takes work that is too long for the engine's threads (copying and serializing tensors) off them.
// The job must not block. Jobs run in the order they came, several at a time.
void RunSoon(std::function<void()> job);

}  // namespace expertd::rpc

#endif  // SERVER_RPC_RUN_SOON_H_
