// Starts one daemon or several, waits for a signal, shuts them down.
#include "server/process.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/strings.h"
#include "kernels/backends.h"
#include "server/daemon.h"
#include "server/version.h"

namespace expertd::server {
namespace {

using Daemons = std::vector<std::unique_ptr<Daemon>>;

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

void PrintLine(const std::string& line) {
  fputs(line.c_str(), stdout);
  fflush(stdout);
}

void LogConfig(const CommandLine& line) {
  Log log(LogLevel::kInfo, "config");
  log.Field("version", Version());
  for (const auto& [name, value] : line.values) log.Field(name, value);
}

absl::StatusOr<Daemons> StartDaemons(const Config& config) {
  const std::vector<Config> configs =
      config.simulate > 0 ? SimulatedConfigs(config) : std::vector<Config>{config};
  Daemons daemons;
  for (const Config& one : configs) {
    absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Create(one);
    if (!daemon.ok()) return daemon.status();
    daemons.push_back(*std::move(daemon));
    PrintLine(StrCat("listening ", config.simulate > 0 ? StrCat("slot=", one.slot, " ") : "",
                     "address=", daemons.back()->address(),
                     " probe_address=", daemons.back()->probe_address(), "\n"));
  }
  return daemons;
}

// All at once: daemons of one group wait for each other.
void ShutdownAll(const Daemons& daemons, SteadyTime deadline) {
  std::vector<std::thread> threads;
  for (const std::unique_ptr<Daemon>& daemon : daemons) {
    threads.emplace_back([&daemon, deadline] { daemon->Shutdown(deadline); });
  }
  for (std::thread& thread : threads) thread.join();
}

ExitCode Serve(const CommandLine& line) {
  // Blocked in every thread that is started from here on, so that only sigwait sees them.
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  SetLogLevel(line.config.log_level);
  LogConfig(line);
  // Process-wide, so it is set here and not per daemon.
  if (line.config.cpu_threads > 0) SetCpuThreads(static_cast<int>(line.config.cpu_threads));
  absl::StatusOr<Daemons> daemons = StartDaemons(line.config);
  if (!daemons.ok()) {
    fprintf(stderr, "expertd: %s\n", std::string(daemons.status().message()).c_str());
    return ExitCodeOf(daemons.status());
  }
  int signal = 0;
  sigwait(&signals, &signal);
  Log(LogLevel::kInfo, "stopping").Field("signal", signal);
  // A second signal finds its default action, which ends the process at once.
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  ShutdownAll(*daemons, Clock::Real().Now() + std::chrono::seconds(line.config.drain_seconds));
  daemons->clear();
  Log(LogLevel::kInfo, "stopped");
  return ExitCode::kOk;
}

}  // namespace

ExitCode RunProcess(const std::vector<std::string>& args, const Environment& environment) {
  const absl::StatusOr<CommandLine> line = ParseCommandLine(args, environment);
  if (!line.ok()) {
    fprintf(stderr, "expertd: bad config:\n%s\n", std::string(line.status().message()).c_str());
    return ExitCode::kUsage;
  }
  switch (line->command) {
    case Command::kHelp:
      PrintLine(HelpText());
      return ExitCode::kOk;
    case Command::kVersion:
      PrintLine(StrCat("expertd ", Version(), " (", Build(), ")\n"));
      return ExitCode::kOk;
    case Command::kServe:
      return Serve(*line);
  }
  return ExitCode::kInternal;
}

}  // namespace expertd::server
