// Stages of steps: what they add up to, and what the clock makes of marks.
#include "server/engine/stage_clock.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/server/engine/cluster.h"

namespace expertd::engine {
namespace {

// Spins, for a stage that takes at least that long.
void Spend(double micros) {
  const SteadyTime start = Clock::Real().Now();
  while (ToMicros(Clock::Real().Now() - start) < micros) {
  }
}

TEST(StageClock, GivesEachStageItsOwnTime) {
  auto device = *CreateDevice("cpu");
  StageClock stages;
  StepStats stats;
  ASSERT_TRUE(stages.Enter(*device, &StepStats::dispatch_us).ok());
  Spend(1000);
  ASSERT_TRUE(stages.Enter(*device, &StepStats::experts_us).ok());
  Spend(3000);
  ASSERT_TRUE(stages.Enter(*device, &StepStats::dispatch_us).ok());  // a stage may come again
  Spend(2000);
  ASSERT_TRUE(stages.Enter(*device, &StepStats::stage_out_us).ok());
  Spend(500);
  ASSERT_TRUE(stages.Finish(*device, stats).ok());
  EXPECT_GE(stats.dispatch_us, 2999);
  EXPECT_GE(stats.experts_us, 2999);
  EXPECT_GE(stats.stage_out_us, 499);
  EXPECT_EQ(stats.prepare_us, 0);
}

TEST(StageClock, WithoutAStageThereIsNothing) {
  auto device = *CreateDevice("cpu");
  StepStats stats;
  EXPECT_TRUE(StageClock().Finish(*device, stats).ok());
  EXPECT_EQ(stats.stage_out_us, 0);
}

// Arrival and the stages of a step follow each other within it.
void ExpectStages(const StepStats& stats, const std::vector<Stage>& used) {
  int64_t sum = stats.arrival_us;
  for (const Stage stage :
       {&StepStats::stage_in_us, &StepStats::prepare_us, &StepStats::dispatch_us,
        &StepStats::experts_us, &StepStats::combine_us, &StepStats::stage_out_us}) {
    sum += stats.*stage;
    EXPECT_GE(stats.*stage, 0);
    const bool is_used = std::find(used.begin(), used.end(), stage) != used.end();
    if (!is_used) {
      EXPECT_EQ(stats.*stage, 0);
    }
  }
  EXPECT_GT(sum, 0);
  EXPECT_LE(sum, stats.total_us);
}

TEST(StageClock, StagesOfAStepAddUpToAtMostItsTime) {
  const std::vector<Stage> all = {&StepStats::stage_in_us, &StepStats::prepare_us,
                                  &StepStats::dispatch_us, &StepStats::experts_us,
                                  &StepStats::combine_us,  &StepStats::stage_out_us};
  const std::vector<Stage> backward = {&StepStats::stage_in_us, &StepStats::dispatch_us,
                                       &StepStats::experts_us, &StepStats::combine_us,
                                       &StepStats::stage_out_us};
  Cluster cluster(2);
  cluster.Form();
  cluster.CreateReadyLayer();
  for (const int64_t rows : {0, 1, 8}) {
    std::vector<uint64_t> tickets;
    for (const Answer& answer : cluster.Good(
             [&](int64_t rank) { return MakeForward(GlobalRows(rank * rows, rows), true); })) {
      ExpectStages(answer->stats, all);
      tickets.push_back(static_cast<const ForwardOp&>(*answer).ticket);
    }
    for (const Answer& answer : cluster.Good([&](int64_t rank) {
           return MakeBackward(tickets[static_cast<size_t>(rank)], rows);
         })) {
      ExpectStages(answer->stats, backward);
    }
  }
}

}  // namespace
}  // namespace expertd::engine
