// Defaults, help and validation of the config; where values come from is in config_source.cc.
#include "server/config.h"

#include <unistd.h>

#include <iterator>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/error.h"
#include "base/strings.h"
#include "server/config_source.h"
#include "server/exit_code.h"
#include "server/observe/listen_address.h"

namespace expertd::server {
namespace {

using observe::HostPort;
using observe::JoinHostPort;
using observe::ParseHostPort;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kMaxMessage = std::numeric_limits<int32_t>::max();  // gRPC's own limit
constexpr int64_t kMaxBytes = int64_t{1} << 50;
constexpr int64_t kMaxSlot = 1'000'000;
constexpr int64_t kMaxSimulated = 64;
constexpr int64_t kMaxDrainSeconds = 3600;

struct FlagRow {
  const char* name;
  const char* fallback;  // the default, as text
  const char* help;
};

// In the order of --help. A test compares the names with the fields of ServerConfig.
constexpr FlagRow kFlags[] = {
    {"listen", "127.0.0.1:7301", "host:port of the gRPC server; port 0 takes any free one"},
    {"advertise", "", "address other daemons reach this one at; default: the bound one"},
    {"probe_listen", "", "host:port for plaintext probes and metrics; default: off"},
    {"device", "cpu", "cpu or cuda:N"},
    {"slot", "0", "stable place of this daemon in its deployment"},
    {"data_dir", "", "folder for what is kept; default: nothing is kept"},
    {"data_host", "", "address that data connections bind to; default: as listen"},
    {"expert_mlp", "", "implementation of the experts; default: the fastest"},
    {"cpu_threads", "0", "threads of one computation on the CPU; 0: all cores"},
    {"max_receive_message_bytes", "1073741824", "largest request"},
    {"queue_capacity", "256", "operations admitted and not yet answered"},
    {"bytes_in_flight", "4294967296", "request bytes of those operations"},
    {"log_level", "info", "debug, info, warning or error"},
    {"simulate", "0", "run this many daemons in one process, over loopback"},
    {"drain_seconds", "10", "how long SIGTERM waits for work to finish"},
    {"tls_cert", "", "PEM chain of this daemon; default: plaintext"},
    {"tls_key", "", "PEM private key of tls_cert"},
    {"tls_client_ca", "", "PEM authority that callers' certificates must come from"},
    {"tensor_memory_bytes", "4294967296", "device memory of resident tensors"},
};

// All flags with their defaults, as the strongest sources would set them.
v1::ServerConfig DefaultMessage() {
  std::vector<std::string> args;
  for (const FlagRow& row : kFlags) args.push_back(StrCat("--", row.name, "=", row.fallback));
  return ReadSources(args, {}).message;
}

std::optional<LogLevel> ParseLogLevel(const std::string& text) {
  if (text == "debug") return LogLevel::kDebug;
  if (text == "info") return LogLevel::kInfo;
  if (text == "warning") return LogLevel::kWarning;
  if (text == "error") return LogLevel::kError;
  return std::nullopt;
}

Config ToConfig(const v1::ServerConfig& message) {
  Config config;
  config.listen = message.listen();
  config.advertise = message.advertise();
  config.probe_listen = message.probe_listen();
  config.device = message.device();
  config.slot = message.slot();
  config.data_dir = message.data_dir();
  config.data_host = message.data_host();
  config.expert_mlp = message.expert_mlp();
  config.cpu_threads = message.cpu_threads();
  config.max_receive_message_bytes = message.max_receive_message_bytes();
  config.queue_capacity = message.queue_capacity();
  config.bytes_in_flight = message.bytes_in_flight();
  config.tensor_memory_bytes = message.tensor_memory_bytes();
  config.log_level = ParseLogLevel(message.log_level()).value_or(LogLevel::kInfo);
  config.simulate = message.simulate();
  config.drain_seconds = message.drain_seconds();
  config.tls = {message.tls_cert(), message.tls_key(), message.tls_client_ca()};
  return config;
}

// Checks values; each problem names the source that set the value.
class Validator {
 public:
  Validator(const ConfigSources& sources, std::vector<std::string>* problems)
      : sources_(sources), problems_(problems) {}

  void Range(const char* field, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) {
      Report(field, StrCat("got ", value, ", need ", low, " to ", high));
    }
  }
  void Address(const char* field, const std::string& value) {
    const absl::StatusOr<HostPort> address = ParseHostPort(value);
    if (!address.ok()) Report(field, std::string(StdView(address.status().message())));
  }
  void ReadableFile(const char* field, const std::string& path) {
    if (!path.empty() && access(path.c_str(), R_OK) != 0) {
      Report(field, StrCat("cannot read ", path));
    }
  }
  void Report(const std::string& field, const std::string& what) {
    const auto origin = sources_.origins.find(field);
    problems_->push_back(
        StrCat(origin == sources_.origins.end() ? StrCat("--", field)
               : origin->second == StrCat("--", field) || origin->second == EnvironmentName(field)
                   ? origin->second
                   : StrCat(origin->second, ": ", field),
               ": ", what));
  }

