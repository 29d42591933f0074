// CpuTransport between threads of one process: a hub that all ranks of one epoch share.
//
// A message is a descriptor of the sender's memory; the receiver copies from it while the sender is
// known to wait inside Exchange, and a sender that gives up first takes its descriptors back. The
// hub outlives any cancelled or timed-out operation and serves the next sequence.
#ifndef KERNELS_CPU_LOOPBACK_TRANSPORT_H_
#define KERNELS_CPU_LOOPBACK_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/cpu/cpu_transport.h"
#include "kernels/ep_backend.h"

namespace expertd {

class LoopbackHub;

class LoopbackTransport final : public CpuTransport {
 public:
  // Collective. With world > 1 the ranks compare process identities through bootstrap.exchange.
  // Errors: BACKEND_UNSUPPORTED when a rank lives in another process; CONFIG_MISMATCH when the rank
  // is taken or the world differs; what the exchange returns.
  static absl::StatusOr<std::unique_ptr<LoopbackTransport>> Create(const EpGroupConfig& config,
                                                                   const EpBootstrap& bootstrap);
  ~LoopbackTransport() override;

  const EpCapabilities& capabilities() const override;
  absl::Status Exchange(const OpContext& context, std::span<const ConstBytes> send,
                        std::span<const MutableBytes> recv) override;
  void Cancel(uint64_t sequence) override;
  void Abort() override;

 private:
  LoopbackTransport(std::shared_ptr<LoopbackHub> hub, int64_t rank)
      : hub_(std::move(hub)), rank_(rank) {}

  // Shared by the ranks of the epoch; the last one to leave destroys it.
  const std::shared_ptr<LoopbackHub> hub_;
  const int64_t rank_;
  ExchangeCounter counter_;
};

}  // namespace expertd

#endif  // KERNELS_CPU_LOOPBACK_TRANSPORT_H_
