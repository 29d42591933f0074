// A counter that can be waited for.
#include "server/rpc/gate.h"

namespace expertd::rpc {

void Gate::Enter() {
  MutexLock lock(mutex_);
  ++inside_;
}

void Gate::Leave() {
  MutexLock lock(mutex_);
  --inside_;
  changed_.NotifyAll();
}

bool Gate::WaitUntilEmpty(SteadyTime deadline) {
  MutexLock lock(mutex_);
  while (inside_ > 0 && Clock::Real().Now() < deadline) changed_.WaitUntil(mutex_, deadline);
  return inside_ == 0;
}

}  // namespace expertd::rpc
