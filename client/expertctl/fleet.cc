// Processes, pipes and logs of the demo's daemons.
#include "client/expertctl/fleet.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd::expertctl {
namespace {

constexpr int kReapTries = 200;
constexpr int kReapPauseMs = 10;

constexpr absl::Duration kTermWait = absl::Seconds(8);
constexpr absl::Duration kPoll = absl::Milliseconds(20);
constexpr off_t kLogTail = 1500;

// Only calls that are safe between fork and exec.
[[noreturn]] void RunChild(pid_t parent, int out, int log, char* const* argv) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // The parent died before the line above.
  setpgid(0, 0);  // Ctrl-C of the terminal is for the parent, which ends us in order.
  dup2(out, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  for (int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) signal(number, SIG_DFL);
  execv(argv[0], argv);
  _exit(127);
}

std::string Tail(int log) {
  const off_t size = lseek(log, 0, SEEK_END);
  std::string tail(static_cast<size_t>(std::clamp<off_t>(size, 0, kLogTail)), '\0');
  const ssize_t got = pread(log, tail.data(), tail.size(), size - static_cast<off_t>(tail.size()));
  tail.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return tail;
}

std::string DescribeExit(int status) {
  if (WIFSIGNALED(status)) return StrCat("was killed by signal ", WTERMSIG(status));
  return StrCat("exited with code ", WEXITSTATUS(status));
}

}  // namespace

std::string ParseListening(const std::string& line) {
  if (!absl::StartsWith(line, "listening ")) return "";
  for (absl::string_view field : absl::StrSplit(line, ' ')) {
    if (absl::StartsWith(field, "address=")) return std::string(field.substr(8));
  }
  return "";
}

std::string BesideSelf(const std::string& name) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  return (self.parent_path() / name).string();
}

absl::StatusOr<std::unique_ptr<Fleet>> Fleet::Start(const std::string& program,
                                                    const std::string& device, int64_t count,
                                                    absl::Time deadline) {
  if (access(program.c_str(), X_OK) != 0) {
    return absl::NotFoundError(StrCat(program, ": ", std::strerror(errno), "; build expertd"));
  }
  std::unique_ptr<Fleet> fleet(new Fleet());
  // Together the daemons fill the machine once: more threads would only wait for each other.
  const int64_t threads =
      std::max<int64_t>(1, static_cast<int64_t>(std::thread::hardware_concurrency()) / count);
  for (int64_t slot = 0; slot < count; ++slot) {
    RETURN_IF_ERROR(fleet->StartOne(program, device, slot, threads));
  }
  for (Child& child : fleet->children_) {
    absl::Status status = fleet->AwaitAddress(&child, deadline);
    if (!status.ok()) {
      status = absl::Status(status.code(), StrCat(status.message(), "\n", fleet->Describe()));
      fleet->Stop();
      return status;
    }
  }
  return fleet;
}

absl::Status Fleet::StartOne(const std::string& program, const std::string& device, int64_t slot,
                             int64_t threads) {
  Child child;
  // In memory, without a name: nothing is left over however this process ends. O_APPEND, because
  // reading its end moves the offset that the child shares.
  child.log = memfd_create("expertd-log", MFD_CLOEXEC);
  int ends[2] = {-1, -1};
  if (child.log < 0 || fcntl(child.log, F_SETFL, O_APPEND) != 0 || pipe2(ends, O_CLOEXEC) != 0) {
    if (child.log >= 0) close(child.log);
    return absl::InternalError(StrCat("starting slot ", slot, ": ", std::strerror(errno)));
  }
  std::vector<std::string> words = {
      program,          "--listen",     "127.0.0.1:0",
      "--probe_listen", "127.0.0.1:0",  "--slot",
      StrCat(slot),     "--device",     device == "cpu" ? device : StrCat(device, ":", slot),
      "--cpu_threads",  StrCat(threads)};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  child.pid = fork();
  if (child.pid == 0) RunChild(parent, ends[1], child.log, argv.data());
  close(ends[1]);
  child.out = ends[0];
  if (child.pid < 0) {
    close(child.out);
    close(child.log);
    return absl::InternalError(StrCat("fork: ", std::strerror(errno)));
  }
  children_.push_back(std::move(child));
  return absl::OkStatus();
}

absl::Status Fleet::AwaitAddress(Child* child, absl::Time deadline) {
  std::string text;
  for (;;) {
    pollfd ready = {child->out, POLLIN, 0};
    const int64_t left_ms = absl::ToInt64Milliseconds(deadline - absl::Now());
    if (left_ms <= 0) {
      return absl::UnavailableError("a daemon did not say in time where it listens");
    }
    const int count = poll(&ready, 1, static_cast<int>(std::min<int64_t>(left_ms, 1000)));
    if (count < 0 && errno == EINTR) return absl::CancelledError("interrupted");
    if (count <= 0) continue;
    char buffer[4096];
    const ssize_t got = read(child->out, buffer, sizeof(buffer));
    if (got <= 0) {
      // Its output closes a moment before its end can be seen, which the report shall name.
      for (int tries = 0; child->pid > 0 && tries < kReapTries; ++tries) {
        Reap();
        poll(nullptr, 0, kReapPauseMs);
      }
      return absl::UnavailableError("a daemon ended before it listened");
    }
    text.append(buffer, static_cast<size_t>(got));
    for (absl::string_view line : absl::StrSplit(text, '\n')) {
      child->address = ParseListening(std::string(line));
      // The last piece may be half a line: only a newline after it makes it whole.
      if (!child->address.empty() && line.end() != text.data() + text.size()) {
        return absl::OkStatus();
      }
    }
  }
}

std::vector<std::string> Fleet::hosts() const {
  std::vector<std::string> hosts;
  for (const Child& child : children_) hosts.push_back(child.address);
  return hosts;
}

bool Fleet::Reap() {
  bool none = true;
  for (Child& child : children_) {
    if (child.pid < 0) continue;
    int status = 0;
    if (waitpid(child.pid, &status, WNOHANG) == child.pid) {
      child.pid = -1;
      child.exit_status = status;
    } else {
      none = false;
    }
  }
  return none;
}

void Fleet::Signal(int number) {
  for (const Child& child : children_) {
    if (child.pid > 0) kill(child.pid, number);
  }
}

void Fleet::Stop() {
  Signal(SIGTERM);
  const absl::Time end = absl::Now() + kTermWait;
  while (!Reap() && absl::Now() < end) absl::SleepFor(kPoll);
  Signal(SIGKILL);
  while (!Reap()) absl::SleepFor(kPoll);  // A killed child is gone in a moment.
}

std::string Fleet::Describe() {
  Reap();
  std::string text;
  for (size_t slot = 0; slot < children_.size(); ++slot) {
    const Child& child = children_[slot];
    StrAppend(&text, "--- daemon of slot ", slot, " ",
              child.pid > 0 ? "is running" : DescribeExit(child.exit_status), "; its log ends:\n",
              Tail(child.log), "\n");
  }
  return text;
}

Fleet::~Fleet() {
  Signal(SIGKILL);
  while (!Reap()) absl::SleepFor(kPoll);
  for (const Child& child : children_) {
    close(child.out);
    close(child.log);
  }
}

}  // namespace expertd::expertctl
