// Sends this rank's record to every peer and waits for theirs.
#include "server/engine/peer_exchange.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/mutex.h"
#include "base/strings.h"

namespace expertd::engine {
namespace {

// Closing is best effort: a peer that does not answer finds out by its own deadline.
constexpr std::chrono::seconds kCloseTimeout{2};
// A peer that dies after it took our record, or that took it early and turned out to be in another
// group, would be missed only at the deadline. The record is sent again to those that are late,
// which changes nothing at a live one and finds the others.
constexpr std::chrono::milliseconds kRepeatAfter{500};

}  // namespace

// The peers that have taken a record. Shared with deliveries on their way; thread-safe.
class PeerExchange::TakenBy {
 public:
  void Add(int64_t peer) {
    MutexLock lock(mutex_);
    peers_.insert(peer);
  }
  bool Contains(int64_t peer) {
    MutexLock lock(mutex_);
    return peers_.count(peer) != 0;
  }

 private:
  Mutex mutex_;
  std::set<int64_t> peers_ ABSL_GUARDED_BY(mutex_);
};

PeerExchange::PeerExchange(std::string group_id, uint64_t epoch, int64_t rank, int64_t world,
                           std::string bootstrap_id, std::shared_ptr<PeerBoard> board,
                           std::unique_ptr<PeerTransport> transport)
    : group_id_(std::move(group_id)),
      epoch_(epoch),
      rank_(rank),
      world_(world),
      bootstrap_id_(std::move(bootstrap_id)),
      board_(std::move(board)),
      transport_(std::move(transport)) {}

PeerRecord PeerExchange::MakeRecord(std::string_view stage, uint64_t sequence,
                                    std::string bytes) const {
  PeerRecord record;
  record.group_id = group_id_;
  record.epoch = epoch_;
  record.from_rank = rank_;
  record.stage = std::string(stage);
  record.sequence = sequence;
  record.bytes = std::move(bytes);
  record.proof = ProofOf(record, bootstrap_id_);
  return record;
}

absl::StatusOr<std::vector<std::string>> PeerExchange::Gather(std::string_view stage,
                                                              uint64_t sequence, std::string bytes,
                                                              SteadyTime deadline, bool patient) {
  const PeerRecord record = MakeRecord(stage, sequence, std::move(bytes));
  const auto taken = std::make_shared<TakenBy>();
  DeliverTo(Others(), record, deadline, patient, taken);
  for (;;) {
    const SteadyTime until = std::min(deadline, Clock::Real().Now() + kRepeatAfter);
    absl::StatusOr<std::vector<std::string>> all =
        board_->Wait(stage, sequence, record.bytes, until);
    const bool again =
        HasReason(all.status(), Reason::kStepTimeout) && Clock::Real().Now() >= until;
    if (!again || until == deadline) return all;
    std::vector<int64_t> late = board_->Missing(stage, sequence);
    // A patient delivery that is still being tried goes on by itself.
    if (patient) std::erase_if(late, [&](int64_t peer) { return !taken->Contains(peer); });
    DeliverTo(late, record, deadline, patient, taken);
  }
}

void PeerExchange::DeliverTo(const std::vector<int64_t>& ranks, const PeerRecord& record,
                             SteadyTime deadline, bool patient,
                             const std::shared_ptr<TakenBy>& taken) {
  for (int64_t peer : ranks) {
    std::shared_ptr<PeerBoard> board = board_;
    transport_->Deliver(peer, record, deadline, patient,
                        [board, epoch = epoch_, peer, taken](absl::Status status) {
                          if (status.ok()) taken->Add(peer);
                          // A timeout says nothing about the peer: the wait itself ends by the same
                          // deadline.
                          if (status.ok() || HasReason(status, Reason::kStepTimeout)) return;
                          board->Fail(epoch, peer, WithContext(status, StrCat("rank ", peer)));
                        });
  }
}

absl::StatusOr<std::vector<std::string>> PeerExchange::AllGather(std::string_view stage,
                                                                 std::string_view blob,
                                                                 SteadyTime deadline) {
  return Gather(stage, 0, std::string(blob), deadline, /*patient=*/true);
}

void PeerExchange::Close(const std::vector<int64_t>& ranks, uint64_t sequence,
                         const absl::Status& reason) {
  const PeerRecord record = MakeRecord("close", sequence, EncodeStatus(reason));
  for (int64_t peer : ranks) {
    transport_->Close(peer, record, Clock::Real().Now() + kCloseTimeout);
  }
}

std::vector<int64_t> PeerExchange::Others() const {
  std::vector<int64_t> others;
  for (int64_t rank = 0; rank < world_; ++rank) {
    if (rank != rank_) others.push_back(rank);
  }
  return others;
}

}  // namespace expertd::engine
