// The daemon's engine: one device, at most one group, its layers, and the collective operations on
// them in strict sequence order.
//
// Public methods may be called from any thread and never block on the device or on peers; answers
// come through callbacks, which run on the device thread or the watchdog thread and must be quick.
// Knows neither protobuf nor gRPC.
#ifndef SERVER_ENGINE_ENGINE_H_
#define SERVER_ENGINE_ENGINE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "kernels/backends.h"
#include "kernels/transport.h"
#include "server/engine/config.h"
#include "server/engine/group_state.h"
#include "server/engine/operations.h"
#include "server/engine/peer_transport.h"
#include "server/engine/sharding.h"
#include "server/engine/tensor_store.h"

namespace expertd::engine {

struct EngineOptions {
  std::string device = "cpu";  // or "cuda:N"
  int64_t slot = 0;
  std::string host;        // name of this machine, for reports
  std::string version;     // "major.minor.patch", compared between daemons at join
  std::string data_host;   // address that data connections between daemons bind to
  std::string expert_mlp;  // "": fastest; otherwise one of ListExpertMlps
  int64_t max_receive_message_bytes = 0;
  int64_t queue_capacity = 256;                    // operations admitted and not yet answered
  int64_t bytes_in_flight = int64_t{4} << 30;      // request bytes of them
  int64_t tensor_memory_bytes = int64_t{4} << 30;  // of resident tensors
  PeerTransportFactory peer_transport;
  // Called when the device thread is stuck past every limit; the default ends the process.
  std::function<void(absl::Status)> on_stuck;
};

// Mirrors expertd.v1.GroupInfo.
struct GroupInfo {
  std::string group_id;
  uint64_t epoch = 0;
  GroupState state = GroupState::kIdle;
  int64_t rank = 0;
  std::vector<Member> members;
  GroupConfig config;
  uint64_t next_sequence = 0;
  std::string reason;
  uint64_t version = 0;
  std::map<std::string, int64_t> memory_bytes;
  int64_t max_message_bytes = 0;
  std::string backend;
  std::vector<Transport> transports;  // by rank; empty unless formed
};

struct ServerFacts {
  int64_t slot = 0;
  uint64_t incarnation = 0;
  std::string boot_id;
  int64_t shared_memory_bytes = -1;  // of /dev/shm; -1: there is none
  DeviceFacts device;
  std::vector<Support> backends;
  std::vector<Support> recipes;
  std::vector<Support> mlps;
};

struct JoinRequest {
  std::string group_id;
  uint64_t epoch = 0;
  int64_t rank = 0;
  std::vector<Member> members;
  GroupConfig config;  // as sent; defaults are filled in here
  std::string bootstrap_id;
  SteadyTime deadline = SteadyTime::max();
};

struct BootstrapClaim {
  std::string bootstrap_id;
  std::string fingerprint;
  uint64_t root_incarnation = 0;
};

enum class ParameterKind : uint8_t { kMaster, kCompute, kGradient, kFirstMoment, kSecondMoment };

// A rank's shard of one parameter at one moment.
struct ParameterShard {
  TensorOutput tensor;
  std::vector<int64_t> offsets;  // in the global tensor
  uint64_t weights_version = 0;
};

enum class StepState : uint8_t { kAhead = 1, kWaiting, kRunning, kSucceeded, kFailed };

struct StepOutcome {
  StepState state = StepState::kAhead;
  OpKind kind = OpKind::kForward;
  uint64_t request_id = 0;
  absl::Status status;
};

// What observers count; monotonic unless said.
struct EngineCounters {
  uint64_t steps_succeeded = 0;
  uint64_t steps_failed = 0;
  std::map<std::string, uint64_t> failures_by_reason;
  std::map<std::string, uint64_t> operations;        // by OpName
  std::map<std::string, uint64_t> operation_micros;  // total_us summed, by OpName
  uint64_t tokens = 0;
  uint64_t routes_dropped = 0;
  int64_t queue_length = 0;     // gauge
  int64_t bytes_in_flight = 0;  // gauge
  int64_t queue_capacity = 0;
  int64_t bytes_in_flight_limit = 0;
  int64_t tickets = 0;       // gauge
  int64_t ticket_bytes = 0;  // gauge
  int64_t tensors = 0;       // gauge
  int64_t tensor_bytes = 0;  // gauge
  int64_t device_block_allocations = 0;
};

// A piece of a resident tensor at one moment.
struct TensorRead {
  std::string buffer_id;
  int64_t offset = 0;
  int64_t size = 0;
  uint64_t version = 0;  // as FindTensor gave it
};

// A resident tensor as it is now; the version changes with every write to it.
struct TensorState {
  TensorInfo info;
  uint64_t version = 0;
};

// Receives the operation that answers: the one submitted, or, for a retry, the earlier one with the
// same sequence and request id.
using OperationCallback = std::function<void(std::shared_ptr<const Operation>)>;

class Engine {
 public:
  // Errors: BACKEND_UNSUPPORTED when the device cannot be had.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(EngineOptions options);
  // Ends the device thread; running operations fail. Nothing collective.
  virtual ~Engine() = default;

