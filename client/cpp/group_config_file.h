// Reads the textproto that describes a group.
#ifndef CLIENT_CPP_GROUP_CONFIG_FILE_H_
#define CLIENT_CPP_GROUP_CONFIG_FILE_H_

#include <string>

#include "absl/status/statusor.h"
#include "base/memory_plan.h"
#include "expertd/v1/config.pb.h"

namespace expertd::client {

// Errors: CONFIG_INVALID with every problem: syntax and unknown fields with line and column, bad
// addresses, layers without or with the same id. `name` stands for the file in messages.
absl::StatusOr<v1::GroupFile> ParseGroupFile(const std::string& text, const std::string& name);

// Errors: as ParseGroupFile; NOT_FOUND when the file cannot be read.
absl::StatusOr<v1::GroupFile> ReadGroupFile(const std::string& path);

// The sizes that base/memory_plan.h computes with; `hosts` stands in for an ep_size of 0.
GroupSizes SizesOf(const v1::GroupConfig& config, int64_t hosts);
LayerSizes SizesOf(const v1::LayerConfig& config);

}  // namespace expertd::client

#endif  // CLIENT_CPP_GROUP_CONFIG_FILE_H_
