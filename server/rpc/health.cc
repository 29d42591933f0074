// A chain of long polls on the engine's group, each of which refreshes the health names.
#include "server/rpc/health.h"

#include <chrono>

#include "server/rpc/run_soon.h"

namespace expertd::rpc {
namespace {

constexpr char kControlName[] = "expertd.v1.ControlService";
// Only bounds how long a watch may outlive Stop; changes are seen at once.
constexpr std::chrono::seconds kWatchTime{5};

}  // namespace

void HealthMonitor::Start() {
  Refresh();
  Watch();
}

void HealthMonitor::Refresh() {
  MutexLock lock(mutex_);
  RefreshLocked();
}

void HealthMonitor::RefreshLocked() {
  if (stopped_) return;
  const bool serving = !engine_.Draining();
  health_.SetServingStatus("", serving);
  health_.SetServingStatus(kControlName, serving);
  health_.SetServingStatus(kGroupHealthName,
                           engine_.DescribeGroup().state == engine::GroupState::kReady);
}

void HealthMonitor::Stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  while (in_engine_) left_engine_.Wait(mutex_);
  health_.SetServingStatus(false);
}

void HealthMonitor::Watch() {
  {
    MutexLock lock(mutex_);
    if (stopped_) return;
    RefreshLocked();
    in_engine_ = true;
  }
  // The version is read before the watch: a change in between ends the watch at once, and the next
  // round sees it.
  const uint64_t version = engine_.DescribeGroup().version;
  engine_.WatchGroup(version, Clock::Real().Now() + kWatchTime,
                     [self = shared_from_this()](const engine::GroupInfo&) {
                       RunSoon([self] { self->Watch(); });
                     });
  MutexLock lock(mutex_);
  in_engine_ = false;
  left_engine_.NotifyAll();
}

}  // namespace expertd::rpc
