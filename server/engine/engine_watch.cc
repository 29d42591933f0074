// The engine's watchdog: deadlines of waiting and running operations, watchers, a stuck device
// thread.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/strings.h"
#include "server/engine/engine_impl.h"

namespace expertd::engine {
namespace {

constexpr std::chrono::milliseconds kWatchdogPeriod{20};
// An operation ends its waits by itself and names who is missing; the watchdog comes after that.
constexpr std::chrono::milliseconds kWatchdogGrace{100};
// A device thread that is busy this much longer than an operation's limit will not come back.
constexpr std::chrono::seconds kStuckGrace{60};

absl::Status Gap(uint64_t sequence, uint64_t next) {
  return Error(Reason::kSequenceGap)
      .Text("sequence ", sequence, " waited for sequence ", next, ", which did not come in time")
      .With("sequence", sequence)
      .With("next_sequence", next);
}

}  // namespace

void EngineImpl::Watch() {
  while (true) {
    {
      MutexLock lock(mutex_);
      if (stopping_) return;
    }
    WatchOnce(Clock::Real().Now());
    std::this_thread::sleep_for(kWatchdogPeriod);
  }
}

void EngineImpl::WatchOnce(SteadyTime now) {
  Answers answers;
  absl::Status stuck;
  {
    MutexLock lock(mutex_);
    const std::chrono::milliseconds base(std::max<int64_t>(1, group_config_.base_timeout_ms));
    for (auto& [sequence, pending] : pending_) {
      if (pending.callbacks.empty() || (running_ && sequence == book_.next())) continue;
      const SteadyTime limit = std::min(pending.op->deadline, pending.op->submitted + base);
      if (now < limit) continue;
      const bool gap = book_.next() < sequence && !running_;
      AbandonLocked(sequence,
                    gap ? Gap(sequence, book_.next())
                        : Error(Reason::kStepTimeout)
                              .Text("sequence ", sequence, " waited behind sequence ", book_.next(),
                                    " past its deadline")
                              .ToStatus(),
                    answers);
    }
    if (running_ && now - kWatchdogGrace >= running_deadline_) {
      CancelRunningLocked(
          Error(Reason::kStepTimeout)
              .Text("sequence ", book_.next(), " ran past its deadline on rank ", rank_)
              .With("rank", rank_));
      // Once is enough: what follows is the stuck limit.
      running_deadline_ = SteadyTime::max();
    }
    NotifyLocked(answers);  // of changes that nobody else announced, such as an epoch seen
    for (Watcher& watcher : watchers_) {
      if (now < watcher.until) continue;
      answers.push_back([done = std::move(watcher.done), info = DescribeLocked()] { done(info); });
      watcher.done = nullptr;
    }
    std::erase_if(watchers_, [](const Watcher& watcher) { return watcher.done == nullptr; });
    const Duration limit = 3 * base + kStuckGrace;
    if (device_thread_->RunningFor(now) > limit) {
      stuck = Error(Reason::kDeviceFault)
                  .Text("the device thread has been in one task for ",
                        ToSeconds(device_thread_->RunningFor(now)), " s, limit ", ToSeconds(limit),
                        " s");
    }
  }
  for (auto& answer : answers) answer();
  if (!stuck.ok() && options_.on_stuck) options_.on_stuck(stuck);
}

}  // namespace expertd::engine
