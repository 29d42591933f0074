// The fixture of tests that drive real `expertd` processes, and small steps for them.
#ifndef TESTS_INTEGRATION_PROCESS_TEST_H_
#define TESTS_INTEGRATION_PROCESS_TEST_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "base/error.h"
#include "base/strings.h"
#include "client/cpp/bootstrap.h"
#include "client/cpp/group_controller.h"
#include "client/cpp/step_driver.h"
#include "client/cpp/tensor.h"
#include "tests/testing/process_group.h"

namespace expertd::integration {

#define ASSERT_OK(expression)                                      \
  do {                                                             \
    const auto& ok_result = (expression);                          \
    ASSERT_TRUE(ok_result.ok()) << AsStatus(ok_result).ToString(); \
  } while (false)

inline const absl::Status& AsStatus(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& AsStatus(const absl::StatusOr<T>& result) {
  return result.status();
}

// The longest that a call may take; far above what it does take on a busy machine.
inline client::CallOptions Soon() { return {.deadline = absl::Now() + absl::Seconds(40)}; }

inline constexpr int64_t kHidden = 16;
inline constexpr int64_t kTopK = 2;
inline constexpr char kLayer[] = "layer";

class ProcessTest : public ::testing::Test {
 protected:
  // Starts daemons with slots 0, 1, ...
  void Start(int64_t count) {
    auto started = testing::ProcessGroup::Start({.count = count, .flags = {"--cpu_threads", "1"}},
                                                absl::Now() + absl::Seconds(40));
    ASSERT_OK(started);
    processes_ = *std::move(started);
  }
  void TearDown() override {
    if (HasFailure() && processes_ != nullptr) std::fputs(processes_->Describe().c_str(), stderr);
  }

  testing::ProcessGroup& processes() { return *processes_; }

  // `timeout_ms` is how long ranks wait for each other.
  static v1::GroupConfig Config(int64_t ranks, int64_t timeout_ms = 20000) {
    v1::GroupConfig config;
    config.set_ep_size(ranks);
    config.set_backend("gloo");
    config.set_max_tokens_per_rank(512);
    config.set_max_hidden(256);
    config.set_max_top_k(4);
    config.set_max_experts(4 * ranks);
    config.set_max_token_dtype(v1::DTYPE_F32);
    config.set_base_timeout_ms(timeout_ms);
    return config;
  }
  static client::UpRequest UpRequestOf(std::vector<std::string> hosts,
                                       const v1::GroupConfig& config) {
    client::UpRequest request;
    request.group_id = "integration";
    request.hosts = std::move(hosts);
    request.config = config;
    request.claimant = client::MakeClaimant();
    return request;
  }
  // Forms a group of these hosts and a driver of it.
  void Form(const std::vector<std::string>& hosts, const v1::GroupConfig& config) {
    absl::StatusOr<client::Group> group = client::Up(UpRequestOf(hosts, config), Soon());
    ASSERT_OK(group);
    driver_.reset();
    group_ = std::make_unique<client::Group>(*std::move(group));
    driver_ = std::make_unique<client::StepDriver>(
        *group_, client::StepOptions{.timeout = absl::Seconds(30)});
  }
  void StartAndForm(int64_t count, int64_t timeout_ms = 20000) {
    Start(count);
    if (!HasFailure()) Form(processes().hosts(), Config(count, timeout_ms));
  }

  // REQUIRES: Form.
  client::Group& group() { return *group_; }
  client::StepDriver& driver() { return *driver_; }
  client::RankClient& rank(int64_t rank) { return *group_->ranks[static_cast<size_t>(rank)]; }
  int64_t world() const { return group_->world(); }

  // Two experts per rank, SGD, routed by the caller.
  v1::LayerConfig LayerConfig(int64_t hidden = kHidden) const {
    v1::LayerConfig config;
    config.set_expert_count(2 * world());
    config.set_top_k(kTopK);
    config.set_hidden(hidden);
    config.set_intermediate(8);
    config.set_token_dtype(v1::DTYPE_F32);
    config.set_weight_dtype(v1::DTYPE_F32);
    config.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    return config;
  }
  void MakeLayer(const std::string& layer_id, int64_t hidden = kHidden) {
    v1::CreateLayerRequest create;
    create.set_layer_id(layer_id);
    *create.mutable_config() = LayerConfig(hidden);
    ASSERT_OK(driver().RunSame(create));
    v1::InitializeWeightsRequest initialize;
    initialize.set_layer_id(layer_id);
    initialize.set_seed(11);
    ASSERT_OK(driver().RunSame(initialize));
  }

  // The same values every time; routes go to every rank.
  v1::ForwardRequest Forward(int64_t rank, int64_t tokens = 4, const std::string& layer_id = kLayer,
                             int64_t hidden = kHidden) const {
    v1::ForwardRequest request;
    request.set_layer_id(layer_id);
    std::vector<float> x;
    std::vector<int64_t> ids;
    std::vector<float> weights;
    const int64_t experts = 2 * world();
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < hidden; ++h) {
        x.push_back(static_cast<float>((rank * 31 + t * 17 + h * 7) % 64) / 32 - 1);
      }
      for (int64_t k = 0; k < kTopK; ++k) {
        ids.push_back((rank + t + k * (experts / 2)) % experts);
        weights.push_back(k == 0 ? 0.75f : 0.25f);
      }
    }
    *request.mutable_tokens() = client::FloatTensor(v1::DTYPE_F32, {tokens, hidden}, x);
    *request.mutable_topk()->mutable_topk_ids() = client::Int64Tensor({tokens, kTopK}, ids);
    *request.mutable_topk()->mutable_topk_weights() =
        client::FloatTensor(v1::DTYPE_F32, {tokens, kTopK}, weights);
    return request;
  }
  std::vector<v1::ForwardRequest> Forwards(const std::string& layer_id = kLayer) const {
    std::vector<v1::ForwardRequest> requests;
    for (int64_t rank = 0; rank < world(); ++rank) {
      requests.push_back(Forward(rank, 4, layer_id));
    }
    return requests;
  }
  // The outputs of a forward of all ranks, as bytes; a failure when it does not work.
  std::vector<std::string> Outputs(const std::string& layer_id = kLayer) {
    const auto responses = driver().Run(Forwards(layer_id));
    EXPECT_TRUE(responses.ok()) << responses.status();
    std::vector<std::string> outputs;
    if (!responses.ok()) return outputs;
    for (const auto& response : *responses) outputs.push_back(response.output().data());
    return outputs;
  }

 private:
  std::unique_ptr<testing::ProcessGroup> processes_;
  std::unique_ptr<client::Group> group_;
  std::unique_ptr<client::StepDriver> driver_;
};

// Fails unless the status has this reason and all of these in its text.
inline void ExpectError(const absl::Status& status, Reason reason,
                        const std::vector<std::string>& parts) {
  EXPECT_TRUE(HasReason(status, reason)) << "need " << ReasonName(reason) << ", got " << status;
  for (const std::string& part : parts) {
    EXPECT_TRUE(absl::StrContains(status.message(), part))
        << "need \"" << part << "\" in " << status;
  }
}

// Fails unless the status is a STEP_TIMEOUT that names exactly these ranks, "1,3".
inline void ExpectMissing(const absl::Status& status, const std::string& ranks) {
  ExpectError(status, Reason::kStepTimeout, {StrCat("ranks ", ranks, " ")});
  std::string missing;
  for (const auto& [key, value] : DetailOf(status).metadata) {
    if (key == "missing_ranks") missing = value;
  }
  EXPECT_EQ(missing, ranks) << status;
}

}  // namespace expertd::integration

#endif  // TESTS_INTEGRATION_PROCESS_TEST_H_
