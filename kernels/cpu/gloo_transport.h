// CpuTransport between processes: Gloo TCP pairs formed by our own address exchange.
//
// Only unbound buffers are used, and gloo is never asked to time out: a watch thread aborts the
// waits of an exchange at its deadline. After a cancel, a timeout or a lost peer the transport
// answers GROUP_BROKEN for good. No exception of gloo leaves this file.
#ifndef KERNELS_CPU_GLOO_TRANSPORT_H_
#define KERNELS_CPU_GLOO_TRANSPORT_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "kernels/cpu/cpu_transport.h"
#include "kernels/ep_backend.h"

namespace gloo::transport {
class Context;
class Device;
}  // namespace gloo::transport

namespace expertd {

class GlooTransport final : public CpuTransport {
 public:
  // Collective: gathers addresses through bootstrap.exchange, then connects all pairs.
  // Errors: what the exchange returns; STEP_TIMEOUT, PEER_LOST naming the rank; CONFIG_INVALID when
  // listen_host cannot be bound.
  static absl::StatusOr<std::unique_ptr<GlooTransport>> Create(const EpGroupConfig& config,
                                                               const EpBootstrap& bootstrap);
  // Closes the pairs after what has been sent; needs no peer.
  ~GlooTransport() override;

  const EpCapabilities& capabilities() const override;
  absl::Status Exchange(const OpContext& context, std::span<const ConstBytes> send,
                        std::span<const MutableBytes> recv) override;
  void Cancel(uint64_t sequence) override;
  void Abort() override;

 private:
  struct Transfer;  // one message under way

  GlooTransport(int64_t rank, int64_t world);

  // Binds, gathers addresses, connects.
  absl::Status Form(const EpBootstrap& bootstrap);
  absl::Status Connect(const std::vector<std::string>& addresses, SteadyTime deadline);
  // Registers the exchange, so that Cancel and the watch can stop it.
  absl::Status Begin(const OpContext& context);
  absl::Status Post(uint64_t slot, std::span<const ConstBytes> send,
                    std::span<const MutableBytes> recv);
  absl::Status PostOne(Transfer transfer, uint64_t slot);
  absl::Status WaitAll();
  // kStopped: by AbortWaits. kFailed: the connection is gone, or `bound` is over.
  enum class Outcome { kDone, kStopped, kFailed };
  static Outcome Wait(const Transfer& transfer, std::chrono::milliseconds bound);
  // The verdict of an exchange that ended with `status`; breaks the transport when it failed.
  absl::Status Finish(absl::Status status);
  // A better status for an exchange that failed. mutex_ held.
  absl::Status Explain(absl::Status status);
  // Why the waits were stopped. mutex_ held.
  absl::Status StopReason() const;
  void AbortWaits();  // mutex_ held
  void Watch();
  void ClosePairs();

  const int64_t rank_;
  const int64_t world_;
  // gloo's own interface hands both out as shared.
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;
  ExchangeCounter counter_;

  std::mutex mutex_;
  std::condition_variable watch_changed_;
  std::vector<Transfer> transfers_;     // of the running exchange
  uint64_t sequence_ = 0;               // of the running exchange
  std::optional<SteadyTime> deadline_;  // of the running exchange
  bool timed_out_ = false;
  uint64_t cancelled_before_ = 0;  // sequences below are cancelled
  bool aborted_ = false;
  std::string broken_;  // why the group is broken; empty while it is not
  bool stopping_ = false;
  SteadyTime watch_until_;  // when the watch thread wakes by itself
  std::thread watch_;
};

}  // namespace expertd

#endif  // KERNELS_CPU_GLOO_TRANSPORT_H_
