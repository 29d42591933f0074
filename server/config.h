// A daemon's config: flags, environment and file, read in one place into one validated struct.
#ifndef SERVER_CONFIG_H_
#define SERVER_CONFIG_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/log.h"
#include "server/rpc/tls.h"

namespace expertd::server {

// Mirrors expertd.v1.ServerConfig; see there for meaning, units and defaults.
struct Config {
  std::string listen;
  std::string advertise;
  std::string probe_listen;
  std::string device;
  int64_t slot = 0;
  std::string data_dir;
  std::string data_host;
  std::string expert_mlp;
  int64_t cpu_threads = 0;
  int64_t max_receive_message_bytes = 0;
  int64_t queue_capacity = 0;
  int64_t bytes_in_flight = 0;
  int64_t tensor_memory_bytes = 0;
  LogLevel log_level = LogLevel::kInfo;
  int64_t simulate = 0;
  int64_t drain_seconds = 0;
  rpc::TlsFiles tls;
  // The backend of groups that name none; "": the device's. Not a flag: set by --simulate.
  std::string default_backend;
};

enum class Command { kServe, kHelp, kVersion };

struct CommandLine {
  Command command = Command::kServe;
  Config config;
  // The effective values of all flags, by name, for the log.
  std::vector<std::pair<std::string, std::string>> values;
};

using Environment = std::map<std::string, std::string>;

// The defaults alone.
Config DefaultConfig();

// `args` without the program's name; of `environment` only EXPERTD_* of known names counts, and an
// empty value counts as unset. Errors: CONFIG_INVALID with one line for every problem of every
// source.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args,
                                             const Environment& environment);

// What --help prints.
std::string HelpText();

// One config per daemon of --simulate: config.simulate of them.
std::vector<Config> SimulatedConfigs(const Config& config);

}  // namespace expertd::server

#endif  // SERVER_CONFIG_H_
