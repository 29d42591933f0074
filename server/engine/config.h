// Group and layer configs as plain structs, their validation and their field-by-field comparison.
#ifndef SERVER_ENGINE_CONFIG_H_
#define SERVER_ENGINE_CONFIG_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/error.h"
#include "base/memory_plan.h"
#include "kernels/router/router_kernels.h"
#include "kernels/types.h"

namespace expertd::engine {

// Mirrors expertd.v1.GroupConfig; see there for meaning and units.
struct GroupConfig {
  int64_t dp_size = 1;
  int64_t ep_size = 1;
  std::string backend;
  int64_t max_tokens_per_rank = 0;
  int64_t max_recv_rows_per_rank = 0;
  int64_t max_hidden = 0;
  int64_t max_top_k = 0;
  int64_t max_experts = 0;
  DType max_token_dtype = DType::kF32;
  CapacityPolicy capacity_policy = CapacityPolicy::kRefuse;
  int64_t comm_sm_count = 0;
  int64_t base_timeout_ms = 0;
  int64_t kept_replies = 0;
  int64_t ticket_memory_bytes = 0;
  int64_t sequence_window = 0;

  // -1 when the product does not fit.
  int64_t world() const {
    int64_t product = 0;
    return __builtin_mul_overflow(dp_size, ep_size, &product) ? -1 : product;
  }
};

enum class OptimizerKind : uint8_t { kNone = 0, kSgd, kAdamW };

// Mirrors expertd.v1.OptimizerConfig.
struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kNone;
  double momentum = 0;
  double beta1 = 0;
  double beta2 = 0;
  double epsilon = 0;
  double weight_decay = 0;
  double max_gradient_norm = 0;
};

// Mirrors expertd.v1.LayerConfig. router.expert_count and router.top_k are filled by WithDefaults.
struct LayerConfig {
  int64_t expert_count = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t top_k = 0;
  Activation activation = Activation::kSilu;
  bool gate_up_bias = false;
  bool down_bias = false;
  int64_t alignment = 0;
  DType token_dtype = DType::kInvalid;
  DType weight_dtype = DType::kInvalid;
  std::string recipe;
  Weighting weighting = Weighting::kLate;
  RouterConfig router;
  bool router_on_server = false;
  double aux_loss_coefficient = 0;
  OptimizerConfig optimizer;
};

// One named value of a config, as text that two ranks can compare and a person can read.
struct ConfigField {
  std::string name;
  std::string value;
  friend bool operator==(const ConfigField&, const ConfigField&) = default;
};

// The config with every default filled in. `default_backend` is the device's.
GroupConfig WithDefaults(GroupConfig config, std::string_view default_backend);
LayerConfig WithDefaults(LayerConfig config);
OptimizerConfig WithDefaults(OptimizerConfig config);

// Every violated rule at once, each with got and need. REQUIRES: defaults filled in.
// `max_message_bytes` is the daemon's receive limit; the derived message size, twice, must fit it.
absl::Status ValidateGroupConfig(const GroupConfig& config, int64_t max_message_bytes);
absl::Status ValidateLayerConfig(const LayerConfig& layer, const GroupConfig& group,
                                 bool device_is_gpu);
absl::Status ValidateOptimizerConfig(const OptimizerConfig& config);
// CONFIG_INVALID at the config as a whole, for a derived size that does not fit 64 bits.
absl::Status TooLarge(const absl::Status& overflow);

std::vector<ConfigField> FieldsOf(const GroupConfig& config);
std::vector<ConfigField> FieldsOf(const LayerConfig& config);
std::vector<ConfigField> FieldsOf(const OptimizerConfig& config);

// Fields as one string and back; total on any input (Error CONFIG_INVALID).
std::string EncodeFields(const std::vector<ConfigField>& fields);
absl::StatusOr<std::vector<ConfigField>> DecodeFields(std::string_view bytes);

// Compares the fields of all ranks (index = rank) with rank 0's. `reason` names the error: of
// CONFIG_MISMATCH or SEQUENCE_CONFLICT kind. Names the first differing field, both values and both
// ranks; `what` says what was compared.
absl::Status CompareFields(Reason reason, std::string_view what,
                           const std::vector<std::vector<ConfigField>>& by_rank);

// Stable across processes: over FieldsOf, without the optimizer, which may change.
uint64_t LayerFingerprint(const LayerConfig& config);

GroupSizes SizesOf(const GroupConfig& config);
LayerSizes SizesOf(const LayerConfig& config, bool frozen);

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_CONFIG_H_
