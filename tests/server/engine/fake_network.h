// An in-process network for engine tests: records travel between Engine objects, on a thread of its
// own, and tests may drop, hold or refuse them.
#ifndef TESTS_SERVER_ENGINE_FAKE_NETWORK_H_
#define TESTS_SERVER_ENGINE_FAKE_NETWORK_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "server/engine/engine.h"

namespace expertd::engine {

// What becomes of one record.
enum class Fate { kDeliver, kDrop, kHold, kRefuse };

// One record on its way.
struct Letter {
  int64_t to_rank = 0;
  std::string address;
  PeerRecord record;
  bool close = false;
  bool patient = false;
  SteadyTime deadline;
  DeliveryCallback done;
  std::weak_ptr<const bool> connection;  // expired: the transport is gone
};

class FakeNetwork {
 public:
  using Filter = std::function<Fate(const Letter&)>;

  FakeNetwork() : thread_([this] { Loop(); }) {}
  ~FakeNetwork() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void Attach(const std::string& address, Engine* engine) {
    std::unique_lock lock(engines_mutex_);
    engines_[address] = engine;
  }
  // Returns once no call into the engine is running.
  void Detach(const std::string& address) {
    std::unique_lock lock(engines_mutex_);
    engines_.erase(address);
  }

  void SetFilter(Filter filter) {
    std::lock_guard lock(mutex_);
    filter_ = std::move(filter);
  }
  // Delivers everything, the records that were held first.
  void ReleaseAll() {
    {
      std::lock_guard lock(mutex_);
      filter_ = nullptr;
      letters_.insert(letters_.begin(), std::make_move_iterator(held_.begin()),
                      std::make_move_iterator(held_.end()));
      held_.clear();
    }
    changed_.notify_all();
  }

  // Records that some engine has taken or refused.
  int delivered() const { return delivered_; }

  std::unique_ptr<PeerTransport> Connect(const std::vector<Member>& members) {
    return std::make_unique<Transport>(*this, members);
  }

 private:
  class Transport final : public PeerTransport {
   public:
    Transport(FakeNetwork& network, std::vector<Member> members)
        : network_(network), members_(std::move(members)) {}

    void Deliver(int64_t to_rank, const PeerRecord& record, SteadyTime deadline, bool patient,
                 DeliveryCallback done) override {
      Send(to_rank, record, deadline, false, patient, std::move(done));
    }
    void Close(int64_t to_rank, const PeerRecord& record, SteadyTime deadline) override {
      Send(to_rank, record, deadline, true, false, [](const absl::Status&) {});
    }

   private:
    void Send(int64_t to_rank, const PeerRecord& record, SteadyTime deadline, bool close,
              bool patient, DeliveryCallback done) {
      network_.Put({to_rank, members_[static_cast<size_t>(to_rank)].address, record, close, patient,
                    deadline, std::move(done), alive_});
    }

    FakeNetwork& network_;
    const std::vector<Member> members_;
    const std::shared_ptr<const bool> alive_ = std::make_shared<bool>(true);
  };

  void Put(Letter letter) {
    {
      std::lock_guard lock(mutex_);
      letters_.push_back(std::move(letter));
    }
    changed_.notify_all();
  }

  void Loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !letters_.empty(); });
      if (stopping_) return;
      Letter letter = std::move(letters_.front());
      letters_.pop_front();
      const Fate fate = filter_ ? filter_(letter) : Fate::kDeliver;
      if (fate == Fate::kHold) {
        held_.push_back(std::move(letter));
        continue;
      }
      lock.unlock();
      const bool again = Handle(letter, fate);
      lock.lock();
      if (again) {
        changed_.wait_for(lock, std::chrono::milliseconds(2), [this] { return stopping_; });
        letters_.push_back(std::move(letter));
      }
    }
  }

  // Returns whether a patient delivery must be tried again.
  bool Handle(Letter& letter, Fate fate) {
    if (letter.connection.expired()) {
      letter.done(Error(Reason::kCancelled).Text("the connections of the epoch are closed"));
      return false;
    }
    if (fate == Fate::kDrop) {
      letter.done(Error(Reason::kStepTimeout).Text("the record was lost"));
      return false;
    }
    absl::Status status = Error(Reason::kPeerLost).Text(letter.address, " cannot be reached");
    if (fate == Fate::kDeliver) {
      std::shared_lock lock(engines_mutex_);
      auto engine = engines_.find(letter.address);
      if (engine != engines_.end()) {
        status = letter.close ? engine->second->OnPeerClose(letter.record)
                              : engine->second->OnPeerRecord(letter.record);
        ++delivered_;
      }
    }
    if (HasReason(status, Reason::kPeerLost) && letter.patient &&
        Clock::Real().Now() < letter.deadline) {
      return true;
    }
    letter.done(status);
    return false;
  }

  std::atomic<int> delivered_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Letter> letters_;
  std::vector<Letter> held_;
  Filter filter_;
  bool stopping_ = false;
  std::shared_mutex engines_mutex_;
  std::map<std::string, Engine*> engines_;
  std::thread thread_;  // last: uses the members above
};

}  // namespace expertd::engine

#endif  // TESTS_SERVER_ENGINE_FAKE_NETWORK_H_
