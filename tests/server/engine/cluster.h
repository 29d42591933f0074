// N engines of one process on a fake network, with calls that wait within a bound.
#ifndef TESTS_SERVER_ENGINE_CLUSTER_H_
#define TESTS_SERVER_ENGINE_CLUSTER_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "server/engine/engine.h"
#include "tests/server/engine/fake_network.h"
#include "tests/server/engine/step_inputs.h"

namespace expertd::engine {

inline constexpr std::chrono::seconds kPatience{30};

// The value of a future, or a failed test and a default-made value after kPatience.
template <typename T>
T Await(std::future<T> future) {
  if (future.wait_for(kPatience) != std::future_status::ready) {
    ADD_FAILURE() << "no answer within " << kPatience.count() << " s";
    std::abort();  // whoever would answer holds references to this test
  }
  return future.get();
}

using Answer = std::shared_ptr<const Operation>;
using Answers = std::vector<Answer>;
using JoinAnswer = absl::StatusOr<GroupInfo>;

class Cluster {
 public:
  explicit Cluster(int64_t world, std::function<void(EngineOptions&)> change = nullptr)
      : config(SmallGroup(world)) {
    for (int64_t rank = 0; rank < world; ++rank) {
      EngineOptions options;
      options.slot = rank;
      options.host = "host";
      options.version = "0.1.0";
      options.expert_mlp = "plain";
      options.max_receive_message_bytes = 64 << 20;
      options.peer_transport = [this](const std::vector<Member>& members, int64_t) {
        return network.Connect(members);
      };
      if (change) change(options);
      absl::StatusOr<std::unique_ptr<Engine>> engine = Engine::Create(std::move(options));
      if (!engine.ok()) {
        ADD_FAILURE() << engine.status();
        std::abort();
      }
      engines_.push_back(*std::move(engine));
      members.push_back({rank, Address(rank), engines_.back()->Facts().incarnation});
      network.Attach(Address(rank), engines_.back().get());
    }
  }
  ~Cluster() {
    for (int64_t rank = 0; rank < world(); ++rank) Destroy(rank);
  }

  int64_t world() const { return static_cast<int64_t>(engines_.size()); }
  Engine& engine(int64_t rank) { return *engines_[static_cast<size_t>(rank)]; }
  void Destroy(int64_t rank) {
    network.Detach(Address(rank));
    engines_[static_cast<size_t>(rank)].reset();
  }

  // A join of `rank`, with the group's config; the caller may change it before StartJoin.
  JoinRequest MakeJoin(int64_t rank, uint64_t epoch) {
    JoinRequest request;
    request.group_id = "group";
    request.epoch = epoch;
    request.rank = rank;
    request.members = members;
    request.config = config;
    request.bootstrap_id = bootstrap_id;
    return request;
  }
  // Takes the epoch at rank 0.
  void Claim(uint64_t epoch) {
    absl::StatusOr<BootstrapClaim> claim = engine(0).CreateBootstrapId("group", epoch, "test");
    ASSERT_TRUE(claim.ok()) << claim.status();
    bootstrap_id = claim->bootstrap_id;
  }
  std::future<JoinAnswer> StartJoin(JoinRequest request) {
    auto promise = std::make_shared<std::promise<JoinAnswer>>();
    std::future<JoinAnswer> future = promise->get_future();
    const int64_t rank = request.rank;
    engine(rank).JoinGroup(std::move(request),
                           [promise](JoinAnswer answer) { promise->set_value(std::move(answer)); });
    return future;
  }
  // Claims the epoch and joins every rank; returns what each was told.
  std::vector<JoinAnswer> Join(uint64_t epoch) {
    Claim(epoch);
    std::vector<std::future<JoinAnswer>> futures;
    for (int64_t rank = 0; rank < world(); ++rank) {
      futures.push_back(StartJoin(MakeJoin(rank, epoch)));
    }
    std::vector<JoinAnswer> answers;
    for (auto& future : futures) answers.push_back(Await(std::move(future)));
    return answers;
  }
  // Joins and expects success; `epoch` is used by Submit from now on.
  void Form(uint64_t new_epoch = 1) {
    for (const JoinAnswer& answer : Join(new_epoch)) ASSERT_TRUE(answer.ok()) << answer.status();
    epoch = new_epoch;
    next = 1;
  }

