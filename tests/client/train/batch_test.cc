// Training windows stay inside runs; validation scores each pair once.
#include "client/expertctl/train/batch.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "client/expertctl/train/ops.h"

namespace expertd::train {
namespace {

// Consecutive bytes within a run, a gap between runs.
std::string Counting(int first, int size) {
  std::string run;
  for (int i = 0; i < size; ++i) run.push_back(static_cast<char>(first + i));
  return run;
}

TEST(BatchSamplerTest, WindowsStayInsideRunsAndReachAllStarts) {
  const std::vector<std::string> runs = {Counting(0, 5), Counting(50, 3), Counting(100, 8)};
  const BatchShape shape{.sequences = 3, .length = 4};
  const auto sampler = BatchSampler::Create(runs, shape, 1);
  ASSERT_TRUE(sampler.ok()) << sampler.status();
  std::set<int> starts;
  for (int64_t step = 0; step < 100; ++step) {
    const Batch batch = sampler->Sample(step);
    ASSERT_EQ(batch.inputs.size(), 12);
    for (size_t i = 0; i < 12; ++i) {
      EXPECT_EQ(batch.targets[i], batch.inputs[i] + 1);
      if (i % 4 == 0) starts.insert(batch.inputs[i]);
    }
  }
  EXPECT_EQ(starts, (std::set<int>{0, 100, 101, 102, 103}));
}

TEST(BatchSamplerTest, BatchDependsOnSeedAndStepOnly) {
  const std::vector<std::string> runs = {Counting(0, 200)};
  const BatchShape shape{.sequences = 4, .length = 8};
  const auto first = BatchSampler::Create(runs, shape, 1);
  const auto again = BatchSampler::Create(runs, shape, 1);
  const auto other = BatchSampler::Create(runs, shape, 2);
  first->Sample(0);
  EXPECT_EQ(first->Sample(5).inputs, again->Sample(5).inputs);
  EXPECT_NE(first->Sample(5).inputs, first->Sample(6).inputs);
  EXPECT_NE(first->Sample(5).inputs, other->Sample(5).inputs);
}

TEST(BatchSamplerTest, RunsWithoutOneWholeWindowAreRefused) {
  const std::vector<std::string> runs = {Counting(0, 4)};
  const auto sampler = BatchSampler::Create(runs, {.sequences = 1, .length = 4}, 1);
  EXPECT_TRUE(absl::IsInvalidArgument(sampler.status()));
}

TEST(ValidationBatchesTest, EveryPairIsScoredOnce) {
  const std::vector<std::string> runs = {Counting(0, 10), Counting(50, 5), Counting(100, 6),
                                         Counting(200, 4)};
  const auto batches = ValidationBatches(runs, {.sequences = 3, .length = 4});
  std::map<int, int> scored;  // By the pair's second byte.
  for (const Batch& batch : batches) {
    ASSERT_EQ(batch.inputs.size(), 12);
    ASSERT_EQ(batch.targets.size(), 12);
    for (size_t i = 0; i < 12; ++i) {
      if (batch.targets[i] == kIgnoredTarget) continue;
      EXPECT_EQ(batch.targets[i], batch.inputs[i] + 1);
      ++scored[batch.targets[i]];
    }
  }
  EXPECT_EQ(scored.size(), 9 + 4 + 5);  // The last run holds no window.
  for (const auto& [byte, times] : scored) EXPECT_EQ(times, 1) << byte;
}

}  // namespace
}  // namespace expertd::train
