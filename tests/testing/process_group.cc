// Starting, watching and ending the daemon processes of a test.
#include "tests/testing/process_group.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd::testing {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(5);
// A killed process is gone in a moment, unless the machine is in trouble.
constexpr absl::Duration kKillWait = absl::Seconds(20);
constexpr size_t kLogTail = 4000;

// Only calls that are safe between fork and exec.
[[noreturn]] void RunChild(pid_t parent, int out, int log, char* const* argv, char* const* envp) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // The parent died before the line above.
  setpgid(0, 0);                        // Ctrl-C of the terminal is for the test.
  dup2(out, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  for (int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) signal(number, SIG_DFL);
  execve(argv[0], argv, envp);
  _exit(127);
}

std::vector<std::string> ForSlot(const std::vector<std::string>& texts, int64_t slot) {
  std::vector<std::string> out;
  for (const std::string& text : texts) {
    out.push_back(absl::StrReplaceAll(text, {{"{slot}", StrCat(slot)}}));
  }
  return out;
}

// Null-terminated, as exec takes it; valid as long as `texts` is not changed.
std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

std::string DescribeEnd(const std::optional<int>& ended) {
  if (!ended) return "is running";
  if (WIFSIGNALED(*ended)) return StrCat("was killed by signal ", WTERMSIG(*ended));
  return StrCat("exited with code ", WEXITSTATUS(*ended));
}

}  // namespace

std::string FieldOf(const std::string& line, const std::string& word, const std::string& key) {
  if (!absl::StartsWith(line, word + " ")) return "";
  for (absl::string_view field : absl::StrSplit(line, ' ')) {
    if (absl::StartsWith(field, key + "=")) return std::string(field.substr(key.size() + 1));
  }
  return "";
}

std::string BinDir() {
  const char* folder = std::getenv("EXPERTD_BIN_DIR");
  if (folder != nullptr && *folder != '\0') return folder;
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  return self.parent_path().parent_path().string();
}

absl::StatusOr<std::unique_ptr<ProcessGroup>> ProcessGroup::Start(const ProcessOptions& options,
                                                                  absl::Time deadline) {
  std::unique_ptr<ProcessGroup> group(new ProcessGroup());
  group->program_ = BinDir() + "/expertd";
  if (access(group->program_.c_str(), X_OK) != 0) {
    return absl::NotFoundError(StrCat(group->program_, ": ", std::strerror(errno),
                                      "; build expertd or set EXPERTD_BIN_DIR"));
  }
  std::string folder = (std::filesystem::temp_directory_path() / "expertd-test-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) {
    return absl::InternalError(StrCat(folder, ": ", std::strerror(errno)));
  }
  group->folder_ = folder;
  group->flags_ = options.flags;
  group->environment_ = options.environment;
  for (int64_t i = 0; i < options.count; ++i) {
    RETURN_IF_ERROR(group->Spawn(options.first_slot + i));
  }
  for (Child& child : group->children_) {
    RETURN_IF_ERROR(group->AwaitAddress(child, deadline));
  }
  return group;
}

absl::Status ProcessGroup::Add(int64_t slot, absl::Time deadline) {
  RETURN_IF_ERROR(Spawn(slot));
  return AwaitAddress(children_.back(), deadline);
}

