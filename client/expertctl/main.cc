// expertctl: the control plane's command line. Finds the verb, runs it, reports its error.
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/expertctl/common.h"
#include "client/expertctl/flags.h"
#include "client/expertctl/verbs.h"

namespace expertd::expertctl {
namespace {

struct Verb {
  const char* name;
  const char* summary;
  absl::StatusOr<int> (*run)(const Args& args);
};

constexpr Verb kVerbs[] = {
    {"up", "form the group and create the layers of the group file", RunUp},
    {"status", "what every daemon is and is in", RunStatus},
    {"describe", "the group, its layers and where every shard lives", RunDescribe},
    {"plan", "memory and message sizes of a config; needs no daemon", RunPlan},
    {"forward", "one forward of random tokens through a layer", RunForward},
    {"train", "train a small language model through the group; --demo starts daemons", RunTrain},
    {"bench", "latency of the operations as a client sees it", RunBench},
    {"save", "save a layer's weights as a checkpoint", RunSave},
    {"load", "load a layer's weights from a checkpoint", RunLoad},
    {"drain", "let every daemon finish and take no new work; --resume undoes it", RunDrain},
    {"down", "leave the group; layers stay", RunDown},
    {"doctor", "look for what keeps a group from forming", RunDoctor},
    {"conformance", "check a live group against the documented semantics", RunConformance},
    {"top", "watch the experts' load", RunTop},
};

constexpr char kExitCodes[] =
    "Exit codes:\n"
    "  0    done\n"
    "  1    failed, or doctor and conformance found a problem; the error is on stderr\n"
    "  2    not available yet in these daemons\n"
    "  64   wrong flags\n"
    "  130  ended by a signal\n";

void PrintHelp(std::FILE* out) {
  absl::FPrintF(out, "usage: expertctl VERB [--flag=value ...]\n\n");
  for (const Verb& verb : kVerbs) absl::FPrintF(out, "  %-12s %s\n", verb.name, verb.summary);
  absl::FPrintF(out,
                "\nEvery verb takes --hosts a:p,b:p,... or --config group.textproto, --json and "
                "--help.\n\n%s",
                kExitCodes);
}

bool WantsJson(const Args& args) {
  for (const std::string& arg : args) {
    if (arg == "--json" || arg == "--json=true") return true;
  }
  return false;
}

int Finish(const Verb& verb, const Args& args) {
  const absl::StatusOr<int> code = verb.run(args);
  if (code.ok()) return *code;
  const absl::Status& status = code.status();
  if (IsHelp(status)) {
    absl::FPrintF(stdout, "%s\n%s", status.message(), kExitCodes);
    return kExitOk;
  }
  PrintError(verb.name, status, WantsJson(args));
  if (IsUsageError(status)) {
    absl::FPrintF(stderr, "see: expertctl %s --help\n", verb.name);
    return kExitUsage;
  }
  if (absl::IsUnimplemented(status)) {
    absl::FPrintF(stderr, "expertctl %s: not available yet\n", verb.name);
    return kExitNotAvailable;
  }
  return StopFlag()->load() ? kExitInterrupted : kExitFailed;
}

int Main(int argc, char** argv) {
  const Args words(argv + 1, argv + argc);
  if (words.empty()) {
    PrintHelp(stderr);
    return kExitUsage;
  }
  if (words[0] == "--help" || words[0] == "-h" || words[0] == "help") {
    PrintHelp(stdout);
    return kExitOk;
  }
  for (const Verb& verb : kVerbs) {
    if (words[0] != verb.name) continue;
    InstallSignalHandlers();
    return Finish(verb, Args(words.begin() + 1, words.end()));
  }
  absl::FPrintF(stderr, "expertctl: no verb \"%s\"\n\n", words[0]);
  PrintHelp(stderr);
  return kExitUsage;
}

}  // namespace
}  // namespace expertd::expertctl

int main(int argc, char** argv) { return expertd::expertctl::Main(argc, argv); }
