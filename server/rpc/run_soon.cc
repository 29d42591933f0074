// A few threads of our own for the whole process. A gRPC alarm that is due would do without them,
// but its timers are read once a millisecond, which is longer than a small step takes.
#include "server/rpc/run_soon.h"

#include <pthread.h>

#include <algorithm>
#include <deque>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace expertd::rpc {
namespace {

constexpr unsigned kMinThreads = 2;
constexpr unsigned kMaxThreads = 8;

class Pool {
 public:
  Pool() {
    const unsigned threads =
        std::clamp(std::thread::hardware_concurrency(), kMinThreads, kMaxThreads);
    for (unsigned i = 0; i < threads; ++i) {
      std::thread thread([this] { Loop(); });
      pthread_setname_np(thread.native_handle(), "answers");
      thread.detach();
    }
  }

  void Add(std::function<void()> job) {
    MutexLock lock(mutex_);
    jobs_.push_back(std::move(job));
    changed_.NotifyOne();
  }

 private:
  [[noreturn]] void Loop() {
    while (true) {
      std::function<void()> job;
      {
        MutexLock lock(mutex_);
        while (jobs_.empty()) changed_.Wait(mutex_);
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      job();
    }
  }

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> jobs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

void RunSoon(std::function<void()> job) {
  static auto* const pool = new Pool;  // its threads end with the process
  pool->Add(std::move(job));
}

}  // namespace expertd::rpc
