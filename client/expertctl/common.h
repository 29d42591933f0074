// What verbs share: exit codes, the flags that say which daemons, signals, printing.
#ifndef CLIENT_EXPERTCTL_COMMON_H_
#define CLIENT_EXPERTCTL_COMMON_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/channel.h"
#include "client/cpp/group_controller.h"
#include "client/cpp/step_driver.h"
#include "client/expertctl/flags.h"
#include "expertd/v1/config.pb.h"

namespace expertd::expertctl {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitNotAvailable = 2;
inline constexpr int kExitUsage = 64;
inline constexpr int kExitInterrupted = 130;

using Args = std::vector<std::string>;

// Flags of every verb.
struct TargetFlags {
  std::string hosts;
  std::string config;
  bool json = false;
  double timeout = 60;  // Seconds.
  client::TlsFiles tls;

  void AddTo(FlagSet* flags);
  // The group file, or an empty one, with --hosts in place of its hosts.
  // Also reads the TLS files, so it comes before Options.
  // Errors: usage errors without hosts (unless kNoHosts), those of ReadGroupFile, MakeCredentials.
  enum class Need { kHosts, kNoHosts };
  absl::StatusOr<v1::GroupFile> Read(Need need);
  // From now on for --timeout, cancelled by Ctrl-C.
  client::CallOptions Options() const;
  // As Options, but a daemon out of reach is given up after a short while.
  client::CallOptions QuickOptions() const;

 private:
  std::shared_ptr<grpc::ChannelCredentials> credentials_;  // Shared with gRPC's channels.
};

// A group that exists, and a driver for its steps.
struct Session {
  client::Group group;
  std::unique_ptr<client::StepDriver> driver;
};
absl::StatusOr<Session> OpenSession(TargetFlags& target);

std::vector<std::string> Hosts(const v1::GroupFile& file);

// Installs handlers for SIGINT, SIGTERM and SIGHUP.
void InstallSignalHandlers();
// Turns true at the first signal: end in order.
const std::atomic<bool>* StopFlag();
// Turns true at SIGTERM, SIGHUP or the second SIGINT: cancel what is running. A third SIGINT exits.
const std::atomic<bool>* CancelFlag();

// One line on stdout.
void PrintLine(std::string_view line);
// "12.3 MiB".
std::string HumanBytes(int64_t bytes);
// The error as the program reports it: text on stderr, with --json also an object on stdout.
void PrintError(const std::string& verb, const absl::Status& status, bool json);

}  // namespace expertd::expertctl

#endif  // CLIENT_EXPERTCTL_COMMON_H_
