// Creating, finding and deleting layers through a driver.
#ifndef CLIENT_EXPERTCTL_LAYERS_H_
#define CLIENT_EXPERTCTL_LAYERS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/group_controller.h"
#include "client/cpp/step_driver.h"
#include "client/expertctl/common.h"
#include "expertd/v1/layer_service.pb.h"

namespace expertd::expertctl {

// Creates the layer unless it exists, and fills its weights unless it has some. Returns it as rank
// 0 sees it.
absl::StatusOr<v1::LayerInfo> EnsureLayer(const std::string& layer_id,
                                          const v1::LayerConfig& config, uint64_t seed,
                                          client::StepDriver* driver);

absl::Status DeleteLayer(const std::string& layer_id, client::StepDriver* driver);

// The layer as rank 0 sees it; an empty id means the only layer there is.
// Errors: LAYER_UNKNOWN with the ids that exist.
absl::StatusOr<v1::LayerInfo> FindLayer(const client::Group& group, const std::string& layer_id,
                                        const client::CallOptions& options);

// Creates a layer under a random id that starts with `prefix`, runs `body` with it and deletes it
// again whatever happens, also after Ctrl-C. Returns the first error.
absl::Status WithTemporaryLayer(const std::string& prefix, const v1::LayerConfig& config,
                                const Session& session,
                                const std::function<absl::Status(const v1::LayerInfo&)>& body);

}  // namespace expertd::expertctl

#endif  // CLIENT_EXPERTCTL_LAYERS_H_
