// The one thread that owns the device, its streams and the communicator.
#ifndef SERVER_ENGINE_DEVICE_THREAD_H_
#define SERVER_ENGINE_DEVICE_THREAD_H_

#include <atomic>
#include <deque>
#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace expertd::engine {

// Runs posted tasks one at a time in the order posted. Thread-safe.
class DeviceThread {
 public:
  using Task = std::function<void()>;

  DeviceThread();
  // Runs what is queued, then ends the thread.
  ~DeviceThread();

  // `urgent` tasks go before those that wait, in their own order.
  void Post(Task task);
  void PostUrgent(Task task);

  // How long the running task has been running; zero when idle. For the watchdog.
  Duration RunningFor(SteadyTime now) const;

 private:
  void Loop();

  Mutex mutex_;
  CondVar changed_;
  std::deque<Task> urgent_ ABSL_GUARDED_BY(mutex_);
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<SteadyTime::rep> running_since_{0};
  std::thread thread_;  // last: uses the members above
};

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_DEVICE_THREAD_H_
