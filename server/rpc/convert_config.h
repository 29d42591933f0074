// Configs and their enums between proto and engine structs.
//
// FromProto reports an enum value that does not exist as CONFIG_INVALID at its field path, below
// `path`, and goes on; ranges of numbers are the engine's business. Fields that are 0 stay 0: the
// engine fills in defaults.
#ifndef SERVER_RPC_CONVERT_CONFIG_H_
#define SERVER_RPC_CONVERT_CONFIG_H_

#include <string_view>

#include "base/error.h"
#include "expertd/v1/types.pb.h"
#include "kernels/types.h"
#include "server/engine/config.h"

namespace expertd::rpc {

engine::GroupConfig FromProto(const v1::GroupConfig& config, std::string_view path,
                              Violations* violations);
engine::LayerConfig FromProto(const v1::LayerConfig& config, std::string_view path,
                              Violations* violations);
engine::OptimizerConfig FromProto(const v1::OptimizerConfig& config, std::string_view path,
                                  Violations* violations);

void ToProto(const engine::GroupConfig& config, v1::GroupConfig* out);
void ToProto(const engine::LayerConfig& config, v1::LayerConfig* out);
void ToProto(const engine::OptimizerConfig& config, v1::OptimizerConfig* out);

// kInvalid for DTYPE_UNSPECIFIED and for values that do not exist.
DType FromProto(v1::DType dtype);
v1::DType ToProto(DType dtype);

}  // namespace expertd::rpc

#endif  // SERVER_RPC_CONVERT_CONFIG_H_
