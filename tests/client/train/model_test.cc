// The whole tiny model: exact gradients, strict causality, errors that name the block.
#include "client/expertctl/train/model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/expertctl/train/local_moe.h"
#include "client/expertctl/train/ops.h"
#include "tests/client/train/finite_difference.h"

namespace expertd::train {
namespace {

constexpr ModelOptions kOptions = {.hidden = 8, .experts = 3, .taps = 3, .length = 5};
constexpr int64_t kSequences = 4;

struct TinyModel {
  std::vector<std::unique_ptr<LocalMoe>> layers;
  std::unique_ptr<Model> model;
};

TinyModel MakeModel(int64_t top_k) {
  TinyModel tiny;
  std::vector<MoeLayer*> layers;
  for (uint64_t i = 0; i < 2; ++i) {
    tiny.layers.push_back(*LocalMoe::Create({.hidden = kOptions.hidden,
                                             .intermediate = 6,
                                             .experts = kOptions.experts,
                                             .top_k = top_k,
                                             .aux_loss_coefficient = 0.1,
                                             .seed = i}));
    layers.push_back(tiny.layers.back().get());
  }
  tiny.model = *Model::Create(kOptions, layers);
  return tiny;
}

std::vector<uint8_t> Inputs() {
  std::vector<uint8_t> inputs;
  for (int64_t i = 0; i < kSequences * kOptions.length; ++i) {
    inputs.push_back(static_cast<uint8_t>(RandomBits(3, 1, i) % 4));
  }
  return inputs;
}

// All experts are selected, since a change of the selection has no derivative.
TEST(ModelTest, GradientsMatchFiniteDifferences) {
  TinyModel tiny = MakeModel(kOptions.experts);
  const std::vector<uint8_t> inputs = Inputs();
  std::vector<int> targets(inputs.begin(), inputs.end());
  std::rotate(targets.begin(), targets.begin() + 1, targets.end());
  targets[7] = kIgnoredTarget;
  const auto loss = [&] {
    const auto pass = tiny.model->Forward(inputs, Keep::kNothing);
    const CrossEntropy result = SoftmaxCrossEntropy(pass->logits, targets);
    return result.sum / static_cast<double>(result.scored) + pass->aux_loss;
  };
  const auto pass = tiny.model->Forward(inputs, Keep::kForBackward);
  ASSERT_TRUE(pass.ok()) << pass.status();
  const CrossEntropy result = SoftmaxCrossEntropy(pass->logits, targets);
  ASSERT_TRUE(tiny.model->Backward(*pass, result.gradient).ok());
  for (Parameter* parameter : tiny.model->parameters()) {
    ExpectGradient(parameter->name, &parameter->value, parameter->gradient, loss);
  }
  for (const auto& layer : tiny.layers) {
    for (Parameter& weight : layer->weights()) {
      ExpectGradient(weight.name, &weight.value, weight.gradient, loss);
    }
  }
}

TEST(ModelTest, ChangingAByteChangesNoEarlierLogits) {
  TinyModel tiny = MakeModel(2);
  const std::vector<uint8_t> inputs = Inputs();
  const auto before = tiny.model->Forward(inputs, Keep::kNothing);
  for (size_t changed = 0; changed < inputs.size(); ++changed) {
    std::vector<uint8_t> other = inputs;
    other[changed] ^= 0x55;
    const auto after = tiny.model->Forward(other, Keep::kNothing);
    const size_t end_of_sequence = (changed / kOptions.length + 1) * kOptions.length;
    for (size_t t = 0; t < inputs.size(); ++t) {
      const bool same =
          std::equal(before->logits.begin() + t * 256, before->logits.begin() + (t + 1) * 256,
                     after->logits.begin() + t * 256);
      // Routing never couples tokens, so other sequences keep their logits too.
      if (t < changed || t >= end_of_sequence) {
        EXPECT_TRUE(same) << t << " after " << changed;
      } else if (t == changed) {
        EXPECT_FALSE(same) << t;
      }
    }
  }
}

class FailingLayer : public MoeLayer {
 public:
  absl::StatusOr<ForwardResult> Forward(const std::vector<float>&, const std::vector<float>&,
                                        Keep) override {
    return absl::UnavailableError("gone");
  }
  absl::StatusOr<BackwardResult> Backward(uint64_t, const std::vector<float>&, double) override {
    return absl::UnavailableError("gone");
  }
  absl::Status Apply(double) override { return absl::UnavailableError("gone"); }
};

TEST(ModelTest, LayerErrorNamesItsBlock) {
  TinyModel tiny = MakeModel(1);
  FailingLayer failing;
  const auto model = Model::Create(kOptions, {tiny.layers[0].get(), &failing});
  const auto pass = (*model)->Forward(Inputs(), Keep::kNothing);
  EXPECT_EQ(pass.status(), absl::UnavailableError("block 1 forward: gone"));
}

TEST(ModelTest, PartOfASequenceIsRefused) {
  TinyModel tiny = MakeModel(1);
  EXPECT_TRUE(absl::IsInvalidArgument(
      tiny.model->Forward(std::vector<uint8_t>(7), Keep::kNothing).status()));
}

TEST(ModelTest, EveryWrongOptionIsReported) {
  const absl::Status status = Model::Create({.hidden = 0, .taps = -1}, {}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  for (const char* name : {"hidden=0", "taps=-1", "layers=0"}) {
    EXPECT_NE(status.message().find(name), absl::string_view::npos) << status;
  }
}

}  // namespace
}  // namespace expertd::train
