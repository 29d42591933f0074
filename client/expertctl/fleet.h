// Daemons as child processes of this one, for `train --demo`: none of them outlives it.
#ifndef CLIENT_EXPERTCTL_FLEET_H_
#define CLIENT_EXPERTCTL_FLEET_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace expertd::expertctl {

// Starts and ends N `expertd` processes on this machine. Use from the main thread only: the kernel
// ties a child's life to the thread that made it.
class Fleet {
 public:
  // Starts `count` daemons with slots 0..count-1, on `device` ("cpu", or "cuda": slot i on cuda:i),
  // on ports that the kernel picks, and waits until each says where it listens. Call it before any
  // gRPC call of this process. Errors: NOT_FOUND without the program; UNAVAILABLE with the log's
  // end of a daemon that does not come up in time.
  static absl::StatusOr<std::unique_ptr<Fleet>> Start(const std::string& program,
                                                      const std::string& device, int64_t count,
                                                      absl::Time deadline);

  // Kills what still runs; Stop is the orderly way.
  ~Fleet();
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;

  // "127.0.0.1:port" in slot order.
  std::vector<std::string> hosts() const;

  // SIGTERM to all, a bounded wait, then SIGKILL.
  void Stop();

  // The end of every daemon's log, and how those that ended did: for the report of a failure.
  // Before Stop.
  std::string Describe();

 private:
  struct Child {
    pid_t pid = -1;
    int out = -1;  // Read end of its stdout.
    int log = -1;  // Its stderr, a file in memory.
    std::string address;
    int exit_status = 0;  // Meaningful when pid is -1.
  };

  Fleet() = default;
  absl::Status StartOne(const std::string& program, const std::string& device, int64_t slot,
                        int64_t threads);
  absl::Status AwaitAddress(Child* child, absl::Time deadline);
  // Reaps those that have ended; true when none runs any more.
  bool Reap();
  void Signal(int number);

  std::vector<Child> children_;
};

// The address in a daemon's line "listening address=HOST:PORT ...", or empty.
std::string ParseListening(const std::string& line);

// The path of `name` beside this program's own file.
std::string BesideSelf(const std::string& name);

}  // namespace expertd::expertctl

#endif  // CLIENT_EXPERTCTL_FLEET_H_
