// All-gather of small records between the ranks of one epoch: transport and board put together.
#ifndef SERVER_ENGINE_PEER_EXCHANGE_H_
#define SERVER_ENGINE_PEER_EXCHANGE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "kernels/ep_backend.h"
#include "server/engine/peer_board.h"
#include "server/engine/peer_transport.h"

namespace expertd::engine {

class PeerExchange final : public BootstrapExchange {
 public:
  // `board` is shared with deliveries that may still be on their way when this object is gone.
  PeerExchange(std::string group_id, uint64_t epoch, int64_t rank, int64_t world,
               std::string bootstrap_id, std::shared_ptr<PeerBoard> board,
               std::unique_ptr<PeerTransport> transport);

  // Sends `bytes` to every rank and returns the records of all, in rank order. `patient`: a peer
  // that cannot be reached yet is tried again until the deadline. Otherwise a peer that dies is
  // found while it is waited for.
  // Errors: as PeerBoard::Wait; PEER_LOST naming the rank; what a peer answered.
  absl::StatusOr<std::vector<std::string>> Gather(std::string_view stage, uint64_t sequence,
                                                  std::string bytes, SteadyTime deadline,
                                                  bool patient);

  // The join-time form, with sequence 0.
  absl::StatusOr<std::vector<std::string>> AllGather(std::string_view stage, std::string_view blob,
                                                     SteadyTime deadline) override;

  // Tells these ranks, without waiting, that this one has left the sequence.
  void Close(const std::vector<int64_t>& ranks, uint64_t sequence, const absl::Status& reason);
  // All ranks but this one.
  std::vector<int64_t> Others() const;

  PeerBoard& board() { return *board_; }

 private:
  PeerRecord MakeRecord(std::string_view stage, uint64_t sequence, std::string bytes) const;
  class TakenBy;
  void DeliverTo(const std::vector<int64_t>& ranks, const PeerRecord& record, SteadyTime deadline,
                 bool patient, const std::shared_ptr<TakenBy>& taken);

  const std::string group_id_;
  const uint64_t epoch_;
  const int64_t rank_;
  const int64_t world_;
  const std::string bootstrap_id_;
  std::shared_ptr<PeerBoard> board_;
  std::unique_ptr<PeerTransport> transport_;
};

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_PEER_EXCHANGE_H_
