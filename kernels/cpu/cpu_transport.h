// How the CPU EP backends move bytes between ranks: one pairwise exchange at a time.
//
// Every rank of the group calls the same sequence of Exchange calls, from one thread; messages are
// matched by (sequence, position within the sequence), so that what a cancelled or timed-out
// operation left behind is never taken for a later one's. No call throws.
#ifndef KERNELS_CPU_CPU_TRANSPORT_H_
#define KERNELS_CPU_CPU_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/ep_backend.h"

namespace expertd {

using ConstBytes = std::span<const std::byte>;
using MutableBytes = std::span<std::byte>;

class CpuTransport {
 public:
  virtual ~CpuTransport() = default;
  virtual const EpCapabilities& capabilities() const = 0;

  // Sends send[i] to rank i and fills recv[i] from it, for all ranks i but this one, at once. Both
  // sides know every size; an empty message costs nothing. Neither side's memory is touched after
  // the call has returned, whatever it returned.
  // Errors: CANCELLED, STEP_TIMEOUT naming the missing ranks, PEER_LOST naming the rank,
  // GROUP_BROKEN.
  virtual absl::Status Exchange(const OpContext& context, std::span<const ConstBytes> send,
                                std::span<const MutableBytes> recv) = 0;

  // As EpBackend::Cancel and EpBackend::Abort. Any thread; never block.
  virtual void Cancel(uint64_t sequence) = 0;
  virtual void Abort() = 0;
};

// Numbers the exchanges of one rank: position restarts at 0 with each new sequence.
class ExchangeCounter {
 public:
  // The position of the next exchange of `sequence`.
  uint64_t Next(uint64_t sequence) {
    if (!started_ || sequence != sequence_) position_ = 0;
    started_ = true;
    sequence_ = sequence;
    return position_++;
  }

 private:
  bool started_ = false;
  uint64_t sequence_ = 0;
  uint64_t position_ = 0;
};

}  // namespace expertd

#endif  // KERNELS_CPU_CPU_TRANSPORT_H_
