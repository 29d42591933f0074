// Matching of peer records with the exchanges that wait for them.
#include "server/engine/peer_board.h"

#include <algorithm>

#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/ids.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd::engine {
namespace {

constexpr size_t kMaxEarlyRecords = 4096;
constexpr size_t kMaxEarlyBytes = 16 << 20;

}  // namespace

uint64_t ProofOf(const PeerRecord& record, std::string_view bootstrap_id) {
  return KeyedDigest(bootstrap_id,
                     StrCat(record.group_id, "\n", record.epoch, "\n", record.from_rank, "\n",
                            record.stage, "\n", record.sequence, "\n", record.bytes));
}

void PeerBoard::Begin(std::string_view group_id, uint64_t epoch, int64_t rank, int64_t world,
                      std::string_view bootstrap_id) {
  MutexLock lock(mutex_);
  open_ = true;
  end_reason_ = absl::OkStatus();
  group_id_ = std::string(group_id);
  epoch_ = epoch;
  rank_ = rank;
  world_ = world;
  bootstrap_id_ = std::string(bootstrap_id);
  records_.clear();
  failed_ranks_.clear();
  cancelled_.clear();
  forgotten_ = 0;
  std::vector<PeerRecord> early;
  early.swap(early_);
  for (PeerRecord& record : early) {
    if (record.epoch == epoch) {
      // A record with a wrong proof is dropped: its sender is not a member.
      PutLocked(record).IgnoreError();
    } else if (record.epoch > epoch) {
      early_.push_back(std::move(record));
    }
  }
  changed_.NotifyAll();
}

void PeerBoard::End(const absl::Status& reason) {
  MutexLock lock(mutex_);
  open_ = false;
  end_reason_ = reason;
  bootstrap_id_.clear();
  records_.clear();
  changed_.NotifyAll();
}

absl::Status PeerBoard::CheckLocked(const PeerRecord& record) const {
  const auto stale = [&](auto... text) {
    return Error(Reason::kEpochStale)
        .Text(text...)
        .With("epoch", record.epoch)
        .With("current_epoch", epoch_);
  };
  if (record.epoch != epoch_) {
    return stale("epoch is not current here: got ", record.epoch, ", need ", epoch_);
  }
  if (record.group_id != group_id_) {
    return stale("epoch ", epoch_, " is another group's here: got ", record.group_id, ", need ",
                 group_id_);
  }
  if (!open_) {
    return stale("epoch ", epoch_, " has ended here: ", StdView(end_reason_.message()));
  }
  if (record.from_rank < 0 || record.from_rank >= world_ || record.from_rank == rank_ ||
      record.proof != ProofOf(record, bootstrap_id_)) {
    return Error(Reason::kPermissionDenied)
        .Text("the record does not come from a member of epoch ", epoch_);
  }
  return absl::OkStatus();
}

