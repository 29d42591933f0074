// Two GPUs, nccl_lsa: cancelled, late and lost ranks; the same group serves the next sequence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "tests/conformance/ep/ep_checks.h"
#include "tests/conformance/ep/ep_world.h"

namespace expertd::conformance {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr char kBackend[] = "nccl_lsa";

double MillisSince(SteadyTime start) { return ToMicros(Clock::Real().Now() - start) / 1000; }

absl::Status Reduce(EpWorld& world, int64_t rank, const OpContext& context, int64_t count = 1000) {
  std::vector<float> data(static_cast<size_t>(count), static_cast<float>(rank + 1));
  RETURN_IF_ERROR(world.rank(rank).AllReduceSum(context, data.data(), count));
  for (float value : data) EXPECT_EQ(value, 3.0f);
  return absl::OkStatus();
}

// The group is as good as new: a whole step with values that tell where they come from.
void ExpectGoodStep(EpWorld& world, uint32_t seed) {
  const Problem problem = MakeProblem(
      {.name = "good", .top_k = 3, .alignment = 4, .hidden = 24, .tokens = {19, 11}, .seed = seed},
      world.size());
  const Handles handles = PrepareAll(world, problem);
  if (testing::Test::HasFatalFailure()) return;
  CheckDispatch(world, problem, BuildLayout(problem), handles, DType::kBF16, true);
  const OpContext context = world.Next();
  world.Run([&](int64_t rank) {
    const absl::Status status = Reduce(world, rank, context);
    EXPECT_TRUE(status.ok()) << status;
  });
}

TEST(LsaFailure, CancelEndsTheWaitForAPeerThatNeverComesAndTheNextSequenceWorks) {
  EpWorld world(kBackend, 2);
  ExpectGoodStep(world, 1);
  const OpContext context = world.Next();
  absl::Status status;
  SteadyTime ended;
  std::thread waiting([&] {
    status = Reduce(world, 0, context);
    ended = Clock::Real().Now();
  });
  std::this_thread::sleep_for(milliseconds(100));  // it waits by then; no harm if it does not
  const SteadyTime start = Clock::Real().Now();
  world.rank(0).Cancel(context.sequence);
  waiting.join();
  EXPECT_TRUE(HasReason(status, Reason::kCancelled)) << status;
  EXPECT_LT(ToMicros(ended - start) / 1000, 10);
  EXPECT_TRUE(world.rank(0).capabilities().survives_cancel);
  // The late rank does not wait for a sequence that the other has left.
  const SteadyTime late = Clock::Real().Now();
  EXPECT_TRUE(HasReason(Reduce(world, 1, context), Reason::kPeerLost));
  EXPECT_LT(MillisSince(late), 100);
  ExpectGoodStep(world, 2);
}

TEST(LsaFailure, ASequenceCancelledBeforeDoesNotStart) {
  EpWorld world(kBackend, 2);
  const OpContext context = world.Next();
  world.rank(0).Cancel(context.sequence + 10);
  EXPECT_TRUE(HasReason(Reduce(world, 0, context), Reason::kCancelled));
}

TEST(LsaFailure, CancelOfAnEarlierSequenceChangesNothing) {
  EpWorld world(kBackend, 2);
  const OpContext first = world.Next();
  world.Run([&](int64_t rank) { EXPECT_TRUE(Reduce(world, rank, first).ok()); });
  world.rank(0).Cancel(first.sequence);
  ExpectGoodStep(world, 3);
}

// In every operation, and whoever is the one that does not come.
TEST(LsaFailure, DeadlineNamesTheMissingRankInEveryOperation) {
  EpWorld world(kBackend, 2);
  const Problem problem = MakeProblem({.name = "late", .tokens = {9}}, 2);
  const Layout layout = BuildLayout(problem);
  for (const int64_t missing : {1, 0}) {
    const int64_t rank = 1 - missing;
    const Handles handles = PrepareAll(world, problem);
    const EpHandle& handle = *handles[static_cast<size_t>(rank)];
    TestMatrix x = TokenRows(problem, rank, DType::kBF16, 1);
    TestMatrix recv = SlotRows(problem, layout, rank, DType::kBF16, 1);
    EpBackend& ep = world.rank(rank);
    const std::vector<std::function<absl::Status(const OpContext&)>> operations = {
        [&](const OpContext& c) { return ep.Prepare(c, ArgsOf(problem, rank)).status(); },
        [&](const OpContext& c) {
          return ep.Dispatch(c, handle, x.view(), nullptr, recv.view(), nullptr);
        },
        [&](const OpContext& c) { return ep.Combine(c, handle, recv.view(), nullptr, x.view()); },
        [&](const OpContext& c) {
          return ep.CombineBackward(c, handle, x.view(), nullptr, recv.view());
        },
        [&](const OpContext& c) {
          return ep.DispatchBackward(c, handle, recv.view(), nullptr, x.view(), nullptr);
        },
        [&](const OpContext& c) { return Reduce(world, rank, c); }};
    for (size_t i = 0; i < operations.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "operation " << i << " missing " << missing);
      const OpContext context = world.Next(milliseconds(60));
      const SteadyTime start = Clock::Real().Now();
      const absl::Status status = operations[i](context);
      EXPECT_TRUE(HasReason(status, Reason::kStepTimeout)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(StrCat("waiting for rank ", missing)));
      EXPECT_LT(MillisSince(start), 200);
      ExpectGoodStep(world, static_cast<uint32_t>(i));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// Cancelled at any moment, on one rank or both: no wrong value afterwards.
TEST(LsaFailure, BytesOfACancelledOperationNeverReachALaterOne) {
  EpWorld world(kBackend, 2);
  std::mt19937 random(5);
  for (int round = 0; round < 60; ++round) {
    const OpContext cancelled = world.Next();
    std::vector<std::thread> waiting;
    for (int64_t rank = 0; rank < 1 + round % 2; ++rank) {
      waiting.emplace_back([&, rank] {
        std::vector<float> stale(70000, -1e9f);
        static_cast<void>(world.rank(rank).AllReduceSum(cancelled, stale.data(), 70000));
      });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
    world.rank(round % 2).Cancel(cancelled.sequence);
    world.rank(0).Cancel(cancelled.sequence);
    for (std::thread& thread : waiting) thread.join();
    ExpectGoodStep(world, static_cast<uint32_t>(round));
    if (testing::Test::HasFailure()) return;
  }
}

TEST(LsaFailure, AbortIsBoundedAndANewWorldWorksOnTheSameDevices) {
  {
    EpWorld world(kBackend, 2);
    ExpectGoodStep(world, 4);
    const OpContext context = world.Next(milliseconds(100));
    EXPECT_TRUE(HasReason(Reduce(world, 0, context), Reason::kStepTimeout));
    const SteadyTime start = Clock::Real().Now();
    world.rank(0).Abort();
    EXPECT_LT(MillisSince(start), 5000);
    EXPECT_TRUE(HasReason(Reduce(world, 0, world.Next()), Reason::kGroupBroken));
    world.rank(1).Abort();
  }
  EpWorld again(kBackend, 2);
  ExpectGoodStep(again, 5);
}

TEST(LsaFailure, APeerThatIsGoneEndsTheStepByItsDeadline) {
  EpWorld world(kBackend, 2);
  ExpectGoodStep(world, 6);
  world.Kill(1);
  const SteadyTime start = Clock::Real().Now();
  const absl::Status status = Reduce(world, 0, world.Next(milliseconds(300)));
  EXPECT_TRUE(HasReason(status, Reason::kStepTimeout)) << status;
  EXPECT_LT(MillisSince(start), 2000);
}

TEST(LsaFailure, LargeSumsGoThroughTheWindowInPieces) {
  EpWorld world(kBackend, 2);
  const OpContext context = world.Next();
  world.Run([&](int64_t rank) {
    const absl::Status status = Reduce(world, rank, context, (3 << 20) + 77);
    EXPECT_TRUE(status.ok()) << status;
  });
}

}  // namespace
}  // namespace expertd::conformance
