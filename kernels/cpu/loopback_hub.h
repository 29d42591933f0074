// The meeting place of the ranks of one loopback epoch: message cells, cancellation, departures.
#ifndef KERNELS_CPU_LOOPBACK_HUB_H_
#define KERNELS_CPU_LOOPBACK_HUB_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/error.h"
#include "kernels/cpu/cpu_transport.h"
#include "kernels/ep_backend.h"

namespace expertd {

// Thread-safe. One thread per rank calls Exchange; any thread may call the rest.
class LoopbackHub {
 public:
  explicit LoopbackHub(int64_t world);

  // The hub that this process keeps under `key` while any rank holds it, made on first use.
  // Errors: CONFIG_MISMATCH when it exists with another world size.
  static absl::StatusOr<std::shared_ptr<LoopbackHub>> Find(const std::string& key, int64_t world);

  // Errors: CONFIG_MISMATCH when the rank is taken.
  absl::Status Join(int64_t rank);
  // The rank takes part in nothing any more.
  void Leave(int64_t rank);

  absl::Status Exchange(int64_t rank, const OpContext& context, uint64_t position,
                        std::span<const ConstBytes> send, std::span<const MutableBytes> recv);
  void Cancel(int64_t rank, uint64_t sequence);
  void Abort(int64_t rank);

 private:
  // A message from one rank to another; empty between exchanges.
  struct Cell {
    enum class State { kEmpty, kPosted, kCopying, kTaken };
    State state = State::kEmpty;
    uint64_t sequence = 0;
    uint64_t position = 0;
    ConstBytes data;
  };
  struct Member {
    bool joined = false;
    bool aborted = false;
    bool gone = false;         // left or aborted: peers wait for it no more
    uint64_t left_before = 0;  // it takes part in no sequence < left_before
    Reason left_reason = Reason::kCancelled;
    std::condition_variable changed;  // something that this member waits for changed
  };
  // One call of Exchange.
  struct Call {
    int64_t rank;
    uint64_t sequence;
    uint64_t position;
    SteadyTime deadline;
    std::span<const ConstBytes> send;
    std::span<const MutableBytes> recv;
    std::vector<bool> received;
  };

  Cell& CellOf(int64_t from, int64_t to) { return cells_[static_cast<size_t>(from * world_ + to)]; }
  Member& MemberOf(int64_t rank) { return members_[static_cast<size_t>(rank)]; }
  // All below: mutex_ held.
  void Post(const Call& call);
  absl::Status Run(Call& call, std::unique_lock<std::mutex>& lock);
  // Copies every message that is there; true if it copied one. Drops the lock while copying.
  absl::StatusOr<bool> TakeMessages(Call& call, std::unique_lock<std::mutex>& lock);
  // Ranks whose message has not come or who have not taken ours.
  std::vector<int64_t> Waiting(const Call& call);
  absl::Status OwnFailure(const Call& call);
  absl::Status PeerFailure(const Call& call, const std::vector<int64_t>& waiting);
  void MarkLeft(int64_t rank, uint64_t sequence, Reason reason);
  // Empties the cells of `rank`, after receivers that are copying from them have finished.
  void Withdraw(int64_t rank, std::unique_lock<std::mutex>& lock);
  void NotifyAll();

  const int64_t world_;
  std::mutex mutex_;
  std::vector<Cell> cells_;  // [from, to]
  std::vector<Member> members_;
};

}  // namespace expertd

#endif  // KERNELS_CPU_LOOPBACK_HUB_H_