absl::Status PeerBoard::PutLocked(const PeerRecord& record) {
  RETURN_IF_ERROR(CheckLocked(record));
  if (record.sequence != 0 && record.sequence <= forgotten_) return absl::OkStatus();
  std::optional<std::string>& slot =
      SlotsLocked({record.sequence, record.stage})[static_cast<size_t>(record.from_rank)];
  if (slot && *slot != record.bytes) {
    return Error(Reason::kSequenceConflict)
        .Text("rank ", record.from_rank, " has sent another record for sequence ", record.sequence);
  }
  slot = record.bytes;
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::Status PeerBoard::Post(const PeerRecord& record) {
  MutexLock lock(mutex_);
  if (record.epoch <= epoch_) return PutLocked(record);
  size_t bytes = record.bytes.size();
  for (const PeerRecord& other : early_) bytes += other.bytes.size();
  if (early_.size() >= kMaxEarlyRecords || bytes > kMaxEarlyBytes) {
    return Error(Reason::kQueueFull)
        .Text("too many records of epochs this daemon has not joined: limit ", kMaxEarlyRecords);
  }
  early_.push_back(record);
  return absl::OkStatus();
}

absl::Status PeerBoard::Check(const PeerRecord& record) {
  MutexLock lock(mutex_);
  return CheckLocked(record);
}

void PeerBoard::Fail(uint64_t epoch, int64_t rank, const absl::Status& reason) {
  MutexLock lock(mutex_);
  if (epoch != epoch_) return;
  failed_ranks_.emplace(rank, reason);
  changed_.NotifyAll();
}

void PeerBoard::Cancel(uint64_t sequence, const absl::Status& reason) {
  MutexLock lock(mutex_);
  cancelled_.emplace(sequence, reason);
  changed_.NotifyAll();
}

PeerBoard::Slots& PeerBoard::SlotsLocked(const Key& key) {
  Slots& slots = records_[key];
  slots.resize(static_cast<size_t>(world_));
  return slots;
}

bool PeerBoard::CompleteLocked(const Key& key) const {
  auto found = records_.find(key);
  return found != records_.end() &&
         std::all_of(found->second.begin(), found->second.end(),
                     [](const std::optional<std::string>& slot) { return slot.has_value(); });
}

std::vector<int64_t> PeerBoard::MissingLocked(const Key& key) const {
  std::vector<int64_t> missing;
  auto found = records_.find(key);
  for (int64_t rank = 0; rank < world_; ++rank) {
    const bool there =
        found != records_.end() && found->second[static_cast<size_t>(rank)].has_value();
    if (!there && rank != rank_) missing.push_back(rank);
  }
  return missing;
}

std::vector<int64_t> PeerBoard::Missing(std::string_view stage, uint64_t sequence) {
  MutexLock lock(mutex_);
  return MissingLocked({sequence, std::string(stage)});
}

absl::Status PeerBoard::VerdictLocked(const Key& key) const {
  if (!open_) return end_reason_;
  if (auto cancel = cancelled_.find(key.first); cancel != cancelled_.end()) return cancel->second;
  for (int64_t rank : MissingLocked(key)) {
    auto failed = failed_ranks_.find(rank);
    if (failed != failed_ranks_.end()) return failed->second;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> PeerBoard::Wait(std::string_view stage, uint64_t sequence,
                                                         std::string bytes, SteadyTime deadline) {
  MutexLock lock(mutex_);
  const Key key{sequence, std::string(stage)};
  if (!open_) return end_reason_;
  SlotsLocked(key)[static_cast<size_t>(rank_)] = std::move(bytes);
  while (!CompleteLocked(key)) {
    RETURN_IF_ERROR(VerdictLocked(key));
    if (Clock::Real().Now() >= deadline) {
      const std::string missing = absl::StrJoin(MissingLocked(key), ",");
      return Error(Reason::kStepTimeout)
          .Text("ranks ", missing, " did not come to sequence ", sequence, " in time (stage ",
                stage, ")")
          .With("missing_ranks", missing)
          .With("stage", stage)
          .With("sequence", sequence);
    }
    changed_.WaitUntil(mutex_, deadline);
  }
  // A complete exchange still ends when the sequence has been closed meanwhile.
  if (auto cancel = cancelled_.find(sequence); cancel != cancelled_.end()) return cancel->second;
  std::vector<std::string> all;
  for (const std::optional<std::string>& slot : records_[key]) all.push_back(*slot);
  return all;
}

void PeerBoard::Forget(uint64_t sequence) {
  MutexLock lock(mutex_);
  forgotten_ = std::max(forgotten_, sequence);
  auto begin = records_.lower_bound({1, std::string()});
  auto end = records_.lower_bound({forgotten_ + 1, std::string()});
  if (begin != records_.end()) records_.erase(begin, end);
  cancelled_.erase(cancelled_.lower_bound(1), cancelled_.lower_bound(forgotten_ + 1));
}

}  // namespace expertd::engine
