// The waiting loop behind every call of this library.
#include "client/cpp/fan_out.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/strings.h"

namespace expertd::client {
namespace {

constexpr absl::Duration kFirstBackoff = absl::Milliseconds(50);
constexpr absl::Duration kLastBackoff = absl::Seconds(1);
// How soon a stop flag, which nobody signals, is noticed.
constexpr absl::Duration kPoll = absl::Milliseconds(50);

enum class State { kWaiting, kRunning, kReplied, kDone };

struct Slot {
  State state = State::kWaiting;
  std::unique_ptr<grpc::ClientContext> context;
  grpc::Status reply;  // Written by the gRPC thread before kReplied.
  absl::Status result;
  absl::Time retry_at = absl::InfinitePast();
  absl::Duration backoff = kFirstBackoff;
};

// One fan-out. Everything but `Replied` runs on the caller's thread.
class Runner {
 public:
  Runner(const std::vector<PendingCall>& calls, const CallOptions& options)
      : calls_(calls), options_(options), slots_(calls.size()), begin_(absl::Now()) {}

  std::vector<absl::Status> Run();

 private:
  // On a gRPC thread.
  void Replied(size_t index, grpc::Status status);
  void StartDue();
  void StartOne(size_t index);
  // Takes the replies that have come; true when all calls are done.
  bool Collect();
  void Settle(size_t index);
  void CancelIfAsked();
  absl::Time NextEvent() const;

  const std::vector<PendingCall>& calls_;
  const CallOptions& options_;
  Mutex mutex_;
  CondVar replied_;
  int replies_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Slot> slots_;  // state and reply of a running one: guarded by mutex_.
  absl::Time begin_;
  absl::Time failed_at_ = absl::InfiniteFuture();
  bool cancelled_ = false;
};

void Runner::Replied(size_t index, grpc::Status status) {
  MutexLock lock(mutex_);
  slots_[index].reply = std::move(status);
  slots_[index].state = State::kReplied;
  ++replies_;
  replied_.NotifyAll();  // Under the lock: the waiter may destroy this right after it has it.
}

void Runner::StartOne(size_t index) {
  Slot& slot = slots_[index];
  slot.context = std::make_unique<grpc::ClientContext>();
  slot.context->set_deadline(absl::ToChronoTime(options_.deadline));
  {
    MutexLock lock(mutex_);
    slot.state = State::kRunning;
  }
  calls_[index].start(slot.context.get(),
                      [this, index](grpc::Status status) { Replied(index, std::move(status)); });
}

void Runner::StartDue() {
  const absl::Time now = absl::Now();
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    {
      MutexLock lock(mutex_);
      if (slot.state != State::kWaiting) continue;
    }
    const bool first = slot.retry_at == absl::InfinitePast();
    if (!first && (cancelled_ || failed_at_ <= now)) {
      MutexLock lock(mutex_);
      slot.state = State::kDone;  // With the UNAVAILABLE it had.
    } else if (slot.retry_at <= now) {
      StartOne(i);
    }
  }
}

void Runner::Settle(size_t index) {
  Slot& slot = slots_[index];
  slot.result = FromGrpc(slot.reply, calls_[index].origin);
  const absl::Time now = absl::Now();
  const bool again = absl::IsUnavailable(slot.result) && !cancelled_ && failed_at_ > now &&
                     now + slot.backoff < options_.deadline &&
                     now + slot.backoff - begin_ < options_.retry_window;
  if (again) {
    slot.retry_at = now + slot.backoff;
    slot.backoff = std::min(2 * slot.backoff, kLastBackoff);
    slot.state = State::kWaiting;
    return;
  }
  slot.state = State::kDone;
  if (!slot.result.ok()) failed_at_ = std::min(failed_at_, now);
}

bool Runner::Collect() {
  MutexLock lock(mutex_);
  replies_ = 0;
  bool all_done = true;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].state == State::kReplied) Settle(i);
    all_done = all_done && slots_[i].state == State::kDone;
  }
  return all_done;
}

void Runner::CancelIfAsked() {
  const bool stop = options_.stop != nullptr && options_.stop->load();
  const bool grace_over = failed_at_ < absl::Now() - options_.grace;
  if (cancelled_ || (!stop && !grace_over)) return;
  cancelled_ = true;
  for (Slot& slot : slots_) {
    if (slot.context != nullptr) slot.context->TryCancel();
  }
}

absl::Time Runner::NextEvent() const {
  const absl::Time now = absl::Now();
  absl::Time next = now + absl::Seconds(1);
  if (options_.stop != nullptr || options_.grace != absl::InfiniteDuration()) next = now + kPoll;
  for (const Slot& slot : slots_) {
    if (slot.retry_at > now) next = std::min(next, slot.retry_at);
  }
  return next;
}

std::vector<absl::Status> Runner::Run() {
  for (StartDue(); !Collect(); StartDue()) {
    CancelIfAsked();
    const SteadyTime next =
        Clock::Real().Now() + absl::ToChronoNanoseconds(NextEvent() - absl::Now());
    MutexLock lock(mutex_);
    while (replies_ == 0 && Clock::Real().Now() < next) replied_.WaitUntil(mutex_, next);
  }
  std::vector<absl::Status> results;
  for (Slot& slot : slots_) results.push_back(std::move(slot.result));
  return results;
}

}  // namespace

std::vector<absl::Status> FanOut(const std::vector<PendingCall>& calls,
                                 const CallOptions& options) {
  if (calls.empty()) return {};
  return Runner(calls, options).Run();
}

}  // namespace expertd::client
