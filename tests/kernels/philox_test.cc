// Philox4x32-10 against the published known answers, and the uniform mapping.
#include "kernels/optim/philox.h"

#include <gtest/gtest.h>

#include <cmath>

namespace expertd {
namespace {

void ExpectBlock(const PhiloxBlock& counter, const PhiloxKey& key, const PhiloxBlock& expected) {
  const PhiloxBlock got = Philox4x32(counter, key);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(got.word[i], expected.word[i]) << "word " << i;
}

// From kat_vectors of Random123 1.09, "philox4x32 10".
TEST(Philox, KnownAnswers) {
  ExpectBlock({{0, 0, 0, 0}}, {{0, 0}}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  ExpectBlock({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, {{0xffffffff, 0xffffffff}},
              {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  ExpectBlock({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, {{0xa4093822, 0x299f31d0}},
              {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
}

TEST(Philox, EveryPartOfTheStreamKeyCounts) {
  const PhiloxKey base = StreamKey(1, 2, 3);
  for (const PhiloxKey& other :
       {StreamKey(2, 2, 3), StreamKey(1 + (uint64_t{1} << 40), 2, 3), StreamKey(1, 3, 3),
        StreamKey(1, 2 + (uint64_t{1} << 40), 3), StreamKey(1, 2, 4)}) {
    EXPECT_TRUE(other.word[0] != base.word[0] || other.word[1] != base.word[1]);
  }
}

TEST(Philox, UniformCoversTheHalfOpenRange) {
  for (float bound : {1.0f, 0.1f, 0.03125f, 3.7e-5f, 1.9999999f}) {
    const float unit = UniformUnit(bound);
    EXPECT_EQ(UniformFromWord(0, unit), -bound);
    EXPECT_LT(UniformFromWord(0xffffffffu, unit), bound);
    EXPECT_EQ(UniformFromWord(0x80000000u, unit), 0.0f);
    EXPECT_EQ(UniformFromWord(0x800000ffu, unit), 0.0f) << "the lowest eight bits do not count";
  }
}

TEST(Philox, UniformHasTheRightMoments) {
  const PhiloxKey key = StreamKey(7, 8, 9);
  double sum = 0;
  double squares = 0;
  constexpr int kBlocks = 1 << 16;
  for (uint64_t block = 0; block < kBlocks; ++block) {
    for (uint32_t word : StreamBlock(key, block).word) {
      const double value = UniformFromWord(word, UniformUnit(1.0f));
      sum += value;
      squares += value * value;
    }
  }
  constexpr double kCount = 4.0 * kBlocks;
  // Six standard deviations of the mean and of the mean square.
  EXPECT_NEAR(sum / kCount, 0, 6 * std::sqrt(1.0 / 3 / kCount));
  EXPECT_NEAR(squares / kCount, 1.0 / 3, 6 * std::sqrt(4.0 / 45 / kCount));
}

}  // namespace
}  // namespace expertd
