// The arrival exchange before every collective: the record each rank brings and what all conclude.
//
// Pure. Every rank that holds the same records concludes alike: go on, or end the sequence. A rank
// that refused its own request still brings a record, so that nobody waits for it.
#ifndef SERVER_ENGINE_ARRIVAL_H_
#define SERVER_ENGINE_ARRIVAL_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/types.h"
#include "server/engine/config.h"
#include "server/engine/operations.h"

namespace expertd::engine {

struct ArrivalRecord {
  uint64_t epoch = 0;
  uint64_t sequence = 0;
  OpKind op = OpKind::kForward;
  uint64_t layer_fingerprint = 0;
  uint64_t forward_sequence = 0;  // of the Forward or Prepare this operation belongs to; 0: none
  DType dtype = DType::kInvalid;  // of the tokens; kInvalid: the operation has none
  int64_t token_count = 0;
  bool gradients_valid = true;
  int64_t accumulated_backwards = 0;  // in the layer's gradient accumulators
  uint64_t weights_version = 0;
  uint64_t weights_lineage = 0;  // LayerInfo's
  // Values all ranks must agree on, such as a learning rate.
  std::vector<ConfigField> arguments;
  absl::Status status;  // not OK: this rank refused its request
};

std::string EncodeArrival(const ArrivalRecord& record);
// Errors: INTERNAL when the bytes are not a record.
absl::StatusOr<ArrivalRecord> DecodeArrival(std::string_view bytes);

// What `rank` concludes from the records of all ranks (index = rank):
// OK: go on. The rank's own status: it refused. PEER_REJECTED naming the first other rank that
// refused and its reason. SEQUENCE_CONFLICT naming ranks and values when the operations, layers,
// forwards, dtypes or arguments differ. LAYER_NEEDS_RESTORE when the operation uses weights and
// their versions, or the sources they come from, differ. GRADIENTS_INVALID for a Backward or
// ApplyGradients while any rank's accumulators are invalid, or hold another number of backwards.
absl::Status Conclude(const std::vector<ArrivalRecord>& records, int64_t rank);

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_ARRIVAL_H_
