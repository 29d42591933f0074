// The training loop: it learns, keeps to its budget, reports and stops.
#include "client/expertctl/train/trainer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/expertctl/train/local_moe.h"

namespace expertd::train {
namespace {

class TrainTest : public testing::Test {
 protected:
  TrainTest() {
    std::string text;
    for (int i = 0; i < 60; ++i) text += "the cat sat on the mat; ";
    corpus_.train = {text};
    corpus_.validation = {text.substr(0, 300)};
    Rebuild();
  }

  void Rebuild() {
    layers_.clear();
    std::vector<MoeLayer*> layers;
    for (uint64_t seed : {1, 2}) {
      layers_.push_back(*LocalMoe::Create(
          {.hidden = 16, .intermediate = 16, .experts = 4, .top_k = 2, .seed = seed}));
      layers.push_back(layers_.back().get());
    }
    model_ = *Model::Create({.hidden = 16, .experts = 4, .taps = 4, .length = 32}, layers);
  }

  Corpus corpus_;
  std::vector<std::unique_ptr<LocalMoe>> layers_;
  std::unique_ptr<Model> model_;
};

TEST_F(TrainTest, LearnsARepeatedSentenceBelowItsBigramEntropy) {
  const auto result = Train({.steps = 150, .sequences = 8}, corpus_, {}, model_.get());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->steps, 150);
  EXPECT_GT(result->first_loss, 5);
  EXPECT_LT(result->final_loss, result->bigram_entropy - 0.1);
  EXPECT_GT(result->bigram_entropy, 0.3);
  EXPECT_FALSE(result->stopped);
}

TEST_F(TrainTest, SameSeedsGiveTheSameLosses) {
  const TrainOptions options = {.steps = 5, .sequences = 4};
  const auto first = Train(options, corpus_, {}, model_.get());
  Rebuild();
  const auto second = Train(options, corpus_, {}, model_.get());
  EXPECT_EQ(first->final_loss, second->final_loss);
}

TEST_F(TrainTest, ProgressTellsStepsLossesAndLoad) {
  std::vector<Progress> seen;
  const TrainHooks hooks = {.progress = [&](const Progress& p) { seen.push_back(p); }};
  const TrainOptions options = {.steps = 4, .sequences = 4, .middle_validations = 1};
  ASSERT_TRUE(Train(options, corpus_, hooks, model_.get()).ok());
  ASSERT_EQ(seen.size(), 4 + 3);  // Validations before, between and after.
  EXPECT_EQ(seen.front().step, 0);
  EXPECT_GT(seen.front().validation_loss, 0);
  EXPECT_EQ(seen.back().step, 4);
  EXPECT_EQ(seen.back().steps, 4);
  EXPECT_EQ(seen.back().fraction, 1);
  ASSERT_EQ(seen.back().tokens_per_expert.size(), 2);
  int64_t routes = 0;
  for (const int64_t count : seen.back().tokens_per_expert[0]) routes += count;
  EXPECT_EQ(routes, 4 * 32 * 2);
}

TEST_F(TrainTest, StopFlagEndsAfterTheRunningStep) {
  std::atomic<bool> stop = false;
  const TrainHooks hooks = {.progress = [&](const Progress& p) { stop = p.step == 3; },
                            .stop = &stop};
  const auto result =
      Train({.steps = 1000000, .middle_validations = 0}, corpus_, hooks, model_.get());
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->steps, 3);
  EXPECT_TRUE(result->stopped);
  EXPECT_GT(result->final_loss, 0);
}

// The clock moves one second at each reading, so the budget ends after a fixed number of steps.
TEST_F(TrainTest, SecondsEndTheTrainingWithoutAStepLimit) {
  double now = 0;
  const TrainHooks hooks = {.clock = [&now] { return now += 1; }};
  const auto result = Train({.seconds = 100, .sequences = 4}, corpus_, hooks, model_.get());
  ASSERT_TRUE(result.ok());
  EXPECT_GT(result->steps, 5);
  EXPECT_NEAR(result->elapsed_seconds, 100, 10);
}

TEST_F(TrainTest, EveryWrongOptionIsReported) {
  const absl::Status status =
      Train({.learning_rate = 0, .warmup = 1}, corpus_, {}, model_.get()).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  for (const char* name : {"steps", "learning_rate", "warmup"}) {
    EXPECT_NE(status.message().find(name), absl::string_view::npos) << status;
  }
}

TEST_F(TrainTest, EmptyValidationIsRefused) {
  corpus_.validation.clear();
  EXPECT_TRUE(absl::IsInvalidArgument(Train({.steps = 1}, corpus_, {}, model_.get()).status()));
}

TEST(LearningRateTest, RisesThenFallsToItsLastValue) {
  const TrainOptions options = {.warmup = 0.1, .last_rate = 0.2};
  EXPECT_GT(LearningRateFactor(options, 0), 0);
  EXPECT_NEAR(LearningRateFactor(options, 0.05), 0.5, 1e-12);
  EXPECT_NEAR(LearningRateFactor(options, 0.1), 1, 1e-12);
  EXPECT_NEAR(LearningRateFactor(options, 0.55), 0.6, 1e-12);
  EXPECT_NEAR(LearningRateFactor(options, 1), 0.2, 1e-12);
}

}  // namespace
}  // namespace expertd::train