 private:
  const ConfigSources& sources_;
  std::vector<std::string>* const problems_;
};

bool IsDevice(const std::string& device) {
  if (device == "cpu") return true;
  const std::string prefix = "cuda:";
  return device.rfind(prefix, 0) == 0 && device.size() > prefix.size() && device.size() <= 8 &&
         device.find_first_not_of("0123456789", prefix.size()) == std::string::npos;
}

void ValidateTls(const rpc::TlsFiles& tls, Validator* validator) {
  if (tls.cert.empty() != tls.key.empty()) {
    validator->Report(tls.cert.empty() ? "tls_key" : "tls_cert",
                      "got one of tls_cert and tls_key, need both or none");
  }
  if (!tls.client_ca.empty() && tls.cert.empty()) {
    validator->Report("tls_client_ca", "got it without tls_cert, need both");
  }
  validator->ReadableFile("tls_cert", tls.cert);
  validator->ReadableFile("tls_key", tls.key);
  validator->ReadableFile("tls_client_ca", tls.client_ca);
}

void Validate(const v1::ServerConfig& message, const Config& config, Validator* validator) {
  validator->Address("listen", config.listen);
  if (!config.probe_listen.empty()) validator->Address("probe_listen", config.probe_listen);
  if (config.advertise.find(':') != std::string::npos) {
    validator->Address("advertise", config.advertise);
  }
  if (!IsDevice(config.device)) {
    validator->Report("device", StrCat("got \"", config.device, "\", need cpu or cuda:N"));
  }
  validator->Range("slot", config.slot, 0, kMaxSlot);
  validator->Range("cpu_threads", config.cpu_threads, 0, 1024);
  validator->Range("max_receive_message_bytes", config.max_receive_message_bytes, kMiB,
                   kMaxMessage);
  validator->Range("queue_capacity", config.queue_capacity, 1, 1'000'000);
  validator->Range("bytes_in_flight", config.bytes_in_flight, kMiB, kMaxBytes);
  validator->Range("tensor_memory_bytes", config.tensor_memory_bytes, 0, kMaxBytes);
  validator->Range("simulate", config.simulate, 0, kMaxSimulated);
  validator->Range("drain_seconds", config.drain_seconds, 0, kMaxDrainSeconds);
  if (!ParseLogLevel(message.log_level())) {
    validator->Report("log_level", StrCat("got \"", message.log_level(),
                                          "\", need debug, info, warning or error"));
  }
  if (config.simulate > 0 && config.device != "cpu") {
    validator->Report("simulate", StrCat("got device ", config.device, ", need cpu"));
  }
  ValidateTls(config.tls, validator);
}

// The address with its port moved by `offset`; port 0 stays.
std::string MovePort(const std::string& address, int64_t offset) {
  const absl::StatusOr<HostPort> parsed = ParseHostPort(address);
  if (!parsed.ok() || parsed->port == 0) return address;
  return JoinHostPort(parsed->host, parsed->port + static_cast<int>(offset));
}

}  // namespace

Config DefaultConfig() { return ToConfig(DefaultMessage()); }

absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args,
                                             const Environment& environment) {
  ConfigSources sources = ReadSources(args, environment);
  CommandLine line;
  line.command = sources.command;
  if (line.command != Command::kServe) return line;
  v1::ServerConfig message = DefaultMessage();
  message.MergeFrom(sources.message);
  line.config = ToConfig(message);
  std::vector<std::string> problems = sources.problems;
  Validator validator(sources, &problems);
  Validate(message, line.config, &validator);
  if (!problems.empty()) {
    return Error(Reason::kConfigInvalid).Text(absl::StrJoin(problems, "\n"));
  }
  for (const FlagRow& row : kFlags) {
    line.values.emplace_back(row.name, FieldText(message, row.name));
  }
  return line;
}

std::string HelpText() {
  std::string text =
      "expertd: one rank of a distributed Mixture-of-Experts expert service.\n\n"
      "Flags, as --name=value or --name value. Each is also an environment variable\n"
      "EXPERTD_NAME and a field of the textproto that --config names; a flag beats the\n"
      "environment, which beats the file.\n\n";
  for (const FlagRow& row : kFlags) {
    StrAppend(&text, "  --", row.name, "  (", EnvironmentName(row.name), ")\n      ", row.help);
    if (row.fallback[0] != '\0') StrAppend(&text, "; default ", row.fallback);
    StrAppend(&text, "\n");
  }
  StrAppend(&text,
            "  --config  (EXPERTD_CONFIG)\n      file with a textproto expertd.v1.ServerConfig\n"
            "  --version, --help\n\n"
            "Once it serves, one line on stdout gives the bound addresses:\n"
            "  listening address=HOST:PORT probe_address=HOST:PORT\n"
            "with --simulate one line per daemon:\n"
            "  listening slot=N address=HOST:PORT probe_address=HOST:PORT\n\n"
            "SIGTERM and SIGINT finish queued steps for up to drain_seconds, then stop; a second\n"
            "one stops at once.\n\nExit codes:\n",
            ExitCodeHelp());
  return text;
}

std::vector<Config> SimulatedConfigs(const Config& config) {
  std::vector<Config> configs;
  for (int64_t i = 0; i < config.simulate; ++i) {
    Config& added = configs.emplace_back(config);
    added.simulate = 0;
    added.slot += i;
    added.listen = MovePort(config.listen, i);
    added.probe_listen = MovePort(config.probe_listen, i);
    added.advertise = MovePort(config.advertise, i);
    if (!config.data_dir.empty()) added.data_dir = StrCat(config.data_dir, "/", added.slot);
    added.default_backend = "loopback";
  }
  return configs;
}

}  // namespace expertd::server
