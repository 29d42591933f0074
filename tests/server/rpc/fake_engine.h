// An Engine whose answers the test gives: records what comes in, answers when told.
#ifndef TESTS_SERVER_RPC_FAKE_ENGINE_H_
#define TESTS_SERVER_RPC_FAKE_ENGINE_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/mutex.h"
#include "server/engine/engine.h"

namespace expertd::rpc {

// Thread-safe. The hooks are set before the server starts and run on its threads.
class FakeEngine final : public engine::Engine {
 public:
  using Operation = engine::Operation;

  // Called for Submit; the default answers the operation that was submitted, with its `rejected`.
  std::function<void(std::shared_ptr<Operation>, engine::OperationCallback)> on_submit =
      [](std::shared_ptr<Operation> op, const engine::OperationCallback& done) {
        op->status = op->rejected;
        done(op);
      };
  std::function<void(const engine::StepHeader&)> on_cancel = [](const engine::StepHeader&) {};
  std::function<absl::Status(const engine::PeerRecord&)> on_record = [](const engine::PeerRecord&) {
    return absl::OkStatus();
  };
  std::function<absl::StatusOr<engine::ParameterShard>()> on_parameter = [] {
    return absl::StatusOr<engine::ParameterShard>(absl::NotFoundError("none"));
  };

  // Of resident tensors; the defaults know none and store nothing.
  std::function<absl::StatusOr<uint64_t>(const engine::TensorInfo&)> on_begin_tensor =
      [](const engine::TensorInfo&) { return absl::StatusOr<uint64_t>(1); };
  std::function<void(std::string, std::function<void(absl::Status)>)> on_write_tensor =
      [](const std::string&, const auto& done) { done(absl::OkStatus()); };
  std::function<absl::StatusOr<engine::TensorInfo>()> on_finish_tensor = [] {
    return engine::TensorInfo{};
  };
  std::function<void(uint64_t)> on_cancel_tensor = [](uint64_t) {};
  std::function<absl::StatusOr<engine::TensorState>(const std::string&)> on_find_tensor =
      [](const std::string& id) -> absl::StatusOr<engine::TensorState> {
    return Error(Reason::kBufferUnknown).Text("no tensor ", id);
  };
  std::function<absl::StatusOr<std::string>(const engine::TensorRead&)> on_read_tensor =
      [](const engine::TensorRead& read) {
        return std::string(static_cast<size_t>(read.size), 't');
      };

  // Changes the group and answers its watchers.
  void SetState(engine::GroupState state) {
    std::vector<std::function<void(engine::GroupInfo)>> watchers;
    engine::GroupInfo group;
    {
      MutexLock lock(mutex_);
      group_.state = state;
      ++group_.version;
      group = group_;
      watchers.swap(watchers_);
    }
    for (const auto& watcher : watchers) watcher(group);
  }

  // The callbacks of watches that nobody has answered; a test may call them late.
  std::vector<std::function<void(engine::GroupInfo)>> TakeWatchers() {
    MutexLock lock(mutex_);
    return std::exchange(watchers_, {});
  }

