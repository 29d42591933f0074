// Explores daemons that run sequences under delays, time limits, refusals, losses and
// cancellations.
#include <gtest/gtest.h>

#include <iostream>
#include <string>

#include "tests/model/explorer.h"
#include "tests/model/sequence_space.h"

namespace expertd::model {
namespace {

constexpr PlannedRequest kForward = {.op = OpKind::kForward};
constexpr PlannedRequest kBackward = {.op = OpKind::kBackward};
constexpr PlannedRequest kClear = {.op = OpKind::kClearGradients};
constexpr PlannedRequest kCreate = {.op = OpKind::kCreateLayer};
constexpr PlannedRequest kApply = {.op = OpKind::kApplyGradients, .expected_version = 0};

template <int kRanks, int kSequences>
Exploration ExploreScope(Scope scope) {
  scope.ranks = kRanks;
  SequenceSpace<kRanks, kSequences> space(std::move(scope));
  const Exploration result = Explore(space);
  std::cout << "explored " << result.Summary() << "\n";
  return result;
}

void ExpectSound(const Exploration& result) {
  EXPECT_EQ(result.problem, "") << result.trace;
  EXPECT_TRUE(result.problem != "" || result.complete || result.limited);
}

TEST(SequenceModelTest, ThreeRanksOneSequence) {
  ExpectSound(ExploreScope<3, 3>({.sequences = 1,
                                  .plan_a = {kForward},
                                  .may_reject = true,
                                  .faults = 1,
                                  .early = 2,
                                  .cancels = 1}));
}

TEST(SequenceModelTest, ThreeRanksTwoSequences) {
  ExpectSound(ExploreScope<3, 4>({.sequences = 2, .plan_a = {kCreate, kForward}, .early = 1}));
}

TEST(SequenceModelTest, TwoRanksThreeSequencesWithLostMessages) {
  ExpectSound(ExploreScope<2, 5>(
      {.sequences = 3, .plan_a = {kBackward, kCreate, kForward}, .faults = 1, .early = 1}));
}

TEST(SequenceModelTest, CancelledCallersAndRefusedRequests) {
  ExpectSound(ExploreScope<2, 4>({.sequences = 2,
                                  .plan_a = {kCreate, kForward},
                                  .may_reject = true,
                                  .survives_cancel = true,
                                  .early = 1,
                                  .cancels = 2}));
}

TEST(SequenceModelTest, RetriesNeverRunTwice) {
  ExpectSound(ExploreScope<2, 4>({.sequences = 2,
                                  .plan_a = {kApply, kApply},
                                  .retries = true,
                                  .early = 1,
                                  .cancels = 1,
                                  .kept_replies = 1}));
}

TEST(SequenceModelTest, TwoControllersWithOtherPlans) {
  ExpectSound(
      ExploreScope<3, 3>({.sequences = 1, .plan_a = {kForward}, .plan_b = {kCreate}, .early = 2}));
  ExpectSound(ExploreScope<2, 4>(
      {.sequences = 2, .plan_a = {kForward, kCreate}, .plan_b = {kCreate, kForward}, .early = 1}));
}

TEST(SequenceModelTest, SmallWindowAndGaps) {
  ExpectSound(ExploreScope<2, 5>({.sequences = 3,
                                  .plan_a = {kCreate, kCreate, kCreate},
                                  .faults = 1,
                                  .early = 1,
                                  .window = 2}));
}

TEST(SequenceModelTest, ApplyIsAllOrToldByVersion) {
  ExpectSound(ExploreScope<2, 5>({.sequences = 3,
                                  .plan_a = {kApply, kApply, kForward},
                                  .survives_cancel = true,
                                  .faults = 1,
                                  .early = 1}));
}

TEST(SequenceModelTest, ThreeRanksApply) {
  ExpectSound(ExploreScope<3, 3>({.sequences = 1, .plan_a = {kApply}, .faults = 1, .early = 2}));
}

// A Backward or ClearGradients may end well on some ranks only; the next ApplyGradients must not
// mix accumulators of different backwards.
TEST(SequenceModelTest, GradientsOfDifferentBackwardsAreNeverApplied) {
  for (const PlannedRequest& second : {kBackward, kClear}) {
    for (bool survives : {false, true}) {
      ExpectSound(ExploreScope<2, 5>({.sequences = 3,
                                      .plan_a = {kBackward, second, kApply},
                                      .survives_cancel = survives,
                                      .early = 2}));
    }
  }
}

// Every rule catches what it is there for.
struct Broken {
  const char* name;
  Mutation mutation;
  std::string rule;  // that must speak
  Scope scope;
};

class SequenceMutationTest : public ::testing::TestWithParam<Broken> {};

TEST_P(SequenceMutationTest, IsFound) {
  Scope scope = GetParam().scope;
  scope.mutation = GetParam().mutation;
  const Exploration result = ExploreScope<2, 4>(scope);
  if (result.limited) GTEST_SKIP() << "EXPERTD_MODEL_STATES stopped the exploration";
  EXPECT_EQ(result.problem.substr(0, GetParam().rule.size()), GetParam().rule)
      << result.problem << "\n"
      << result.trace;
  EXPECT_NE(result.trace, "");
}

INSTANTIATE_TEST_SUITE_P(
    All, SequenceMutationTest,
    ::testing::Values(
        Broken{"SkipClose", Mutation::kSkipClose, "S9", {.sequences = 1, .plan_a = {kCreate}}},
        Broken{"RejectedStaysAway",
               Mutation::kRejectedStaysAway,
               "S9",
               {.sequences = 1, .plan_a = {kCreate}, .may_reject = true}},
        Broken{"ForgetAbandoned",
               Mutation::kForgetAbandoned,
               "no agreed sequence",
               {.sequences = 2, .plan_a = {kCreate, kCreate}, .early = 1}},
        Broken{"KeepClosed", Mutation::kKeepClosed, "S9", {.sequences = 1, .plan_a = {kCreate}}},
        Broken{
            "EndTwice", Mutation::kEndTwice, "S", {.sequences = 2, .plan_a = {kCreate, kCreate}}},
        Broken{"RerunReplies",
               Mutation::kRerunReplies,
               "S3",
               {.sequences = 1, .plan_a = {kCreate}, .retries = true}},
        Broken{"ApplyWithoutVote",
               Mutation::kApplyWithoutVote,
               "S4",
               {.sequences = 1, .plan_a = {kApply}, .early = 1}},
        Broken{
            "TrustAccumulators",
            Mutation::kTrustAccumulators,
            "S7",
            {.sequences = 2, .plan_a = {kBackward, kApply}, .survives_cancel = true, .early = 1}}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace expertd::model
