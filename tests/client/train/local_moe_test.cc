// The in-process MoE layer: routing, gradients, tickets and the optimizer.
#include "client/expertctl/train/local_moe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "tests/client/train/finite_difference.h"

namespace expertd::train {
namespace {

constexpr int64_t kTokens = 8;
constexpr LocalMoeOptions kOptions = {.hidden = 6,
                                      .intermediate = 5,
                                      .experts = 4,
                                      .top_k = 2,
                                      .aux_loss_coefficient = 0.5,
                                      .momentum = 0.5};

// Rows are permutations of well separated values, so that small changes select no other expert.
std::vector<float> SeparatedLogits() {
  std::vector<float> logits;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t e = 0; e < kOptions.experts; ++e) {
      logits.push_back(0.3f * static_cast<float>((e * (t % 2 == 0 ? 1 : 3) + t) % 4));
    }
  }
  return logits;
}

class LocalMoeTest : public testing::Test {
 protected:
  std::unique_ptr<LocalMoe> layer_ = *LocalMoe::Create(kOptions);
  std::vector<float> tokens_ = RandomVector(kTokens * kOptions.hidden, 1);
  std::vector<float> logits_ = SeparatedLogits();
  std::vector<float> direction_ = RandomVector(kTokens * kOptions.hidden, 2);
};

TEST_F(LocalMoeTest, GradientsMatchFiniteDifferences) {
  constexpr double kAuxGradient = 1.5;
  const auto loss = [&] {
    const auto result = layer_->Forward(tokens_, logits_, Keep::kNothing);
    return Dot(result->output, direction_) + kAuxGradient * result->aux_loss;
  };
  const auto forward = layer_->Forward(tokens_, logits_, Keep::kForBackward);
  ASSERT_TRUE(forward.ok());
  const auto backward = layer_->Backward(forward->ticket, direction_, kAuxGradient);
  ASSERT_TRUE(backward.ok());
  ExpectGradient("tokens", &tokens_, backward->tokens_gradient, loss);
  ExpectGradient("logits", &logits_, backward->router_logits_gradient, loss);
  for (Parameter& weight : layer_->weights()) {
    ExpectGradient(weight.name, &weight.value, weight.gradient, loss);
  }
}

TEST_F(LocalMoeTest, TiesGoToTheLowerExpertsWithEqualWeights) {
  const auto tied =
      layer_->Forward(tokens_, std::vector<float>(logits_.size(), 2.0f), Keep::kNothing);
  ASSERT_TRUE(tied.ok());
  EXPECT_EQ(tied->tokens_per_expert, (std::vector<int64_t>{kTokens, kTokens, 0, 0}));
}

TEST_F(LocalMoeTest, AuxLossOfUniformRouterIsItsCoefficient) {
  const auto result =
      layer_->Forward(tokens_, std::vector<float>(logits_.size(), 0.0f), Keep::kNothing);
  EXPECT_NEAR(result->aux_loss, kOptions.aux_loss_coefficient, 1e-6);
}

TEST_F(LocalMoeTest, TicketIsSpentByBackward) {
  const auto forward = layer_->Forward(tokens_, logits_, Keep::kForBackward);
  EXPECT_TRUE(layer_->Backward(forward->ticket, direction_, 0).ok());
  EXPECT_TRUE(absl::IsNotFound(layer_->Backward(forward->ticket, direction_, 0).status()));
}

TEST_F(LocalMoeTest, ForwardWithoutKeepLeavesNoTicket) {
  const auto forward = layer_->Forward(tokens_, logits_, Keep::kNothing);
  EXPECT_TRUE(absl::IsNotFound(layer_->Backward(forward->ticket, direction_, 0).status()));
}

TEST_F(LocalMoeTest, ApplyIsSgdWithMomentum) {
  Parameter& weight = layer_->weights()[0];
  weight.value[0] = 1;
  weight.gradient[0] = 2;
  ASSERT_TRUE(layer_->Apply(0.25).ok());
  EXPECT_EQ(weight.value[0], 0.5f);  // Velocity 2.
  EXPECT_EQ(weight.gradient[0], 0);
  ASSERT_TRUE(layer_->Apply(0.25).ok());
  EXPECT_EQ(weight.value[0], 0.25f);  // Velocity 0.5 * 2.
}

TEST_F(LocalMoeTest, NoTokensGiveNoOutput) {
  const auto forward = layer_->Forward({}, {}, Keep::kForBackward);
  ASSERT_TRUE(forward.ok());
  EXPECT_TRUE(forward->output.empty());
  EXPECT_TRUE(layer_->Backward(forward->ticket, {}, 1).ok());
}

TEST_F(LocalMoeTest, WrongSizesAreRefused) {
  logits_.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(layer_->Forward(tokens_, logits_, Keep::kNothing).status()));
}

TEST(LocalMoeCreateTest, MoreSelectedThanExpertsIsRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(LocalMoe::Create({.experts = 2, .top_k = 3}).status()));
}

}  // namespace
}  // namespace expertd::train
