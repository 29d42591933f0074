// N `expertd` processes on this machine for a test: started, signalled, and never left behind.
//
//   auto group = ProcessGroup::Start({.count = 4}, absl::Now() + absl::Seconds(20));
//   client::Up({.hosts = (*group)->hosts(), ...});
// Each daemon listens on ports that the kernel picks and writes its log to a file of its own, which
// the destructor removes. Use from one thread: the kernel ties a child's life to the thread that
// made it.
#ifndef TESTS_TESTING_PROCESS_GROUP_H_
#define TESTS_TESTING_PROCESS_GROUP_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace expertd::testing {

struct ProcessOptions {
  int64_t count = 1;
  int64_t first_slot = 0;  // Daemon i gets slot first_slot + i.
  // Of every daemon, after those that the group sets; "{slot}" becomes its slot.
  std::vector<std::string> flags;
  // NAME=VALUE, before what this process has of the same name; "{slot}" likewise.
  std::vector<std::string> environment;
};

class ProcessGroup {
 public:
  // Starts the daemons and waits until each has said where it listens. Errors: NOT_FOUND without
  // the program; UNAVAILABLE, with the logs, when one ends or says nothing until the deadline.
  static absl::StatusOr<std::unique_ptr<ProcessGroup>> Start(const ProcessOptions& options,
                                                             absl::Time deadline);

  // Kills what still runs and removes the logs.
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  size_t size() const { return children_.size(); }
  pid_t pid(size_t index) const { return children_[index].pid; }
  // "127.0.0.1:port" of each daemon, in the order they were started.
  std::vector<std::string> hosts() const;
  std::vector<std::string> probe_hosts() const;

  // Starts one more daemon. Errors: as Start.
  absl::Status Add(int64_t slot, absl::Time deadline);

  // Sends a signal to one daemon that has not been waited for.
  void Signal(size_t index, int number);
  // How one daemon ended, as waitpid tells it. Errors: DEADLINE_EXCEEDED while it still runs.
  absl::StatusOr<int> AwaitEnd(size_t index, absl::Time deadline);
  // SIGTERM to all, then SIGKILL to those that still run at the deadline.
  void Stop(absl::Time deadline);

  // Everything one daemon wrote to its log.
  std::string Log(size_t index) const;
  // The end of every log and how the daemon ended: for the report of a failure.
  std::string Describe();

 private:
  struct Child {
    int64_t slot = 0;
    pid_t pid = -1;  // Kept after the end.
    int out = -1;    // Read end of its stdout.
    std::string log;
    std::string address;
    std::string probe_address;
    std::optional<int> ended;  // What waitpid said.
  };

  ProcessGroup() = default;
  absl::Status Spawn(int64_t slot);
  absl::Status AwaitAddress(Child& child, absl::Time deadline);
  // Asks the kernel once; true when the child has ended.
  static bool Reap(Child& child);

  std::string program_;
  std::string folder_;
  std::vector<std::string> flags_;
  std::vector<std::string> environment_;
  std::vector<Child> children_;
};

// The value of `key=` in a line of key=value fields that starts with `word`, or empty.
std::string FieldOf(const std::string& line, const std::string& word, const std::string& key);

// The folder with the programs under test: EXPERTD_BIN_DIR, else the one above this program's.
std::string BinDir();

}  // namespace expertd::testing

#endif  // TESTS_TESTING_PROCESS_GROUP_H_
