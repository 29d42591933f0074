// Knows when everything that went in has come out.
#ifndef SERVER_RPC_GATE_H_
#define SERVER_RPC_GATE_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace expertd::rpc {

// Thread-safe.
class Gate {
 public:
  void Enter();
  void Leave();
  // False when some are left at the deadline.
  bool WaitUntilEmpty(SteadyTime deadline);

 private:
  Mutex mutex_;
  CondVar changed_;
  int64_t inside_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_GATE_H_