  std::future<Answer> Submit(int64_t rank, std::shared_ptr<Operation> op, uint64_t sequence,
                             uint64_t request_id = 0) {
    op->header = {"group", epoch, sequence, request_id != 0 ? request_id : 1000 + sequence};
    auto promise = std::make_shared<std::promise<Answer>>();
    std::future<Answer> future = promise->get_future();
    engine(rank).Submit(std::move(op), [promise](Answer answer) { promise->set_value(answer); });
    return future;
  }
  // Submits make(rank) on every rank in the next sequence and waits for all.
  Answers Step(const std::function<std::shared_ptr<Operation>(int64_t)>& make) {
    std::vector<std::future<Answer>> futures;
    for (int64_t rank = 0; rank < world(); ++rank) {
      futures.push_back(Submit(rank, make(rank), next));
    }
    ++next;
    Answers answers;
    for (auto& future : futures) answers.push_back(Await(std::move(future)));
    return answers;
  }
  // A step that must succeed everywhere.
  Answers Good(const std::function<std::shared_ptr<Operation>(int64_t)>& make) {
    Answers answers = Step(make);
    for (const Answer& answer : answers) EXPECT_TRUE(answer->status.ok()) << answer->status;
    return answers;
  }
  void CreateReadyLayer(const LayerConfig& layer = SmallLayer()) {
    Good([&](int64_t) { return MakeCreateLayer(layer); });
    Good([](int64_t) { return MakeInitialize(); });
  }
  // Forms epoch 2 with a time limit for steps, and with a layer made in epoch 1 without haste.
  void FormWithLayer(int64_t timeout_ms) {
    Form(1);
    CreateReadyLayer();
    config.base_timeout_ms = timeout_ms;
    Form(2);
  }
  // Proof that the group still works. With a short limit a loaded machine may need another try.
  void ExpectWorks() {
    Answers answers;
    for (int tries = 0; tries < 10; ++tries) {
      answers = Step([](int64_t rank) { return MakeForward(GlobalRows(rank * 2, 2)); });
      const bool late = std::any_of(answers.begin(), answers.end(), [](const Answer& answer) {
        return HasReason(answer->status, Reason::kStepTimeout);
      });
      if (!late) break;
    }
    for (const Answer& answer : answers) EXPECT_TRUE(answer->status.ok()) << answer->status;
  }

  // Calls a method with a status callback and waits for it.
  absl::Status Wait(const std::function<void(std::function<void(absl::Status)>)>& call) {
    auto promise = std::make_shared<std::promise<absl::Status>>();
    std::future<absl::Status> future = promise->get_future();
    call([promise](absl::Status status) { promise->set_value(std::move(status)); });
    return Await(std::move(future));
  }
  absl::Status Leave(int64_t rank, uint64_t of_epoch) {
    return Wait([&](auto done) { engine(rank).LeaveGroup("group", of_epoch, done); });
  }
  absl::Status Abort(int64_t rank, uint64_t of_epoch) {
    return Wait([&](auto done) { engine(rank).AbortGroup("group", of_epoch, "test", done); });
  }
  std::future<absl::Status> StartDrain(int64_t rank, bool resume) {
    auto promise = std::make_shared<std::promise<absl::Status>>();
    engine(rank).Drain(resume, [promise](absl::Status status) { promise->set_value(status); });
    return promise->get_future();
  }
  ParameterShard Parameter(int64_t rank, const std::string& name, ParameterKind kind) {
    auto promise = std::make_shared<std::promise<absl::StatusOr<ParameterShard>>>();
    engine(rank).GetParameter("layer", name, kind, [promise](absl::StatusOr<ParameterShard> shard) {
      promise->set_value(std::move(shard));
    });
    absl::StatusOr<ParameterShard> shard = Await(promise->get_future());
    EXPECT_TRUE(shard.ok()) << shard.status();
    return shard.ok() ? *shard : ParameterShard{};
  }

  FakeNetwork network;
  GroupConfig config;
  std::vector<Member> members;
  std::string bootstrap_id;
  uint64_t epoch = 0;
  uint64_t next = 1;

 private:
  static std::string Address(int64_t rank) { return "rank" + std::to_string(rank); }

  std::vector<std::unique_ptr<Engine>> engines_;
};

// Waits until `holds` is true, within kPatience.
inline void WaitUntil(const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!holds()) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << "the condition never became true";
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace expertd::engine

#endif  // TESTS_SERVER_ENGINE_CLUSTER_H_
