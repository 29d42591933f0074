// Plain HTTP for probes and metrics, on a port of its own beside the gRPC one.
//
// GET or HEAD of
//   /metrics  Prometheus text;
//   /healthz  200 while the process is alive;
//   /readyz   200 while the daemon takes work, 503 while it drains; independent of any group;
//   /groupz   200 while its group is READY, 503 otherwise.
// No answer touches the device or waits for it.
#ifndef SERVER_OBSERVE_PROBE_SERVER_H_
#define SERVER_OBSERVE_PROBE_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/observe/listen_address.h"

struct MHD_Daemon;

namespace expertd::observe {

// What the answers are made of. Called from the probe server's thread; must not block.
struct ProbeSource {
  std::function<std::string()> metrics;
  std::function<bool()> ready;
  std::function<bool()> group_ready;
};

struct ProbeAnswer {
  int status = 200;
  std::string content_type;
  std::string body;
};

// The answer to one request: pure but for what `source` says.
ProbeAnswer AnswerProbe(const std::string& method, const std::string& path,
                        const ProbeSource& source);

class ProbeServer {
 public:
  // Binds and serves from one thread. `source` is called until the server is gone.
  // Errors: as Listen.
  static absl::StatusOr<std::unique_ptr<ProbeServer>> Create(const HostPort& address,
                                                             ProbeSource source);
  // Waits for the requests that are being answered.
  ~ProbeServer();

  // "host:port" with the port that was bound.
  const std::string& address() const { return address_; }

 private:
  ProbeServer(std::string address, ProbeSource source);

  const std::string address_;
  const ProbeSource source_;
  MHD_Daemon* daemon_ = nullptr;
};

}  // namespace expertd::observe

#endif  // SERVER_OBSERVE_PROBE_SERVER_H_
