// Explores daemons that form groups while two controllers compete and calls come in any order.
#include <gtest/gtest.h>

#include <iostream>
#include <string>

#include "tests/model/explorer.h"
#include "tests/model/group_space.h"

namespace expertd::model {
namespace {

Exploration ExploreScope(GroupScope scope) {
  GroupSpace space(scope);
  const Exploration result = Explore(space);
  std::cout << "explored " << result.Summary() << "\n";
  return result;
}

void ExpectSound(const Exploration& result) {
  EXPECT_EQ(result.problem, "") << result.trace;
  EXPECT_TRUE(result.problem != "" || result.complete || result.limited);
}

TEST(GroupModelTest, TwoControllersCompete) { ExpectSound(ExploreScope({})); }

TEST(GroupModelTest, TimeLimitsPassEarly) { ExpectSound(ExploreScope({.daemons = 2, .early = 2})); }

TEST(GroupModelTest, LeaveAndAbortAtAnyTime) {
  ExpectSound(ExploreScope({.daemons = 2, .early = 1, .leaves = 2}));
}

TEST(GroupModelTest, AFailedControllerBeginsAnew) {
  ExpectSound(ExploreScope({.daemons = 2, .early = 1, .again = 1}));
}

struct Broken {
  const char* name;
  GroupMutation mutation;
  std::string rule;  // that must speak
  int daemons = 2;   // how many it takes
};

class GroupMutationTest : public ::testing::TestWithParam<Broken> {};

TEST_P(GroupMutationTest, IsFound) {
  const Exploration result =
      ExploreScope({.daemons = GetParam().daemons, .mutation = GetParam().mutation});
  if (result.limited) GTEST_SKIP() << "EXPERTD_MODEL_STATES stopped the exploration";
  EXPECT_EQ(result.problem.substr(0, GetParam().rule.size()), GetParam().rule)
      << result.problem << "\n"
      << result.trace;
  EXPECT_NE(result.trace, "");
}

INSTANTIATE_TEST_SUITE_P(
    All, GroupMutationTest,
    ::testing::Values(Broken{"SpendAnyClaim", GroupMutation::kSpendAnyClaim, "G6", 3},
                      Broken{"ShareClaim", GroupMutation::kShareClaim, "G2"},
                      Broken{"ForgetWaiters", GroupMutation::kForgetWaiters, "G3"},
                      Broken{"ReadyAlone", GroupMutation::kReadyAlone, "G4"},
                      Broken{"LateFinish", GroupMutation::kLateFinish, "G", 3}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace expertd::model
