// Parsing of command-line flags.
#include "client/expertctl/flags.h"

#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/strings.h"

namespace expertd::expertctl {
namespace {

constexpr char kUsageUrl[] = "expertctl/usage";
constexpr char kHelpUrl[] = "expertctl/help";

absl::Status Marked(absl::StatusCode code, std::string_view text, const char* url) {
  absl::Status status(code, AbslView(text));
  status.SetPayload(url, absl::Cord("1"));
  return status;
}

std::string DefaultText(const FlagSet::Target& target) {
  if (const auto* text = std::get_if<std::string*>(&target)) return StrCat("\"", **text, "\"");
  if (const auto* number = std::get_if<int64_t*>(&target)) return StrCat(**number);
  if (const auto* number = std::get_if<double*>(&target)) return StrCat(**number);
  return *std::get<bool*>(target) ? "true" : "false";
}

}  // namespace

absl::Status UsageError(std::string_view text) {
  return Marked(absl::StatusCode::kInvalidArgument, text, kUsageUrl);
}
bool IsUsageError(const absl::Status& status) { return status.GetPayload(kUsageUrl).has_value(); }
bool IsHelp(const absl::Status& status) { return status.GetPayload(kHelpUrl).has_value(); }

void FlagSet::Add(std::string name, std::string help, Target target) {
  std::string default_text = DefaultText(target);
  flags_.push_back({std::move(name), std::move(help), target, std::move(default_text)});
}

FlagSet::Flag* FlagSet::Find(std::string_view name) {
  for (Flag& flag : flags_) {
    if (flag.name == name) return &flag;
  }
  return nullptr;
}

bool FlagSet::Given(std::string_view name) const {
  for (const Flag& flag : flags_) {
    if (flag.name == name) return flag.given;
  }
  return false;
}

std::string FlagSet::Set(Flag* flag, const std::string& value) {
  flag->given = true;
  if (auto* text = std::get_if<std::string*>(&flag->target)) {
    **text = value;
    return {};
  }
  if (auto* number = std::get_if<int64_t*>(&flag->target)) {
    if (absl::SimpleAtoi(value, *number)) return {};
    return StrCat("--", flag->name, ": got \"", value, "\", need an integer");
  }
  if (auto* number = std::get_if<double*>(&flag->target)) {
    if (absl::SimpleAtod(value, *number)) return {};
    return StrCat("--", flag->name, ": got \"", value, "\", need a number");
  }
  if (absl::SimpleAtob(value, std::get<bool*>(flag->target))) return {};
  return StrCat("--", flag->name, ": got \"", value, "\", need true or false");
}

absl::Status FlagSet::Parse(const std::vector<std::string>& args) {
  std::vector<std::string> problems;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg == "--help" || arg == "-h") {
      return Marked(absl::StatusCode::kCancelled, Help(), kHelpUrl);
    }
    if (arg.rfind("--", 0) != 0) {
      problems.push_back(StrCat("got the word \"", arg, "\", need flags (--name=value)"));
      continue;
    }
    const size_t equals = arg.find('=');
    const bool has_value = equals != std::string::npos;
    const std::string name = arg.substr(2, has_value ? equals - 2 : std::string::npos);
    std::string value = has_value ? arg.substr(equals + 1) : "";
    Flag* flag = Find(name);
    if (flag == nullptr && !has_value && name.rfind("no", 0) == 0) {
      flag = Find(std::string_view(name).substr(2));
      if (flag != nullptr && std::holds_alternative<bool*>(flag->target)) {
        Set(flag, "false");
        continue;
      }
      flag = nullptr;
    }
    if (flag == nullptr) {
      problems.push_back(StrCat("--", name, ": no such flag of ", verb_));
      continue;
    }
    if (!has_value && std::holds_alternative<bool*>(flag->target)) {
      value = "true";
    } else if (!has_value) {
      if (i + 1 == args.size() || args[i + 1].rfind("--", 0) == 0) {
        problems.push_back(StrCat("--", name, ": got no value"));
        continue;
      }
      value = args[++i];
    }
    if (std::string problem = Set(flag, value); !problem.empty()) problems.push_back(problem);
  }
  if (problems.empty()) return absl::OkStatus();
  return UsageError(absl::StrJoin(problems, "\n"));
}

std::string FlagSet::Help() const {
  std::string text = StrCat("expertctl ", verb_, ": ", summary_, "\n\n");
  for (const Flag& flag : flags_) {
    absl::StrAppendFormat(&text, "  --%-24s %s (default %s)\n", flag.name, flag.help,
                          flag.default_text);
  }
  return text;
}

}  // namespace expertd::expertctl
