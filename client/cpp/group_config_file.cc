// Parsing a GroupFile with all problems reported at once.
#include "client/cpp/group_config_file.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/strings.h"
#include "client/cpp/channel.h"
#include "client/cpp/tensor.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/text_format.h"

namespace expertd::client {
namespace {

// Turns what the parser finds into violations; lines and columns count from 1.
class Collector : public google::protobuf::io::ErrorCollector {
 public:
  Collector(const std::string& name, Violations* violations)
      : name_(name), violations_(violations) {}
  void AddError(int line, google::protobuf::io::ColumnNumber column,
                const std::string& message) override {
    violations_->Add(Reason::kConfigInvalid, StrCat(name_, ":", line + 1, ":", column + 1),
                     message);
  }

 private:
  const std::string& name_;
  Violations* violations_;
};

void CheckMeaning(const v1::GroupFile& file, Violations* violations) {
  for (int i = 0; i < file.hosts_size(); ++i) {
    const absl::Status status = CheckAddress(file.hosts(i));
    if (status.ok()) continue;
    violations->Add(Reason::kConfigInvalid, StrCat("hosts[", i, "]"),
                    std::string(status.message()));
  }
  std::set<std::string> ids;
  for (int i = 0; i < file.layers_size(); ++i) {
    const std::string& id = file.layers(i).layer_id();
    if (id.empty() || !ids.insert(id).second) {
      violations->Add(Reason::kConfigInvalid, StrCat("layers[", i, "].layer_id"),
                      StrCat("got \"", id, "\", need an id of its own"));
    }
  }
}

}  // namespace

absl::StatusOr<v1::GroupFile> ParseGroupFile(const std::string& text, const std::string& name) {
  Violations violations;
  Collector collector(name, &violations);
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&collector);
  v1::GroupFile file;
  if (!parser.ParseFromString(text, &file) && violations.empty()) {
    violations.Add(Reason::kConfigInvalid, name, "got text that is no GroupFile");
  }
  CheckMeaning(file, &violations);
  if (!violations.empty()) return violations.ToStatus("group file");
  return file;
}

absl::StatusOr<v1::GroupFile> ReadGroupFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  if (in) text << in.rdbuf();
  if (!in) return absl::NotFoundError(StrCat(path, ": the group file cannot be read"));
  return ParseGroupFile(text.str(), path);
}

GroupSizes SizesOf(const v1::GroupConfig& config, int64_t hosts) {
  GroupSizes sizes;
  const int64_t dp = std::max<int64_t>(1, config.dp_size());
  sizes.ranks = std::max<int64_t>(1, config.ep_size() > 0 ? config.ep_size() : hosts / dp);
  sizes.max_tokens_per_rank = config.max_tokens_per_rank();
  sizes.max_recv_rows = config.max_recv_rows_per_rank();
  sizes.max_hidden = config.max_hidden();
  sizes.max_top_k = config.max_top_k();
  sizes.max_experts = config.max_experts();
  const int64_t bytes = ElementBytes(config.max_token_dtype());
  sizes.token_bytes = bytes > 0 ? bytes : 4;
  sizes.device_window = config.backend() == "nccl_lsa";
  return sizes;
}

LayerSizes SizesOf(const v1::LayerConfig& config) {
  LayerSizes sizes;
  sizes.expert_count = config.expert_count();
  sizes.hidden = config.hidden();
  sizes.intermediate = config.intermediate();
  sizes.top_k = config.top_k();
  sizes.alignment = std::max<int64_t>(1, config.alignment());
  sizes.token_bytes = std::max<int64_t>(1, ElementBytes(config.token_dtype()));
  sizes.weight_bytes = std::max<int64_t>(1, ElementBytes(config.weight_dtype()));
  sizes.gate_up_bias = config.gate_up_bias();
  sizes.down_bias = config.down_bias();
  sizes.server_router = config.router().on_server();
  sizes.router = config.router().kind() != v1::ROUTER_KIND_NONE;
  const v1::OptimizerConfig& optimizer = config.optimizer();
  if (optimizer.kind() == v1::OPTIMIZER_KIND_ADAMW) sizes.optimizer_states = 2;
  if (optimizer.kind() == v1::OPTIMIZER_KIND_SGD) {
    sizes.optimizer_states = optimizer.momentum() != 0 ? 1 : 0;
  }
  return sizes;
}

}  // namespace expertd::client
