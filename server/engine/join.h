// What ranks tell each other when an epoch forms, and what each concludes. Pure.
#ifndef SERVER_ENGINE_JOIN_H_
#define SERVER_ENGINE_JOIN_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/transport.h"
#include "server/engine/config.h"
#include "server/engine/operations.h"

namespace expertd::engine {

// One layer as a rank holds it when it joins.
struct JoinLayer {
  std::string layer_id;
  uint64_t fingerprint = 0;
  uint64_t weights_version = 0;
  uint64_t weights_lineage = 0;
  int64_t first_expert = 0;
  int64_t local_experts = 0;
  int64_t expert_count = 0;  // of the whole layer
  bool gradients_valid = true;
  int64_t accumulated_backwards = 0;
  bool frozen = false;
};

struct JoinRecord {
  absl::Status status;  // not OK: this rank refuses the join
  std::string version;
  int64_t slot = 0;
  std::string host;
  std::string boot_id;
  std::string device;
  std::string device_uuid;
  std::string bootstrap_fingerprint;
  TransportFacts transport;  // of the device; its device_uuid is the one above
  std::vector<ConfigField> config;
  std::vector<JoinLayer> layers;
};

std::string EncodeJoin(const JoinRecord& record);
absl::StatusOr<JoinRecord> DecodeJoin(std::string_view bytes);

// Names a bootstrap id in logs and comparisons without giving it away.
std::string BootstrapFingerprint(std::string_view bootstrap_id);

// Epochs are unix milliseconds or a little more. One from the far future would never be passed by
// any clock and lock every later controller out, so it is refused: the limit is a year from now.
uint64_t MaxEpoch();
std::string EpochTooFar(uint64_t epoch);

// What `rank` concludes: its own refusal; PEER_REJECTED with a peer's; CONFIG_MISMATCH naming
// field, both values and both ranks when configs, members, bootstrap ids, devices or versions do
// not fit.
absl::Status ConcludeJoin(const std::vector<JoinRecord>& records, int64_t rank);

// How `rank` reaches each rank, in rank order; `peers`: the GPUs that it sees.
std::vector<Transport> TransportsOf(const std::vector<JoinRecord>& records, int64_t rank,
                                    std::string_view backend, const std::vector<DevicePeer>& peers);

// Layers that do not fit together, with the reason. A layer that `rank` holds and another rank does
// not is named too.
std::map<std::string, std::string> LayersToRestore(const std::vector<JoinRecord>& records,
                                                   int64_t rank);
// Layers whose gradient accumulators are not the same backwards on every rank.
std::vector<std::string> LayersWithInvalidGradients(const std::vector<JoinRecord>& records,
                                                    int64_t rank);

// "1.4.2" and "1.5.0" may serve one group; "1.4.2" and "1.6.0", or another major version, may not.
bool VersionsFit(std::string_view a, std::string_view b);

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_JOIN_H_
