// Shared parts of the verbs.
#include "client/expertctl/common.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>

#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/group_config_file.h"
#include "client/cpp/json.h"

namespace expertd::expertctl {
namespace {

constexpr absl::Duration kQuickRetry = absl::Seconds(2);

// Written by the signal handler: lock-free atomics only.
std::atomic<bool> g_stop{false};
std::atomic<bool> g_cancel{false};
std::atomic<int> g_interrupts{0};

void OnSignal(int number) {
  g_stop.store(true);
  if (number != SIGINT) {
    g_cancel.store(true);
    return;
  }
  const int count = ++g_interrupts;
  if (count >= 2) g_cancel.store(true);
  if (count >= 3) _exit(kExitInterrupted);
}

}  // namespace

void TargetFlags::AddTo(FlagSet* flags) {
  flags->Add("hosts", "daemons as host:port,host:port,...", &hosts);
  flags->Add("config", "group file (textproto of expertd.v1.GroupFile)", &config);
  flags->Add("json", "print JSON on stdout", &json);
  flags->Add("timeout", "seconds for all of it", &timeout);
  flags->Add("tls_ca", "PEM authority of the daemons' certificates; empty: plaintext", &tls.ca);
  flags->Add("tls_cert", "PEM chain of our own, where daemons ask for one", &tls.cert);
  flags->Add("tls_key", "PEM private key of tls_cert", &tls.key);
}

absl::StatusOr<v1::GroupFile> TargetFlags::Read(Need need) {
  v1::GroupFile file;
  if (!config.empty()) {
    ASSIGN_OR_RETURN(file, client::ReadGroupFile(config));
  }
  if (!hosts.empty()) {
    file.clear_hosts();
    for (absl::string_view host : absl::StrSplit(hosts, ',', absl::SkipWhitespace())) {
      file.add_hosts(std::string(host));
    }
  }
  if (need == Need::kHosts && file.hosts().empty()) {
    return UsageError("got no daemons, need --hosts a:p,b:p,... or --config group.textproto");
  }
  if (!(timeout > 0)) return UsageError(StrCat("--timeout: got ", timeout, ", need more than 0"));
  ASSIGN_OR_RETURN(credentials_, client::MakeCredentials(tls));
  return file;
}

client::CallOptions TargetFlags::Options() const {
  return {.deadline = absl::Now() + absl::Seconds(timeout),
          .stop = StopFlag(),
          .credentials = credentials_};
}

client::CallOptions TargetFlags::QuickOptions() const {
  client::CallOptions options = Options();
  options.retry_window = kQuickRetry;
  return options;
}

absl::StatusOr<Session> OpenSession(TargetFlags& target) {
  ASSIGN_OR_RETURN(const v1::GroupFile file, target.Read(TargetFlags::Need::kHosts));
  Session session;
  ASSIGN_OR_RETURN(session.group, client::Attach(Hosts(file), target.QuickOptions()));
  session.driver =
      std::make_unique<client::StepDriver>(session.group, client::StepOptions{.stop = StopFlag()});
  return session;
}

std::vector<std::string> Hosts(const v1::GroupFile& file) {
  return {file.hosts().begin(), file.hosts().end()};
}

void InstallSignalHandlers() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  sigemptyset(&action.sa_mask);
  for (int number : {SIGINT, SIGTERM, SIGHUP}) sigaction(number, &action, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

const std::atomic<bool>* StopFlag() { return &g_stop; }
const std::atomic<bool>* CancelFlag() { return &g_cancel; }

void PrintLine(std::string_view line) {
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fputc('\n', stdout);
  std::fflush(stdout);
}

std::string HumanBytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? StrCat(bytes, " B") : absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

void PrintError(const std::string& verb, const absl::Status& status, bool json) {
  absl::FPrintF(stderr, "expertctl %s: %s\n", verb, status.message());
  if (!json) return;
  client::JsonObject metadata;
  const ErrorDetail detail = DetailOf(status);
  for (const auto& [key, value] : detail.metadata) metadata.Add(key, value);
  std::vector<std::string> violations;
  for (const FieldViolation& violation : detail.violations) {
    client::JsonObject one;
    one.Add("field", violation.path).Add("description", violation.description);
    violations.push_back(one.Text());
  }
  client::JsonObject error;
  error.Add("code", absl::StatusCodeToString(status.code()));
  if (client::HasDetail(status)) error.Add("reason", ReasonName(detail.reason));
  error.Add("message", status.message())
      .AddRaw("metadata", metadata.Text())
      .AddRaw("violations", client::JsonArray(violations));
  client::JsonObject object;
  PrintLine(object.AddRaw("error", error.Text()).Text());
}

}  // namespace expertd::expertctl
