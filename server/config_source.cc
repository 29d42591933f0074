// The fields of ServerConfig are the flags: names and types come from the message's descriptor.
#include "server/config_source.h"

#include <cctype>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "base/strings.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/text_format.h"

namespace expertd::server {
namespace {

using google::protobuf::FieldDescriptor;

const FieldDescriptor* FindField(std::string_view name) {
  return v1::ServerConfig::descriptor()->FindFieldByName(std::string(name));
}

// Sets one field from text. Reports a value that is not of the field's type.
void SetField(const FieldDescriptor& field, const std::string& text, const std::string& origin,
              ConfigSources* sources) {
  const auto* reflection = sources->message.GetReflection();
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    reflection->SetString(&sources->message, &field, text);
  } else {
    int64_t number = 0;
    if (!absl::SimpleAtoi(text, &number)) {
      sources->problems.push_back(
          StrCat(origin, ": got \"", text, "\", need a whole number of 64 bits"));
      return;
    }
    reflection->SetInt64(&sources->message, &field, number);
  }
  sources->origins[field.name()] = origin;
}

// Collects what the text parser finds. Unknown fields come as warnings, so that parsing goes on.
class FileProblems final : public google::protobuf::io::ErrorCollector {
 public:
  FileProblems(std::string path, std::vector<std::string>* problems)
      : path_(std::move(path)), problems_(problems) {}

  void AddError(int line, google::protobuf::io::ColumnNumber column,
                const std::string& message) override {
    problems_->push_back(StrCat(path_, ":", line + 1, ":", column + 1, ": ", message));
  }
  void AddWarning(int line, google::protobuf::io::ColumnNumber column,
                  const std::string& message) override {
    AddError(line, column, message);
  }

 private:
  const std::string path_;
  std::vector<std::string>* const problems_;
};

void ReadFile(const std::string& path, ConfigSources* sources) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) {
    sources->problems.push_back(StrCat("--config: cannot read ", path));
    return;
  }
  FileProblems problems(path, &sources->problems);
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&problems);
  parser.AllowUnknownField(true);
  parser.ParseFromString(text.str(), &sources->message);
  std::vector<const FieldDescriptor*> fields;
  sources->message.GetReflection()->ListFields(sources->message, &fields);
  for (const FieldDescriptor* field : fields) sources->origins[field->name()] = path;
}

void ReadEnvironment(const Environment& environment, ConfigSources* sources) {
  for (int i = 0; i < v1::ServerConfig::descriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *v1::ServerConfig::descriptor()->field(i);
    const std::string name = EnvironmentName(field.name());
    const auto found = environment.find(name);
    if (found == environment.end() || found->second.empty()) continue;
    SetField(field, found->second, name, sources);
  }
}

struct Flag {
  std::string name;
  std::string value;
};

// The flags of the command line; both "--name=value" and "--name value".
std::vector<Flag> SplitFlags(const std::vector<std::string>& args, ConfigSources* sources) {
  std::vector<Flag> flags;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg == "--help" || arg == "-h") {
      sources->command = Command::kHelp;
      continue;
    }
    if (arg == "--version") {
      sources->command = Command::kVersion;
      continue;
    }
    if (arg.rfind("--", 0) != 0) {
      sources->problems.push_back(StrCat("got argument \"", arg, "\", need only flags"));
      continue;
    }
    const size_t equals = arg.find('=');
    const std::string name = arg.substr(2, equals == std::string::npos ? equals : equals - 2);
    if (FindField(name) == nullptr && name != "config") {
      sources->problems.push_back(StrCat("unknown flag --", name));
      // A value behind it belongs to it.
      if (equals == std::string::npos && i + 1 < args.size() && args[i + 1].rfind("--", 0) != 0)
        ++i;
    } else if (equals != std::string::npos) {
      flags.push_back({name, arg.substr(equals + 1)});
    } else if (i + 1 < args.size()) {
      flags.push_back({name, args[++i]});
    } else {
      sources->problems.push_back(StrCat("--", name, ": got no value, need one"));
    }
  }
  return flags;
}

}  // namespace

std::string EnvironmentName(std::string_view field) {
  std::string name = "EXPERTD_";
  for (const char c : field) {
    name.push_back(static_cast<char>(std::toupper(static_cast<unsigned char>(c))));
  }
  return name;
}

std::string FieldText(const v1::ServerConfig& message, const std::string& field) {
  const FieldDescriptor* descriptor = FindField(field);
  const auto* reflection = message.GetReflection();
  return descriptor->cpp_type() == FieldDescriptor::CPPTYPE_STRING
             ? reflection->GetString(message, descriptor)
             : StrCat(reflection->GetInt64(message, descriptor));
}

ConfigSources ReadSources(const std::vector<std::string>& args, const Environment& environment) {
  ConfigSources sources;
  const std::vector<Flag> flags = SplitFlags(args, &sources);
  std::string file;
  if (const auto found = environment.find("EXPERTD_CONFIG"); found != environment.end()) {
    file = found->second;
  }
  for (const Flag& flag : flags) {
    if (flag.name == "config") file = flag.value;
  }
  if (!file.empty()) ReadFile(file, &sources);
  ReadEnvironment(environment, &sources);
  for (const Flag& flag : flags) {
    if (flag.name != "config") {
      SetField(*FindField(flag.name), flag.value, StrCat("--", flag.name), &sources);
    }
  }
  return sources;
}

}  // namespace expertd::server
