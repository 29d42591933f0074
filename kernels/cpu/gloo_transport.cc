// Exchanges over gloo's unbound buffers; forming is in gloo_forming.cc.
#include "kernels/cpu/gloo_transport.h"

#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <set>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd {
namespace {

constexpr EpCapabilities kCapabilities = {
    .name = "gloo", .survives_cancel = false, .multi_process = true, .max_world = 1024};

// Passed to gloo where it wants a bound; the watch thread stops every wait long before.
constexpr std::chrono::milliseconds kNoGlooTimeout = std::chrono::hours(24);
// How long the watch thread sleeps when nothing runs.
constexpr Duration kIdleWatch = std::chrono::hours(1);
// Exchanges of one sequence have slots of their own up to this many.
constexpr int kPositionBits = 20;

absl::Status LostOrStopped(bool lost, int64_t rank) {
  if (lost) {
    return Error(Reason::kPeerLost).Text("gloo: lost rank ", rank).With("ranks", rank);
  }
  return Error(Reason::kStepTimeout).Text("gloo: nothing from rank ", rank).With("ranks", rank);
}

// Sends use const memory; gloo's buffer takes both directions and wants it writable.
void* Writable(const std::byte* data) { return const_cast<std::byte*>(data); }

}  // namespace

struct GlooTransport::Transfer {
  int64_t rank = 0;
  bool outgoing = false;
  std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
  bool done = false;
};

GlooTransport::Outcome GlooTransport::Wait(const Transfer& transfer,
                                           std::chrono::milliseconds bound) {
  try {
    const bool done =
        transfer.outgoing ? transfer.buffer->waitSend(bound) : transfer.buffer->waitRecv(bound);
    return done ? Outcome::kDone : Outcome::kStopped;
  } catch (const std::exception&) {
    // gloo's text names addresses and its own source lines; the rank says all that is of use.
    return Outcome::kFailed;
  }
}

GlooTransport::GlooTransport(int64_t rank, int64_t world) : rank_(rank), world_(world) {}

const EpCapabilities& GlooTransport::capabilities() const { return kCapabilities; }

GlooTransport::~GlooTransport() {
  if (watch_.joinable()) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      watch_changed_.notify_all();
    }
    watch_.join();
  }
  // A hard close resets the connection and may take the last message from a peer that is still
  // reading it, so it is for broken groups; the pairs' destructors close softly.
  if (!broken_.empty()) ClosePairs();
}

absl::Status GlooTransport::Exchange(const OpContext& context, std::span<const ConstBytes> send,
                                     std::span<const MutableBytes> recv) {
  const uint64_t position = counter_.Next(context.sequence);
  const uint64_t slot = (context.sequence << kPositionBits) + position;
  RETURN_IF_ERROR(Begin(context));
  absl::Status status = Post(slot, send, recv);
  if (status.ok()) status = WaitAll();
  return Finish(std::move(status));
}

absl::Status GlooTransport::Begin(const OpContext& context) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!broken_.empty()) {
    return Error(Reason::kGroupBroken).Text("gloo: the communicator is broken: ", broken_);
  }
  sequence_ = context.sequence;
  deadline_ = context.deadline;
  timed_out_ = false;
  if (*deadline_ < watch_until_) watch_changed_.notify_all();
  return absl::OkStatus();
}

absl::Status GlooTransport::Post(uint64_t slot, std::span<const ConstBytes> send,
                                 std::span<const MutableBytes> recv) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    RETURN_IF_ERROR(StopReason());
  }
  // All receives before all sends: whatever the peers do, no send of theirs waits for ours. Each
  // rank starts with its right-hand neighbour, so that not all talk to rank 0 first.
  const auto post_all = [&](bool outgoing) -> absl::Status {
    for (int64_t step = 1; step < world_; ++step) {
      const int64_t peer = (rank_ + step) % world_;
      const auto index = static_cast<size_t>(peer);
      const size_t size = outgoing ? send[index].size() : recv[index].size();
      if (size == 0) continue;
      void* data = outgoing ? Writable(send[index].data()) : recv[index].data();
      Transfer transfer = {.rank = peer, .outgoing = outgoing};
      try {
        transfer.buffer = context_->createUnboundBuffer(data, size);
      } catch (const std::exception& error) {
        return Error(Reason::kInternal).Text("gloo: buffer of ", size, " bytes: ", error.what());
      }
      RETURN_IF_ERROR(PostOne(std::move(transfer), slot));
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(post_all(false));
  return post_all(true);
}

absl::Status GlooTransport::PostOne(Transfer transfer, uint64_t slot) {
  gloo::transport::UnboundBuffer* buffer = transfer.buffer.get();
  const int peer = static_cast<int>(transfer.rank);
  const bool outgoing = transfer.outgoing;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    RETURN_IF_ERROR(StopReason());
    transfers_.push_back(std::move(transfer));
  }
  try {
    if (outgoing) {
      buffer->send(peer, slot);
    } else {
      buffer->recv(peer, slot);
    }
  } catch (const std::exception&) {
    return LostOrStopped(true, peer);
  }
  return absl::OkStatus();
}