absl::Status ProcessGroup::Spawn(int64_t slot) {
  Child child;
  child.slot = slot;
  child.log = StrCat(folder_, "/daemon", children_.size(), ".log");
  const int log = open(child.log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  int ends[2] = {-1, -1};
  if (log < 0 || pipe2(ends, O_CLOEXEC) != 0) {
    const int error = errno;
    if (log >= 0) close(log);
    return absl::InternalError(StrCat("starting slot ", slot, ": ", std::strerror(error)));
  }
  std::vector<std::string> words = {program_,         "--listen",    "127.0.0.1:0",
                                    "--probe_listen", "127.0.0.1:0", "--slot",
                                    StrCat(slot),     "--device",    "cpu"};
  for (std::string& flag : ForSlot(flags_, slot)) words.push_back(std::move(flag));
  // The first of two values counts.
  std::vector<std::string> variables = ForSlot(environment_, slot);
  for (char** variable = environ; *variable != nullptr; ++variable)
    variables.emplace_back(*variable);
  const std::vector<char*> argv = Pointers(words);
  const std::vector<char*> envp = Pointers(variables);
  const pid_t parent = getpid();
  child.pid = fork();
  if (child.pid == 0) RunChild(parent, ends[1], log, argv.data(), envp.data());
  close(ends[1]);
  close(log);
  child.out = ends[0];
  if (child.pid < 0) {
    close(child.out);
    return absl::InternalError(StrCat("fork: ", std::strerror(errno)));
  }
  children_.push_back(std::move(child));
  return absl::OkStatus();
}

absl::Status ProcessGroup::AwaitAddress(Child& child, absl::Time deadline) {
  std::string text;
  while (child.address.empty()) {
    const int64_t left_ms = absl::ToInt64Milliseconds(deadline - absl::Now());
    if (left_ms <= 0) {
      return absl::UnavailableError(StrCat("the daemon of slot ", child.slot,
                                           " did not say in time where it listens; it wrote \"",
                                           text, "\"\n", Describe()));
    }
    pollfd ready = {child.out, POLLIN, 0};
    const int count = poll(&ready, 1, static_cast<int>(std::min<int64_t>(left_ms, 1000)));
    if (count <= 0) continue;
    char buffer[4096];
    const ssize_t got = read(child.out, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      (void)AwaitEnd(static_cast<size_t>(&child - children_.data()), deadline);
      return absl::UnavailableError(
          StrCat("the daemon of slot ", child.slot, " ended before it listened\n", Describe()));
    }
    text.append(buffer, static_cast<size_t>(got));
    const size_t complete = text.rfind('\n');
    if (complete == std::string::npos) continue;
    for (absl::string_view line : absl::StrSplit(text.substr(0, complete), '\n')) {
      if (!absl::StartsWith(line, "listening ")) continue;
      child.address = FieldOf(std::string(line), "listening", "address");
      child.probe_address = FieldOf(std::string(line), "listening", "probe_address");
    }
  }
  return absl::OkStatus();
}

std::vector<std::string> ProcessGroup::hosts() const {
  std::vector<std::string> hosts;
  for (const Child& child : children_) hosts.push_back(child.address);
  return hosts;
}

std::vector<std::string> ProcessGroup::probe_hosts() const {
  std::vector<std::string> hosts;
  for (const Child& child : children_) hosts.push_back(child.probe_address);
  return hosts;
}

bool ProcessGroup::Reap(Child& child) {
  if (child.ended) return true;
  int status = 0;
  if (waitpid(child.pid, &status, WNOHANG) != child.pid) return false;
  child.ended = status;
  return true;
}

void ProcessGroup::Signal(size_t index, int number) {
  Child& child = children_[index];
  if (!Reap(child)) kill(child.pid, number);
}

absl::StatusOr<int> ProcessGroup::AwaitEnd(size_t index, absl::Time deadline) {
  Child& child = children_[index];
  while (!Reap(child)) {
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(
          StrCat("the daemon of slot ", child.slot, ", process ", child.pid, ", still runs"));
    }
    absl::SleepFor(kPoll);
  }
  return *child.ended;
}

void ProcessGroup::Stop(absl::Time deadline) {
  for (size_t i = 0; i < children_.size(); ++i) Signal(i, SIGTERM);
  for (size_t i = 0; i < children_.size(); ++i) {
    if (AwaitEnd(i, deadline).ok()) continue;
    Signal(i, SIGKILL);
    (void)AwaitEnd(i, absl::Now() + kKillWait);
  }
}

std::string ProcessGroup::Log(size_t index) const { return ReadFile(children_[index].log); }

std::string ProcessGroup::Describe() {
  std::string text;
  for (Child& child : children_) {
    Reap(child);
    const std::string log = ReadFile(child.log);
    StrAppend(&text, "--- daemon of slot ", child.slot, " ", DescribeEnd(child.ended),
              "; its log ends:\n", log.size() <= kLogTail ? log : log.substr(log.size() - kLogTail),
              "\n");
  }
  return text;
}

ProcessGroup::~ProcessGroup() {
  for (size_t i = 0; i < children_.size(); ++i) Signal(i, SIGKILL);
  for (size_t i = 0; i < children_.size(); ++i) {
    (void)AwaitEnd(i, absl::Now() + kKillWait);
    close(children_[i].out);
  }
  std::error_code ignored;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

}  // namespace expertd::testing
