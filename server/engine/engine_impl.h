// The Engine: bookkeeping under one mutex, work on the device thread, time in the watchdog.
//
// Split by concern: engine_impl.cc (life, facts, queries), engine_group.cc (claim, leave, abort,
// drain, watch), engine_join.cc (forming an epoch), engine_steps.cc (submission, running,
// cancelling), engine_watch.cc (deadlines), engine_tensors.cc (resident tensors). Lock order:
// mutex_, then the board's or the tensor store's own.
#ifndef SERVER_ENGINE_ENGINE_IMPL_H_
#define SERVER_ENGINE_ENGINE_IMPL_H_

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "server/engine/device_thread.h"
#include "server/engine/engine.h"
#include "server/engine/group_session.h"
#include "server/engine/group_state.h"
#include "server/engine/join.h"
#include "server/engine/sequence.h"
#include "server/engine/step_runner.h"

namespace expertd::engine {

class EngineImpl final : public Engine {
 public:
  EngineImpl(EngineOptions options, DeviceState state);
  ~EngineImpl() override;

  ServerFacts Facts() const override { return facts_; }
  GroupInfo DescribeGroup() const override;
  uint64_t HighestEpochSeen() const override;
  absl::StatusOr<BootstrapClaim> CreateBootstrapId(const std::string& group_id, uint64_t epoch,
                                                   const std::string& claimant) override;
  void JoinGroup(JoinRequest request, std::function<void(absl::StatusOr<GroupInfo>)> done) override;
  void LeaveGroup(const std::string& group_id, uint64_t epoch,
                  std::function<void(absl::Status)> done) override;
  void AbortGroup(const std::string& group_id, uint64_t epoch, const std::string& reason,
                  std::function<void(absl::Status)> done) override;
  void WatchGroup(uint64_t known_version, SteadyTime until,
                  std::function<void(GroupInfo)> done) override;
  void Drain(bool resume, std::function<void(absl::Status)> done) override;
  bool Draining() const override;
  void Submit(std::shared_ptr<Operation> op, OperationCallback done) override;
  void CancelOperation(const StepHeader& header) override;
  absl::StatusOr<StepOutcome> GetStepOutcome(uint64_t epoch, uint64_t sequence) const override;
  void Release(std::vector<uint64_t> tickets, std::vector<uint64_t> handles,
               std::function<void(int64_t)> done) override;
  std::vector<LayerInfo> ListLayers() const override;
  absl::StatusOr<LayerInfo> FindLayer(const std::string& layer_id) const override;
  absl::StatusOr<ShardingMetadata> GetShardingMetadata(
      const std::string& layer_id, const std::vector<int64_t>& tokens_per_rank) const override;
  void GetParameter(const std::string& layer_id, const std::string& parameter, ParameterKind kind,
                    std::function<void(absl::StatusOr<ParameterShard>)> done) override;
  absl::StatusOr<uint64_t> BeginTensor(TensorInfo info, TensorStore::Fill fill) override;
  void WriteTensor(uint64_t store, int64_t offset, std::string piece,
                   std::function<void(absl::Status)> done) override;
  void FinishTensor(uint64_t store, std::function<void(absl::StatusOr<TensorInfo>)> done) override;
  void CancelTensor(uint64_t store) override;
  absl::StatusOr<TensorState> FindTensor(const std::string& buffer_id) const override;
  void ReadTensor(TensorRead read, std::function<void(absl::StatusOr<std::string>)> done) override;
  absl::Status DeleteTensor(const std::string& buffer_id) override;
  std::vector<TensorInfo> ListTensors() const override;
  absl::Status OnPeerRecord(const PeerRecord& record) override;
  absl::Status OnPeerClose(const PeerRecord& record) override;
  EngineCounters Counters() const override;

 private:
  using JoinCallback = std::function<void(absl::StatusOr<GroupInfo>)>;

  // An admitted operation and everyone who waits for it.
  struct Pending {
    std::shared_ptr<Operation> op;
    std::vector<OperationCallback> callbacks;
    size_t cancelled = 0;  // of those callers, how many have given up
    absl::Status closed;   // not OK: the other ranks have left its sequence
    int64_t bytes = 0;
  };
  // Answers to give once the mutex is free.
  using Answers = std::vector<std::function<void()>>;