  virtual ServerFacts Facts() const = 0;
  virtual GroupInfo DescribeGroup() const = 0;
  virtual uint64_t HighestEpochSeen() const = 0;

  // As the methods of ControlService of the same names.
  virtual absl::StatusOr<BootstrapClaim> CreateBootstrapId(const std::string& group_id,
                                                           uint64_t epoch,
                                                           const std::string& claimant) = 0;
  virtual void JoinGroup(JoinRequest request,
                         std::function<void(absl::StatusOr<GroupInfo>)> done) = 0;
  virtual void LeaveGroup(const std::string& group_id, uint64_t epoch,
                          std::function<void(absl::Status)> done) = 0;
  virtual void AbortGroup(const std::string& group_id, uint64_t epoch, const std::string& reason,
                          std::function<void(absl::Status)> done) = 0;
  // Calls `done` once, when the version differs from `known_version` or the time has come; at once
  // when it differs already.
  virtual void WatchGroup(uint64_t known_version, SteadyTime until,
                          std::function<void(GroupInfo)> done) = 0;
  virtual void Drain(bool resume, std::function<void(absl::Status)> done) = 0;
  virtual bool Draining() const = 0;

  // Runs `op` in its sequence. A refusal that does not consume the sequence (wrong group or epoch,
  // full queue, expired sequence) answers the same way, with op->status set.
  virtual void Submit(std::shared_ptr<Operation> op, OperationCallback done) = 0;
  // The caller of this operation went away. Unknown ones are ignored.
  virtual void CancelOperation(const StepHeader& header) = 0;

  virtual absl::StatusOr<StepOutcome> GetStepOutcome(uint64_t epoch, uint64_t sequence) const = 0;
  // Hands `done` how many of the ids were known.
  virtual void Release(std::vector<uint64_t> tickets, std::vector<uint64_t> handles,
                       std::function<void(int64_t)> done) = 0;

  virtual std::vector<LayerInfo> ListLayers() const = 0;
  virtual absl::StatusOr<LayerInfo> FindLayer(const std::string& layer_id) const = 0;
  virtual absl::StatusOr<ShardingMetadata> GetShardingMetadata(
      const std::string& layer_id, const std::vector<int64_t>& tokens_per_rank) const = 0;
  virtual void GetParameter(const std::string& layer_id, const std::string& parameter,
                            ParameterKind kind,
                            std::function<void(absl::StatusOr<ParameterShard>)> done) = 0;

  // Storing a tensor in pieces. Begin sets memory aside and returns the number of the store; Write
  // copies one piece, which must lie inside the tensor; Finish makes the tensor known under its id.
  // info.epoch 0 means the current one. Errors: as TensorService.PutTensor.
  virtual absl::StatusOr<uint64_t> BeginTensor(TensorInfo info, TensorStore::Fill fill) = 0;
  virtual void WriteTensor(uint64_t store, int64_t offset, std::string piece,
                           std::function<void(absl::Status)> done) = 0;
  virtual void FinishTensor(uint64_t store,
                            std::function<void(absl::StatusOr<TensorInfo>)> done) = 0;
  // Forgets a store that will not be finished; unknown ones are ignored.
  virtual void CancelTensor(uint64_t store) = 0;
  // Errors: BUFFER_UNKNOWN, here and below.
  virtual absl::StatusOr<TensorState> FindTensor(const std::string& buffer_id) const = 0;
  // Errors: VERSION_BEHIND when it was written to since FindTensor; BUFFER_RANGE.
  virtual void ReadTensor(TensorRead read,
                          std::function<void(absl::StatusOr<std::string>)> done) = 0;
  virtual absl::Status DeleteTensor(const std::string& buffer_id) = 0;
  virtual std::vector<TensorInfo> ListTensors() const = 0;

  // From other daemons (PeerService).
  virtual absl::Status OnPeerRecord(const PeerRecord& record) = 0;
  virtual absl::Status OnPeerClose(const PeerRecord& record) = 0;

  virtual EngineCounters Counters() const = 0;
};

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_ENGINE_H_
