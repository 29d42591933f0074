// Rendezvous of posted and awaited messages under one mutex; copies run outside it.
#include "kernels/cpu/loopback_hub.h"

#include <cstring>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace expertd {
namespace {

struct Registry {
  std::mutex mutex;
  // The registry must not keep a hub alive after its last rank has left.
  std::unordered_map<std::string, std::weak_ptr<LoopbackHub>> hubs;
};

Registry& TheRegistry() {
  static Registry* registry = new Registry;  // never destroyed: hubs may outlive static objects
  return *registry;
}

}  // namespace

LoopbackHub::LoopbackHub(int64_t world)
    : world_(world),
      cells_(static_cast<size_t>(world * world)),
      members_(static_cast<size_t>(world)) {}

absl::StatusOr<std::shared_ptr<LoopbackHub>> LoopbackHub::Find(const std::string& key,
                                                               int64_t world) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::erase_if(registry.hubs, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<LoopbackHub>& entry = registry.hubs[key];
  std::shared_ptr<LoopbackHub> hub = entry.lock();
  if (hub == nullptr) {
    hub = std::make_shared<LoopbackHub>(world);
    entry = hub;
  }
  if (hub->world_ != world) {
    return Error(Reason::kConfigMismatch)
        .Text("loopback: world ", world, " here, ", hub->world_, " at the ranks before");
  }
  return hub;
}

absl::Status LoopbackHub::Join(int64_t rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (MemberOf(rank).joined) {
    return Error(Reason::kConfigMismatch).Text("loopback: rank ", rank, " has joined this epoch");
  }
  MemberOf(rank).joined = true;
  return absl::OkStatus();
}

void LoopbackHub::Leave(int64_t rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  MemberOf(rank).gone = true;
  NotifyAll();
}

void LoopbackHub::Abort(int64_t rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  MemberOf(rank).aborted = true;
  MemberOf(rank).gone = true;
  NotifyAll();
}

void LoopbackHub::Cancel(int64_t rank, uint64_t sequence) {
  std::lock_guard<std::mutex> lock(mutex_);
  MarkLeft(rank, sequence, Reason::kCancelled);
}

void LoopbackHub::MarkLeft(int64_t rank, uint64_t sequence, Reason reason) {
  Member& member = MemberOf(rank);
  if (sequence < member.left_before) return;
  member.left_before = sequence + 1;
  member.left_reason = reason;
  NotifyAll();
}

void LoopbackHub::NotifyAll() {
  for (Member& member : members_) member.changed.notify_all();
}

absl::Status LoopbackHub::Exchange(int64_t rank, const OpContext& context, uint64_t position,
                                   std::span<const ConstBytes> send,
                                   std::span<const MutableBytes> recv) {
  Call call{rank, context.sequence, position, context.deadline, send, recv, {}};
  call.received.resize(static_cast<size_t>(world_));
  std::unique_lock<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(OwnFailure(call));
  Post(call);
  absl::Status status = Run(call, lock);
  Withdraw(rank, lock);
  // Peers that still wait for this rank in this sequence wait in vain.
  if (!status.ok()) MarkLeft(rank, call.sequence, ReasonOf(status));
  return status;
}

void LoopbackHub::Post(const Call& call) {
  for (int64_t to = 0; to < world_; ++to) {
    const ConstBytes data = call.send[static_cast<size_t>(to)];
    if (to == call.rank || data.empty()) continue;
    CellOf(call.rank, to) = {Cell::State::kPosted, call.sequence, call.position, data};
    MemberOf(to).changed.notify_all();
  }
}

absl::Status LoopbackHub::Run(Call& call, std::unique_lock<std::mutex>& lock) {
  while (true) {
    ASSIGN_OR_RETURN(const bool progress, TakeMessages(call, lock));
    RETURN_IF_ERROR(OwnFailure(call));
    if (progress) continue;
    const std::vector<int64_t> waiting = Waiting(call);
    if (waiting.empty()) return absl::OkStatus();
    RETURN_IF_ERROR(PeerFailure(call, waiting));
    if (Clock::Real().Now() >= call.deadline) {
      const std::string ranks = absl::StrJoin(waiting, ",");
      return Error(Reason::kStepTimeout)
          .Text("sequence ", call.sequence, ": nothing from rank ", ranks, " by the deadline")
          .With("ranks", ranks);
    }
    MemberOf(call.rank).changed.wait_until(lock, call.deadline);
  }
}

absl::StatusOr<bool> LoopbackHub::TakeMessages(Call& call, std::unique_lock<std::mutex>& lock) {
  bool progress = false;
  for (int64_t from = 0; from < world_; ++from) {
    const MutableBytes target = call.recv[static_cast<size_t>(from)];
    if (from == call.rank || target.empty() || call.received[static_cast<size_t>(from)]) continue;
    Cell& cell = CellOf(from, call.rank);
    if (cell.state != Cell::State::kPosted || cell.sequence != call.sequence ||
        cell.position != call.position) {
      continue;
    }
    if (cell.data.size() != target.size()) {
      return Error(Reason::kInternal)
          .Text("sequence ", call.sequence, ": rank ", from, " sent ", cell.data.size(),
                " bytes, need ", target.size());
    }
    cell.state = Cell::State::kCopying;
    lock.unlock();
    std::memcpy(target.data(), cell.data.data(), target.size());
    lock.lock();
    cell.state = Cell::State::kTaken;
    MemberOf(from).changed.notify_all();
    call.received[static_cast<size_t>(from)] = true;
    progress = true;
  }
  return progress;
}

std::vector<int64_t> LoopbackHub::Waiting(const Call& call) {
  std::vector<int64_t> waiting;
  for (int64_t peer = 0; peer < world_; ++peer) {
    if (peer == call.rank) continue;
    const auto index = static_cast<size_t>(peer);
    const bool incoming = !call.recv[index].empty() && !call.received[index];
    const bool outgoing =
        !call.send[index].empty() && CellOf(call.rank, peer).state != Cell::State::kTaken;
    if (incoming || outgoing) waiting.push_back(peer);
  }
  return waiting;
}

absl::Status LoopbackHub::OwnFailure(const Call& call) {
  const Member& self = MemberOf(call.rank);
  if (self.aborted) return Error(Reason::kGroupBroken).Text("loopback: communicator given up");
  if (call.sequence < self.left_before) {
    return Error(Reason::kCancelled).Text("sequence ", call.sequence, " was cancelled");
  }
  return absl::OkStatus();
}

absl::Status LoopbackHub::PeerFailure(const Call& call, const std::vector<int64_t>& waiting) {
  for (int64_t peer : waiting) {
    const Member& member = MemberOf(peer);
    if (member.gone) {
      return Error(Reason::kPeerLost)
          .Text("sequence ", call.sequence, ": rank ", peer, " has left the group")
          .With("rank", peer);
    }
    if (call.sequence < member.left_before) {
      return Error(member.left_reason)
          .Text("sequence ", call.sequence, ": rank ", peer, " has left it")
          .With("rank", peer);
    }
  }
  return absl::OkStatus();
}

void LoopbackHub::Withdraw(int64_t rank, std::unique_lock<std::mutex>& lock) {
  for (int64_t to = 0; to < world_; ++to) {
    Cell& cell = CellOf(rank, to);
    // A copy is one memcpy: it ends soon, whatever happens to the receiver.
    MemberOf(rank).changed.wait(lock, [&] { return cell.state != Cell::State::kCopying; });
    cell = Cell();
  }
}

}  // namespace expertd