// Only the exchanging thread changes transfers_, so it may use it without the lock.
absl::Status GlooTransport::WaitAll() {
  for (Transfer& transfer : transfers_) {
    const Outcome outcome = Wait(transfer, kNoGlooTimeout);
    if (outcome == Outcome::kDone) {
      transfer.done = true;
    } else {
      return LostOrStopped(outcome == Outcome::kFailed, transfer.rank);
    }
  }
  return absl::OkStatus();
}

absl::Status GlooTransport::Finish(absl::Status status) {
  std::lock_guard<std::mutex> lock(mutex_);
  deadline_.reset();
  if (status.ok()) {
    transfers_.clear();
    return absl::OkStatus();
  }
  status = Explain(std::move(status));
  if (broken_.empty()) broken_ = std::string(StdView(status.message()));
  // First the pairs, so that nothing touches the caller's memory, then the buffers.
  ClosePairs();
  transfers_.clear();
  return status;
}

// Asks every transfer how it stands, so that the message names all ranks concerned: a peer that
// reacted to a death by closing its own pairs looks the same as the one that died.
absl::Status GlooTransport::Explain(absl::Status status) {
  AbortWaits();
  std::set<int64_t> lost;
  std::vector<const Transfer*> open;
  for (const Transfer& transfer : transfers_) {
    if (transfer.done) continue;
    if (Wait(transfer, kNoGlooTimeout) == Outcome::kFailed) {
      lost.insert(transfer.rank);
    } else {
      open.push_back(&transfer);
    }
  }
  if (absl::Status stopped = StopReason(); !stopped.ok()) return stopped;
  if (timed_out_) {
    std::set<int64_t> missing;
    // An aborted wait does not say whether the transfer was complete: one without patience does. It
    // also closes all pairs, which is about to happen anyway.
    for (const Transfer* transfer : open) {
      if (Wait(*transfer, std::chrono::milliseconds(0)) != Outcome::kDone) {
        missing.insert(transfer->rank);
      }
    }
    const std::string ranks = absl::StrJoin(missing, ",");
    return Error(Reason::kStepTimeout)
        .Text("sequence ", sequence_, ": nothing from rank ", ranks, " by the deadline")
        .With("ranks", ranks);
  }
  if (lost.size() < 2) return status;
  const std::string ranks = absl::StrJoin(lost, ",");
  return Error(Reason::kPeerLost)
      .Text("sequence ", sequence_, ": lost rank ", ranks)
      .With("ranks", ranks);
}

absl::Status GlooTransport::StopReason() const {
  if (aborted_) return Error(Reason::kGroupBroken).Text("gloo: communicator given up");
  if (sequence_ < cancelled_before_) {
    return Error(Reason::kCancelled).Text("sequence ", sequence_, " was cancelled");
  }
  return absl::OkStatus();
}

void GlooTransport::AbortWaits() {
  for (const Transfer& transfer : transfers_) {
    if (transfer.outgoing) {
      transfer.buffer->abortWaitSend();
    } else {
      transfer.buffer->abortWaitRecv();
    }
  }
}

void GlooTransport::Cancel(uint64_t sequence) {
  std::lock_guard<std::mutex> lock(mutex_);
  cancelled_before_ = std::max(cancelled_before_, sequence + 1);
  if (deadline_.has_value() && sequence_ < cancelled_before_) AbortWaits();
}

void GlooTransport::Abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  if (broken_.empty()) broken_ = "given up";
  AbortWaits();
  ClosePairs();
}

void GlooTransport::ClosePairs() {
  if (context_ == nullptr) return;
  for (int64_t peer = 0; peer < world_; ++peer) {
    if (peer == rank_) continue;
    try {
      auto& pair = context_->getPair(static_cast<int>(peer));
      if (pair != nullptr) pair->close();
    } catch (const std::exception&) {
      // Closing is all that is left to do with it; what it complains about no longer matters.
    }
  }
}

void GlooTransport::Watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    const SteadyTime now = Clock::Real().Now();
    if (deadline_.has_value() && now >= *deadline_) {
      timed_out_ = true;
      deadline_.reset();
      AbortWaits();
    }
    watch_until_ = deadline_.value_or(now + kIdleWatch);
    watch_changed_.wait_until(lock, watch_until_);
  }
}

}  // namespace expertd
