// Many steps of random sizes with callers that are early and late: the same bits as without haste.
#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "base/ids.h"
#include "tests/conformance/service/service_test.h"

namespace expertd::conformance {
namespace {

constexpr int64_t kTopK = 2;
constexpr int64_t kHidden = 32;
constexpr int64_t kLocalExperts = 3;
constexpr int64_t kMostTokens = 64;  // of the default group

// Forward and backward each; EXPERTD_TEST_STEPS makes a soak of it.
int Steps() {
  const char* steps = std::getenv("EXPERTD_TEST_STEPS");
  return steps == nullptr ? 20 : std::max(1, std::atoi(steps));
}

// The inputs of one step on one rank: the same in every pass.
v1::ForwardRequest MakeRequest(const std::string& layer_id, int64_t experts, uint64_t seed) {
  std::mt19937_64 random(seed);
  const int64_t tokens = random() % 8 == 0 ? 0 : static_cast<int64_t>(random() % (kMostTokens + 1));
  std::vector<float> x;
  std::vector<int64_t> ids;
  std::vector<float> weights;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < kHidden; ++h) {
      x.push_back(static_cast<float>(static_cast<int64_t>(random() % 2001) - 1000) / 512.0f);
    }
    const auto first = static_cast<int64_t>(random() % static_cast<uint64_t>(experts));
    ids.push_back(random() % 7 == 0 ? -1 : first);
    ids.push_back((first + 1) % experts);
    for (int64_t k = 0; k < kTopK; ++k) {
      weights.push_back(static_cast<float>(1 + random() % 100) / 100.0f);
    }
  }
  v1::ForwardRequest request;
  request.set_layer_id(layer_id);
  request.set_keep_for_backward(true);
  *request.mutable_tokens() = client::FloatTensor(v1::DTYPE_BF16, {tokens, kHidden}, x);
  *request.mutable_topk()->mutable_topk_ids() = client::Int64Tensor({tokens, kTopK}, ids);
  *request.mutable_topk()->mutable_topk_weights() =
      client::FloatTensor(v1::DTYPE_F32, {tokens, kTopK}, weights);
  return request;
}

// Fingerprints of everything that the steps of one rank gave.
struct Trace {
  absl::Status status;
  std::vector<uint64_t> steps;
};

class Pass {
 public:
  Pass(testing::ServiceHarness& service, std::string layer_id, uint64_t seed)
      : service_(service), layer_id_(std::move(layer_id)), seed_(seed) {}

  // One caller per rank, each by itself. Up to `most_delay` before each call.
  std::vector<Trace> Run(std::chrono::microseconds most_delay) {
    std::vector<Trace> traces(static_cast<size_t>(service_.world()));
    std::vector<std::thread> callers;
    for (int64_t rank = 0; rank < service_.world(); ++rank) {
      callers.emplace_back([&, rank] {
        Trace& trace = traces[static_cast<size_t>(rank)];
        trace.status = RunRank(rank, most_delay, trace.steps);
      });
    }
    for (std::thread& caller : callers) caller.join();
    service_.driver().Distrust();
    return traces;
  }

 private:
  absl::Status RunRank(int64_t rank, std::chrono::microseconds most_delay,
                       std::vector<uint64_t>& steps) {
    const auto described = service_.rank(rank).Call(v1::DescribeGroupRequest(), testing::Soon());
    if (!described.ok()) return described.status();
    client::RankStepper stepper(&service_.rank(rank), described->group(),
                                {.timeout = absl::Seconds(40)});
    std::mt19937_64 delays(seed_ * 31 + static_cast<uint64_t>(rank) + 1);
    const auto wait = [&] {
      if (most_delay.count() == 0 || delays() % 2 == 0) return;
      std::this_thread::sleep_for(
          std::chrono::microseconds(delays() % static_cast<uint64_t>(most_delay.count())));
    };
    for (int step = 0; step < Steps(); ++step) {
      const uint64_t step_seed =
          (seed_ * 1000003 + static_cast<uint64_t>(step)) * 64 + static_cast<uint64_t>(rank);
      const v1::ForwardRequest request =
          MakeRequest(layer_id_, kLocalExperts * service_.world(), step_seed);
      wait();
      const auto forward = stepper.Run(request);
      if (!forward.ok()) return forward.status();
      v1::BackwardRequest backward;
      backward.set_ticket(forward->ticket());
      *backward.mutable_output_gradient() = request.tokens();
      wait();
      const auto gradients = stepper.Run(backward);
      if (!gradients.ok()) return gradients.status();
      steps.push_back(Fingerprint(forward->output().data() + gradients->tokens_gradient().data() +
                                  gradients->topk_weights_gradient().data()));
    }
    return absl::OkStatus();
  }

  testing::ServiceHarness& service_;
  const std::string layer_id_;
  const uint64_t seed_;
};

TEST_P(ServiceTest, StepsOfRandomSizeAndDelayGiveTheBitsOfAQuietRepetition) {
  const char* given = std::getenv("EXPERTD_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  SCOPED_TRACE("EXPERTD_TEST_SEED=" + std::to_string(seed));
  v1::LayerConfig config = SmallLayer(kLocalExperts * world(), kTopK, kHidden, 24);
  config.set_token_dtype(v1::DTYPE_BF16);
  config.set_weight_dtype(v1::DTYPE_BF16);
  config.set_alignment(4);
  config.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  const std::string layer_id = MakeLayer(config, 5);
  ASSERT_FALSE(HasFailure());
  Pass pass(service(), layer_id, seed);
  std::vector<std::vector<Trace>> passes;
  std::vector<std::vector<std::vector<float>>> gradients;
  for (const std::chrono::microseconds delay :
       {std::chrono::microseconds(2000), std::chrono::microseconds(0)}) {
    passes.push_back(pass.Run(delay));
    for (const Trace& trace : passes.back()) ASSERT_OK(trace.status);
    gradients.push_back(Shards(layer_id, "gate_up", v1::PARAMETER_KIND_GRADIENT));
    v1::ClearGradientsRequest clear;
    clear.set_layer_id(layer_id);
    RunSame(clear);
    ASSERT_FALSE(HasFailure());
  }
  for (size_t rank = 0; rank < passes[0].size(); ++rank) {
    ASSERT_EQ(passes[0][rank].steps.size(), static_cast<size_t>(Steps()));
    EXPECT_EQ(passes[0][rank].steps, passes[1][rank].steps) << "rank " << rank;
    EXPECT_EQ(gradients[0][rank], gradients[1][rank]) << "rank " << rank;
  }
}

}  // namespace
}  // namespace expertd::conformance