  struct Claim {
    std::string group_id;
    uint64_t epoch = 0;
    std::string claimant;
    std::string bootstrap_id;
    bool used = false;
  };
  struct Watcher {
    uint64_t known_version = 0;
    SteadyTime until;
    std::function<void(GroupInfo)> done;
  };

  // engine_impl.cc
  void RefreshLayers() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<ParameterShard> ReadParameter(const std::string& layer_id,
                                               const std::string& parameter, ParameterKind kind);
  // engine_tensors.cc
  absl::StatusOr<std::string> ReadTensorNow(const TensorRead& read);
  // engine_group.cc
  GroupInfo DescribeLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NotifyLocked(Answers& answers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // engine_join.cc
  absl::Status CheckJoinLocked(const JoinRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FenceLocked(const absl::Status& reason, Answers& answers)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunJoin(const JoinRequest& request);
  absl::Status FormGroup(const JoinRequest& request, GroupSession& session);
  absl::StatusOr<std::vector<JoinRecord>> ExchangeJoin(const JoinRequest& request,
                                                       GroupSession& session);
  void AdoptLayers(const std::vector<JoinRecord>& records, int64_t rank);
  void FinishJoin(const JoinRequest& request, std::shared_ptr<GroupSession> session,
                  const absl::Status& status);
  void RunLeave(uint64_t epoch);
  // Leaves once no admitted step can run any more.
  void RunDrain(uint64_t epoch, std::function<void(absl::Status)> done);
  void DropSession();
  // engine_steps.cc
  void ScheduleLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunNext(uint64_t epoch);
  void FinishStep(uint64_t epoch, std::shared_ptr<Operation> op, const absl::Status& group_status);
  void CountLocked(const Operation& op) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The group cannot go on: fails all that waits and tells those who watch.
  void BreakLocked(uint64_t epoch, std::string_view reason, Answers& answers)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailPendingLocked(const absl::Status& reason, Answers& answers)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends a waiting operation for its callers, and leaves a stand-in that takes its turn, refused.
  void AbandonLocked(uint64_t sequence, const absl::Status& reason, Answers& answers)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CancelRunningLocked(const absl::Status& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerLocked(Pending& pending, Answers& answers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // engine_watch.cc
  void Watch();
  void WatchOnce(SteadyTime now);

  const EngineOptions options_;
  ServerFacts facts_;
  DeviceState state_;    // device thread only
  TensorStore tensors_;  // after state_, whose device its memory is from
  // Of the last join that failed: its records may still be on their way to ranks that have not
  // heard why. Device thread only.
  std::unique_ptr<PeerExchange> parting_exchange_;
  std::shared_ptr<PeerBoard> board_;

  mutable Mutex mutex_;
  GroupStateMachine machine_ ABSL_GUARDED_BY(mutex_);
  SequenceBook book_ ABSL_GUARDED_BY(mutex_);
  // Set while an epoch is formed; shared with cancelling threads, which use only Cancel and Close.
  std::shared_ptr<GroupSession> session_ ABSL_GUARDED_BY(mutex_);
  GroupConfig group_config_ ABSL_GUARDED_BY(mutex_);
  std::vector<Member> members_ ABSL_GUARDED_BY(mutex_);
  int64_t rank_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<ConfigField> join_fields_ ABSL_GUARDED_BY(mutex_);  // of the current epoch's join
  std::vector<JoinCallback> join_waiters_ ABSL_GUARDED_BY(mutex_);
  Claim claim_ ABSL_GUARDED_BY(mutex_);
  std::vector<Watcher> watchers_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Pending> pending_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::shared_ptr<const Operation>> kept_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, StepOutcome> outcomes_ ABSL_GUARDED_BY(mutex_);
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  SteadyTime running_deadline_ ABSL_GUARDED_BY(mutex_);
  absl::Status cancel_reason_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, LayerInfo> layers_ ABSL_GUARDED_BY(mutex_);
  EngineCounters counters_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::unique_ptr<DeviceThread> device_thread_;
  std::thread watchdog_;
};

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_ENGINE_IMPL_H_
