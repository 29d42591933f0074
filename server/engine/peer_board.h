// Where records of peers wait for the exchange they belong to, and exchanges wait for records.
//
// One board per daemon, for one epoch at a time; records of a newer epoch that come before this
// daemon's own join are kept aside, within a bound, and checked when it joins. Thread-safe; only
// Wait blocks, and always with a deadline.
#ifndef SERVER_ENGINE_PEER_BOARD_H_
#define SERVER_ENGINE_PEER_BOARD_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/mutex.h"
#include "server/engine/peer_transport.h"

namespace expertd::engine {

// Of a record, keyed by the epoch's bootstrap id.
uint64_t ProofOf(const PeerRecord& record, std::string_view bootstrap_id);

class PeerBoard {
 public:
  // Starts an epoch: forgets the older one, checks and adopts what came early for this one.
  void Begin(std::string_view group_id, uint64_t epoch, int64_t rank, int64_t world,
             std::string_view bootstrap_id);
  // Ends the epoch; waits fail with `reason`.
  void End(const absl::Status& reason);

  // A record of a peer. Errors: EPOCH_STALE, PERMISSION_DENIED, SEQUENCE_CONFLICT (another record
  // of that rank is there), QUEUE_FULL (too many early records).
  absl::Status Post(const PeerRecord& record);
  // Whether the proof and epoch of a record fit the current epoch.
  absl::Status Check(const PeerRecord& record);

  // Nothing more will come from `rank`: waits that lack its record fail with `reason`. Ignored when
  // `epoch` is not current: deliveries of an epoch may end after the next one has begun.
  void Fail(uint64_t epoch, int64_t rank, const absl::Status& reason);
  // Ends the waits of this sequence, present and future, with `reason`. Stage "" means all stages.
  void Cancel(uint64_t sequence, const absl::Status& reason);

  // Puts this rank's record and returns all ranks' records once they are there.
  // Errors: STEP_TIMEOUT naming the missing ranks (metadata "missing_ranks"); the reason of Fail,
  // Cancel or End.
  absl::StatusOr<std::vector<std::string>> Wait(std::string_view stage, uint64_t sequence,
                                                std::string bytes, SteadyTime deadline);

  // Ranks whose record of this exchange has not come.
  std::vector<int64_t> Missing(std::string_view stage, uint64_t sequence);

  // Drops the records of all sequences <= `sequence`, sequence 0 (the join) excepted.
  void Forget(uint64_t sequence);

 private:
  using Key = std::pair<uint64_t, std::string>;  // sequence, stage
  using Slots = std::vector<std::optional<std::string>>;

  absl::Status CheckLocked(const PeerRecord& record) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PutLocked(const PeerRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Why the wait for `key` must end now, or OK.
  absl::Status VerdictLocked(const Key& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool CompleteLocked(const Key& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<int64_t> MissingLocked(const Key& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Slots& SlotsLocked(const Key& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  CondVar changed_;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
  // Why the board is not open.
  absl::Status end_reason_ ABSL_GUARDED_BY(mutex_) =
      Error(Reason::kGroupNotReady).Text("no epoch has begun here");
  std::string group_id_ ABSL_GUARDED_BY(mutex_);
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t rank_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t world_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string bootstrap_id_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, Slots> records_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, absl::Status> failed_ranks_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, absl::Status> cancelled_ ABSL_GUARDED_BY(mutex_);
  uint64_t forgotten_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<PeerRecord> early_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_PEER_BOARD_H_
