// The mixer's gradient, its causality and its separation of sequences.
#include "client/expertctl/train/mixer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/client/train/finite_difference.h"

namespace expertd::train {
namespace {

constexpr int64_t kHidden = 5;
constexpr int64_t kLength = 6;

class MixerTest : public testing::TestWithParam<int64_t> {
 protected:
  CausalMixer mixer_{{kHidden, GetParam(), kLength}, "mixer", 1, 1};
};

TEST_P(MixerTest, GradientMatchesFiniteDifferences) {
  std::vector<float> x = RandomVector(2 * kLength * kHidden, 1);
  const std::vector<float> direction = RandomVector(x.size(), 2);
  CausalMixer::Saved saved;
  const auto loss = [&] { return Dot(mixer_.Forward(x, &saved), direction); };
  loss();
  const std::vector<float> x_gradient = mixer_.Backward(x, saved, direction);
  ExpectGradient("x", &x, x_gradient, loss);
  for (Parameter* parameter : mixer_.parameters()) {
    ExpectGradient(parameter->name, &parameter->value, parameter->gradient, loss);
  }
}

TEST_P(MixerTest, OnePositionReachesExactlyTheNextTapsOfItsSequence) {
  std::vector<float> x = RandomVector(2 * kLength * kHidden, 1);
  CausalMixer::Saved saved;
  const std::vector<float> before = mixer_.Forward(x, &saved);
  for (int64_t changed = 0; changed < 2 * kLength; ++changed) {
    std::vector<float> other = x;
    for (int64_t i = 0; i < kHidden; ++i) other[changed * kHidden + i] += 1;
    const std::vector<float> after = mixer_.Forward(other, &saved);
    for (int64_t t = 0; t < 2 * kLength; ++t) {
      bool same = true;
      for (int64_t i = t * kHidden; i < (t + 1) * kHidden; ++i) same &= before[i] == after[i];
      const bool reached =
          t >= changed && t < changed + GetParam() && t / kLength == changed / kLength;
      EXPECT_EQ(same, !reached) << "position " << t << " after a change at " << changed;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Taps, MixerTest, testing::Values(1, 3, 6, 7));

}  // namespace
}  // namespace expertd::train
