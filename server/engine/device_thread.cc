// Task queue and loop of the device thread.
#include "server/engine/device_thread.h"

#include <pthread.h>

#include <utility>

namespace expertd::engine {

DeviceThread::DeviceThread() : thread_([this] { Loop(); }) {
  pthread_setname_np(thread_.native_handle(), "device");
}

DeviceThread::~DeviceThread() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void DeviceThread::Post(Task task) {
  MutexLock lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.NotifyAll();
}

void DeviceThread::PostUrgent(Task task) {
  MutexLock lock(mutex_);
  urgent_.push_back(std::move(task));
  changed_.NotifyAll();
}

Duration DeviceThread::RunningFor(SteadyTime now) const {
  const SteadyTime::rep since = running_since_.load();
  return since == 0 ? Duration::zero() : now - SteadyTime(SteadyTime::duration(since));
}

void DeviceThread::Loop() {
  while (true) {
    Task task;
    {
      MutexLock lock(mutex_);
      while (!stopping_ && urgent_.empty() && tasks_.empty()) changed_.Wait(mutex_);
      std::deque<Task>& queue = urgent_.empty() ? tasks_ : urgent_;
      if (queue.empty()) return;
      task = std::move(queue.front());
      queue.pop_front();
    }
    running_since_ = Clock::Real().Now().time_since_epoch().count();
    task();
    task = nullptr;  // what it captured ends before the thread counts as idle
    running_since_ = 0;
  }
}

}  // namespace expertd::engine
