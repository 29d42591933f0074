// Flags that stand for the fields of GroupConfig and LayerConfig.
#ifndef CLIENT_EXPERTCTL_CONFIG_FLAGS_H_
#define CLIENT_EXPERTCTL_CONFIG_FLAGS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "client/expertctl/flags.h"
#include "expertd/v1/types.pb.h"

namespace expertd::expertctl {

// -1 and "": not given, so that the group file's value stands, or the default below.
struct GroupFlags {
  std::string backend;
  std::string max_token_dtype;
  int64_t dp_size = -1;
  int64_t ep_size = -1;
  int64_t max_tokens_per_rank = -1;
  int64_t max_recv_rows_per_rank = -1;
  int64_t max_hidden = -1;
  int64_t max_top_k = -1;
  int64_t max_experts = -1;
  int64_t base_timeout_ms = -1;
  int64_t ticket_memory_bytes = -1;

  void AddTo(FlagSet* flags);
  // `base` with what was given; sizes that are still 0 get the defaults that the flags' help names.
  // Errors: usage error for an unknown dtype.
  absl::StatusOr<v1::GroupConfig> Merge(v1::GroupConfig base) const;
};

struct LayerFlags {
  int64_t experts = 8;
  int64_t hidden = 128;
  int64_t intermediate = 256;
  int64_t top_k = 2;
  int64_t alignment = 1;
  std::string token_dtype = "f32";
  std::string weight_dtype = "f32";

  void AddTo(FlagSet* flags);
  // Errors: usage error with every unknown dtype.
  absl::StatusOr<v1::LayerConfig> Make() const;
};

}  // namespace expertd::expertctl

#endif  // CLIENT_EXPERTCTL_CONFIG_FLAGS_H_
