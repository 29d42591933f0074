// Command-line flags of one verb: declared with their variables, parsed with all problems at once.
//
//   FlagSet flags("forward", "Runs one forward.");
//   flags.Add("tokens", "tokens per rank", &tokens);
//   RETURN_IF_ERROR(flags.Parse(args));
// Takes --name=value, --name value, and for bool --name and --noname. The variable's value when it
// is added is the default.
#ifndef CLIENT_EXPERTCTL_FLAGS_H_
#define CLIENT_EXPERTCTL_FLAGS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"

namespace expertd::expertctl {

class FlagSet {
 public:
  using Target = std::variant<std::string*, int64_t*, double*, bool*>;

  FlagSet(std::string verb, std::string summary)
      : verb_(std::move(verb)), summary_(std::move(summary)) {}

  // The variable must outlive Parse.
  void Add(std::string name, std::string help, Target target);

  // Errors: one usage error with every unknown flag, missing or bad value and stray word.
  absl::Status Parse(const std::vector<std::string>& args);

  // True when Parse met --name.
  bool Given(std::string_view name) const;

  std::string Help() const;

 private:
  struct Flag {
    std::string name;
    std::string help;
    Target target;
    std::string default_text;
    bool given = false;
  };

  Flag* Find(std::string_view name);
  // The problem with `value`, or empty.
  static std::string Set(Flag* flag, const std::string& value);

  std::string verb_;
  std::string summary_;
  std::vector<Flag> flags_;
};

// An error of how the program was called: exit code kExitUsage.
absl::Status UsageError(std::string_view text);
bool IsUsageError(const absl::Status& status);
// --help was asked for: the text is the answer.
bool IsHelp(const absl::Status& status);

}  // namespace expertd::expertctl

#endif  // CLIENT_EXPERTCTL_FLAGS_H_