  engine::ServerFacts Facts() const override {
    engine::ServerFacts facts;
    facts.slot = 3;
    facts.incarnation = 42;
    facts.device.kind = "cpu";
    facts.backends.push_back({"loopback", true, ""});
    return facts;
  }
  engine::GroupInfo DescribeGroup() const override {
    MutexLock lock(mutex_);
    return group_;
  }
  uint64_t HighestEpochSeen() const override { return 7; }
  absl::StatusOr<engine::BootstrapClaim> CreateBootstrapId(const std::string&, uint64_t,
                                                           const std::string&) override {
    return engine::BootstrapClaim{"secret", "print", 42};
  }
  void JoinGroup(engine::JoinRequest request,
                 std::function<void(absl::StatusOr<engine::GroupInfo>)> done) override {
    {
      MutexLock lock(mutex_);
      join_ = std::move(request);
    }
    done(DescribeGroup());
  }
  engine::JoinRequest join() const {
    MutexLock lock(mutex_);
    return join_;
  }
  void LeaveGroup(const std::string&, uint64_t, std::function<void(absl::Status)> done) override {
    done(absl::OkStatus());
  }
  void AbortGroup(const std::string&, uint64_t, const std::string&,
                  std::function<void(absl::Status)> done) override {
    done(absl::OkStatus());
  }
  void WatchGroup(uint64_t known_version, SteadyTime,
                  std::function<void(engine::GroupInfo)> done) override {
    engine::GroupInfo group;
    {
      MutexLock lock(mutex_);
      if (group_.version == known_version) {
        watchers_.push_back(std::move(done));
        return;
      }
      group = group_;
    }
    done(group);
  }
  void Drain(bool resume, std::function<void(absl::Status)> done) override {
    {
      MutexLock lock(mutex_);
      draining_ = !resume;
    }
    done(absl::OkStatus());
  }
  bool Draining() const override {
    MutexLock lock(mutex_);
    return draining_;
  }
  void Submit(std::shared_ptr<Operation> op, engine::OperationCallback done) override {
    on_submit(std::move(op), std::move(done));
  }
  void CancelOperation(const engine::StepHeader& header) override { on_cancel(header); }
  absl::StatusOr<engine::StepOutcome> GetStepOutcome(uint64_t, uint64_t) const override {
    engine::StepOutcome outcome;
    outcome.state = engine::StepState::kFailed;
    outcome.kind = engine::OpKind::kForward;
    outcome.request_id = 5;
    outcome.status = Error(Reason::kStepTimeout).Text("late");
    return outcome;
  }
  void Release(std::vector<uint64_t> tickets, std::vector<uint64_t> handles,
               std::function<void(int64_t)> done) override {
    done(static_cast<int64_t>(tickets.size() + handles.size()));
  }
  std::vector<engine::LayerInfo> ListLayers() const override { return {}; }
  absl::StatusOr<engine::LayerInfo> FindLayer(const std::string& id) const override {
    return Error(Reason::kLayerUnknown).Text("no layer ", id);
  }
  absl::StatusOr<engine::ShardingMetadata> GetShardingMetadata(
      const std::string&, const std::vector<int64_t>&) const override {
    return engine::ShardingMetadata{};
  }
  void GetParameter(const std::string&, const std::string&, engine::ParameterKind,
                    std::function<void(absl::StatusOr<engine::ParameterShard>)> done) override {
    done(on_parameter());
  }
  absl::StatusOr<uint64_t> BeginTensor(engine::TensorInfo info,
                                       engine::TensorStore::Fill) override {
    return on_begin_tensor(info);
  }
  void WriteTensor(uint64_t, int64_t, std::string piece,
                   std::function<void(absl::Status)> done) override {
    on_write_tensor(std::move(piece), std::move(done));
  }
  void FinishTensor(uint64_t,
                    std::function<void(absl::StatusOr<engine::TensorInfo>)> done) override {
    done(on_finish_tensor());
  }
  void CancelTensor(uint64_t store) override { on_cancel_tensor(store); }
  absl::StatusOr<engine::TensorState> FindTensor(const std::string& id) const override {
    return on_find_tensor(id);
  }
  void ReadTensor(engine::TensorRead read,
                  std::function<void(absl::StatusOr<std::string>)> done) override {
    done(on_read_tensor(read));
  }
  absl::Status DeleteTensor(const std::string& id) override { return on_find_tensor(id).status(); }
  std::vector<engine::TensorInfo> ListTensors() const override { return {}; }
  absl::Status OnPeerRecord(const engine::PeerRecord& record) override { return on_record(record); }
  absl::Status OnPeerClose(const engine::PeerRecord& record) override { return on_record(record); }
  engine::EngineCounters Counters() const override { return {}; }

 private:
  mutable Mutex mutex_;
  engine::GroupInfo group_ ABSL_GUARDED_BY(mutex_);
  engine::JoinRequest join_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::function<void(engine::GroupInfo)>> watchers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace expertd::rpc

#endif  // TESTS_SERVER_RPC_FAKE_ENGINE_H_
