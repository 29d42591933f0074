// One caller per rank, each with its own thread, connection and sequence counter.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/process_test.h"

namespace expertd::integration {
namespace {

constexpr int64_t kRanks = 4;
constexpr int kSteps = 12;

class SpmdTest : public ProcessTest {
 protected:
  void SetUp() override { StartAndForm(kRanks); }

  // A caller's own connection and counter, as one process of a program has it.
  struct Caller {
    std::unique_ptr<client::RankClient> client;
    std::unique_ptr<client::RankStepper> stepper;
  };
  Caller MakeCaller(int64_t r) {
    Caller caller;
    const v1::GroupInfo& info = group().infos[static_cast<size_t>(r)];
    caller.client =
        std::make_unique<client::RankClient>(rank(r).origin(), info.max_message_bytes());
    caller.stepper = std::make_unique<client::RankStepper>(
        caller.client.get(), info, client::StepOptions{.timeout = absl::Seconds(30)});
    return caller;
  }

  // Runs the same program on every rank at once; each returns the first error.
  template <typename Program>
  std::vector<absl::Status> RunSpmd(const Program& program) {
    std::vector<absl::Status> statuses(kRanks);
    std::vector<std::thread> threads;
    for (int64_t r = 0; r < kRanks; ++r) {
      threads.emplace_back([this, &program, &statuses, r] {
        Caller caller = MakeCaller(r);
        statuses[static_cast<size_t>(r)] = program(r, *caller.stepper);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return statuses;
  }

  v1::CreateLayerRequest Create(const std::string& layer_id) const {
    v1::CreateLayerRequest create;
    create.set_layer_id(layer_id);
    *create.mutable_config() = LayerConfig();
    return create;
  }
};

// Create, initialise, then forward, backward and update kSteps times; the last outputs.
template <typename Run>
absl::Status Train(const v1::CreateLayerRequest& create, const v1::ForwardRequest& forward,
                   const Run& run, std::string* output) {
  absl::Status status = run(create).status();
  if (!status.ok()) return status;
  v1::InitializeWeightsRequest initialize;
  initialize.set_layer_id(create.layer_id());
  initialize.set_seed(11);
  status = run(initialize).status();
  for (int step = 0; status.ok() && step < kSteps; ++step) {
    auto forwarded = run(forward);
    if (!forwarded.ok()) return forwarded.status();
    v1::BackwardRequest backward;
    backward.set_ticket(forwarded->ticket());
    *backward.mutable_output_gradient() = forwarded->output();
    status = run(backward).status();
    if (!status.ok()) return status;
    v1::ApplyGradientsRequest apply;
    apply.set_layer_id(create.layer_id());
    apply.set_learning_rate(0.125);
    apply.set_expected_version(static_cast<uint64_t>(step) + 1);
    status = run(apply).status();
    *output = forwarded->output().data();
  }
  return status;
}

TEST_F(SpmdTest, OneCallerPerRankTrainsTheSameModelEveryTime) {
  std::vector<std::vector<std::string>> runs;
  for (int attempt = 0; attempt < 2; ++attempt) {
    std::vector<std::string>& outputs = runs.emplace_back(kRanks);
    const std::vector<absl::Status> statuses =
        RunSpmd([&](int64_t r, client::RankStepper& stepper) {
          v1::ForwardRequest forward = Forward(r, 5);
          forward.set_keep_for_backward(true);
          return Train(
              Create(kLayer), forward, [&](const auto& request) { return stepper.Run(request); },
              &outputs[static_cast<size_t>(r)]);
        });
    for (const absl::Status& status : statuses) ASSERT_OK(status);
    // The next attempt's callers must start where these ended.
    for (auto& info : group().infos) info.set_next_sequence(3 + 3 * kSteps);
    v1::DeleteLayerRequest remove;
    remove.set_layer_id(kLayer);
    driver().Distrust();
    ASSERT_OK(driver().RunSame(remove));
    for (auto& info : group().infos) info.set_next_sequence(driver().next_sequence());
  }
  EXPECT_EQ(runs[0], runs[1]);
  for (const std::string& output : runs[0]) EXPECT_FALSE(output.empty());
}

TEST_F(SpmdTest, RejectionOnOneRankIsSeenByEveryCallerAndAllGoOn) {
  MakeLayer(kLayer);
  ASSERT_FALSE(HasFailure());
  for (auto& info : group().infos) info.set_next_sequence(driver().next_sequence());
  std::vector<absl::Status> spoilt(kRanks);
  const std::vector<absl::Status> statuses = RunSpmd([&](int64_t r, client::RankStepper& stepper) {
    v1::ForwardRequest request = Forward(r);
    if (r == 3) request.mutable_tokens()->set_dtype(v1::DTYPE_F16);
    spoilt[static_cast<size_t>(r)] = stepper.Run(request).status();
    absl::Status status;
    for (int step = 0; step < kSteps && status.ok(); ++step) {
      status = stepper.Run(Forward(r)).status();
    }
    return status;
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  for (int64_t r = 0; r < 3; ++r) {
    ExpectError(spoilt[static_cast<size_t>(r)], Reason::kPeerRejected, {"rank 3"});
  }
  EXPECT_EQ(spoilt[3].code(), absl::StatusCode::kInvalidArgument) << spoilt[3];
}

TEST_F(SpmdTest, CallersThatDisagreeAreTold) {
  MakeLayer(kLayer);
  MakeLayer("other");
  ASSERT_FALSE(HasFailure());
  for (auto& info : group().infos) info.set_next_sequence(driver().next_sequence());
  const std::vector<absl::Status> statuses = RunSpmd([&](int64_t r, client::RankStepper& stepper) {
    return stepper.Run(Forward(r, 4, r == 1 ? "other" : kLayer)).status();
  });
  for (const absl::Status& status : statuses) {
    ExpectError(status, Reason::kSequenceConflict, {"rank 0", "rank 1"});
  }
  driver().Distrust();
  EXPECT_EQ(Outputs().size(), static_cast<size_t>(kRanks));
}

}  // namespace
}  // namespace expertd::integration
