// Callers that send garbage, duplicate, reorder, cancel, time out and disconnect, beside one that
// trains: its weights end as those of a quiet run, bit for bit, and no call outlives its deadline.
//
// EXPERTD_FAULT_SECONDS is how long (default 10), EXPERTD_FAULT_SEED what is drawn. Prints how
// often each reason was answered.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "tests/fault/misbehaving_caller.h"
#include "tests/integration/process_test.h"

namespace expertd::fault {
namespace {

using integration::AsStatus;
using integration::kLayer;
using integration::ProcessTest;
using integration::Soon;

constexpr int kCallers = 3;
constexpr int kSteps = 6;                           // of one training, between two comparisons
constexpr int64_t kTimeoutMs = 3000;                // how long ranks wait for each other
constexpr absl::Duration kLate = absl::Seconds(1);  // after a deadline
constexpr absl::Duration kStepPatience =
    absl::Seconds(90);  // for one training step, retries and all

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoll(text) : otherwise;
}

class RandomFaultTest : public ProcessTest {
 protected:
  void SetUp() override {
    StartAndForm(kRanks, kTimeoutMs);
    ASSERT_FALSE(HasFailure());
    MakeLayer(kLayer);
    MakeLayer(kNoise);
  }

  bool InTime() const { return absl::Now() < step_deadline_; }

  // Forms a new epoch if the group is not ready any more.
  void Mend() {
    while (InTime()) {
      const auto group = client::Attach(processes().hosts(), Soon());
      if (group.ok() && group->epoch() == this->group().epoch()) return;
      const auto formed =
          client::Up(UpRequestOf(processes().hosts(), Config(kRanks, kTimeoutMs)), Soon());
      if (!formed.ok()) continue;
      Form(processes().hosts(), Config(kRanks, kTimeoutMs));
      return;
    }
  }

  // Until all ranks have done it.
  template <typename Request>
  void Insist(const Request& request) {
    while (InTime()) {
      driver().Distrust();
      const auto responses = driver().RunSame(request);
      if (responses.ok()) return;
      Mend();
    }
    FAIL() << client::Method<Request>::kName << " never came through";
  }

  uint64_t VersionOf(int64_t rank) {
    const auto layers = this->rank(rank).Call(v1::ListLayersRequest(), Soon());
    EXPECT_TRUE(layers.ok()) << layers.status();
    if (!layers.ok()) return 0;
    for (const v1::LayerInfo& layer : layers->layers()) {
      if (layer.layer_id() == kLayer) return layer.weights_version();
    }
    return 0;
  }

  // One update from `version`, however often it must be tried; exactly once all the same.
  void TrainStep(uint64_t version) {
    step_deadline_ = absl::Now() + kStepPatience;
    for (;; ++tries_) {
      ASSERT_TRUE(InTime()) << "step from version " << version << " makes no progress";
      uint64_t lowest = UINT64_MAX;
      uint64_t highest = 0;
      for (int64_t rank = 0; rank < kRanks; ++rank) {
        lowest = std::min(lowest, VersionOf(rank));
        highest = std::max(highest, VersionOf(rank));
      }
      ASSERT_EQ(lowest, highest) << "an apply ended on some ranks only";
      if (lowest == version + 1) return;
      ASSERT_EQ(lowest, version);
      v1::ClearGradientsRequest clear;
      clear.set_layer_id(kLayer);
      Insist(clear);
      if (HasFatalFailure()) return;
      if (!TryStep(version)) Mend();
    }
  }

  bool TryStep(uint64_t version) {
    std::vector<v1::ForwardRequest> forwards;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      forwards.push_back(Forward(rank, 2 + static_cast<int64_t>(version % 3), kLayer));
      forwards.back().set_keep_for_backward(true);
    }
    const auto outputs = driver().Run(forwards);
    if (!outputs.ok()) return false;
    std::vector<v1::BackwardRequest> backwards(kRanks);
    for (size_t rank = 0; rank < backwards.size(); ++rank) {
      backwards[rank].set_ticket((*outputs)[rank].ticket());
      *backwards[rank].mutable_output_gradient() = (*outputs)[rank].output();
    }
    if (!driver().Run(backwards).ok()) return false;
    v1::ApplyGradientsRequest apply;
    apply.set_layer_id(kLayer);
    apply.set_expected_version(version);
    apply.set_learning_rate(0.05);
    return driver().RunSame(apply).ok();
  }

  // Trains kSteps steps from the same start; returns the weights of all ranks as bytes.
  std::string Train() {
    step_deadline_ = absl::Now() + kStepPatience;
    v1::InitializeWeightsRequest initialize;
    initialize.set_layer_id(kLayer);
    initialize.set_seed(11);
    Insist(initialize);
    for (uint64_t step = 1; step <= kSteps && !HasFatalFailure(); ++step) TrainStep(step);
    std::string weights;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      for (const char* parameter : {"gate_up", "down"}) {
        v1::GetParameterRequest request;
        request.set_layer_id(kLayer);
        request.set_parameter(parameter);
        request.set_kind(v1::PARAMETER_KIND_MASTER);
        const auto shard = this->rank(rank).GetParameter(request, absl::Now() + absl::Seconds(40));
        EXPECT_TRUE(shard.ok()) << shard.status();
        if (shard.ok()) weights += shard->tensor.data();
      }
    }
    return weights;
  }

  int64_t tries_ = 0;
  absl::Time step_deadline_ = absl::InfiniteFuture();
};

TEST_F(RandomFaultTest, ATrainerAmongMisbehavingCallersEndsAtTheWeightsOfAQuietRun) {
  const std::string quiet = Train();
  ASSERT_FALSE(HasFailure());
  const int64_t seed = FromEnvironment("EXPERTD_FAULT_SEED", 1);
  const absl::Time end = absl::Now() + absl::Seconds(FromEnvironment("EXPERTD_FAULT_SECONDS", 10));
  std::printf("seed %lld\n", static_cast<long long>(seed));
  Tally tally;
  std::atomic<bool> stop = false;
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) {
    callers.emplace_back([&, i, forwards = Forwards(kNoise), hosts = processes().hosts()] {
      Caller caller(hosts, static_cast<uint64_t>(seed * 100 + i), tally, forwards);
      while (!stop) {
        caller.Act();
        absl::SleepFor(absl::Milliseconds(20));
      }
    });
  }
  int trainings = 0;
  do {
    const std::string weights = Train();
    EXPECT_EQ(weights == quiet, true) << "training " << trainings << " ended at other weights";
    ++trainings;
  } while (!HasFailure() && absl::Now() < end);
  stop = true;
  for (std::thread& caller : callers) caller.join();
  tally.Print();
  std::printf("%d trainings of %d steps equal to the quiet one, %lld steps tried again\n",
              trainings, kSteps, static_cast<long long>(tries_));
  std::printf("latest answer %s after its deadline\n",
              absl::FormatDuration(tally.latest()).c_str());
  EXPECT_LE(tally.latest(), kLate);
  step_deadline_ = absl::Now() + kStepPatience;
  Mend();
  driver().Distrust();
  EXPECT_EQ(Outputs(kLayer).size(), static_cast<size_t>(kRanks));
}

}  // namespace
}  // namespace expertd::fault
