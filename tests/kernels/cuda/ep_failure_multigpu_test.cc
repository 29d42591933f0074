// Two GPUs: cancelled, late and given-up ranks; order under random sizes and delays.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "base/error.h"
#include "tests/conformance/ep/ep_world.h"

namespace expertd::conformance {
namespace {

using std::chrono::milliseconds;

double MillisSince(SteadyTime start) { return ToMicros(Clock::Real().Now() - start) / 1000; }

absl::Status Reduce(EpWorld& world, int64_t rank, const OpContext& context, int64_t count = 1000) {
  std::vector<float> data(static_cast<size_t>(count), 1.0f);
  return world.rank(rank).AllReduceSum(context, data.data(), count);
}

// Connections are made on first use, which is no time to measure waiting.
void Warm(EpWorld& world) {
  const OpContext context = world.Next();
  world.Run([&](int64_t rank) {
    const absl::Status status = Reduce(world, rank, context);
    ASSERT_TRUE(status.ok()) << status;
  });
}

TEST(NcclFailure, CancelEndsTheWaitForAPeerThatNeverComes) {
  EpWorld world("nccl", 2);
  Warm(world);
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
  EXPECT_LT(ToMicros(ended - start) / 1000, 5);
  EXPECT_FALSE(world.rank(0).capabilities().survives_cancel);
  EXPECT_TRUE(HasReason(Reduce(world, 0, world.Next()), Reason::kGroupBroken));
}

TEST(NcclFailure, ASequenceCancelledBeforeDoesNotStart) {
  EpWorld world("nccl", 2);
  const OpContext context = world.Next();
  world.rank(0).Cancel(context.sequence + 10);
  EXPECT_TRUE(HasReason(Reduce(world, 0, context), Reason::kCancelled));
}

TEST(NcclFailure, CancelOfAnEarlierSequenceChangesNothing) {
  EpWorld world("nccl", 2);
  const OpContext first = world.Next();
  world.Run([&](int64_t rank) { EXPECT_TRUE(Reduce(world, rank, first).ok()); });
  world.rank(0).Cancel(first.sequence);
  Warm(world);
}

TEST(NcclFailure, DeadlineEndsTheWaitInDispatchToo) {
  EpWorld world("nccl", 2);
  const Problem problem = MakeProblem({.name = "late", .tokens = {9}}, 2);
  const Handles handles = PrepareAll(world, problem);
  const OpContext context = world.Next(milliseconds(200));
  const SteadyTime start = Clock::Real().Now();
  TestMatrix x = TokenRows(problem, 0, DType::kBF16, 1);
  TestMatrix recv(DType::kBF16, handles[0]->counts().total, problem.scenario.hidden);
  const absl::Status status =
      world.rank(0).Dispatch(context, *handles[0], x.view(), nullptr, recv.view(), nullptr);
  EXPECT_TRUE(HasReason(status, Reason::kStepTimeout)) << status;
  EXPECT_LT(MillisSince(start), 400);
}

TEST(NcclFailure, AbortIsBoundedAndANewWorldWorksOnTheSameDevices) {
  {
    EpWorld world("nccl", 2);
    Warm(world);
    const OpContext context = world.Next(milliseconds(100));
    EXPECT_TRUE(HasReason(Reduce(world, 0, context), Reason::kStepTimeout));
    const SteadyTime start = Clock::Real().Now();
    world.rank(0).Abort();
    EXPECT_LT(MillisSince(start), 5000);
    EXPECT_TRUE(HasReason(Reduce(world, 0, world.Next()), Reason::kGroupBroken));
    world.rank(1).Abort();
  }
  EpWorld again("nccl", 2);
  Warm(again);
}

TEST(NcclFailure, APeerThatIsGoneEndsTheStepByItsDeadline) {
  EpWorld world("nccl", 2);
  Warm(world);
  world.Kill(1);
  const SteadyTime start = Clock::Real().Now();
  const absl::Status status = Reduce(world, 0, world.Next(milliseconds(300)));
  EXPECT_FALSE(status.ok());
  EXPECT_LT(MillisSince(start), 2000);
}

// Values tell where they come from: any mix-up of steps, buffers or ranks shows.
class EpStress : public testing::TestWithParam<std::string> {};

TEST_P(EpStress, HundredsOfStepsOfRandomSizeAndDelayStayInOrder) {
  EpWorld world(GetParam(), 2);
  std::mt19937 random(77);
  for (int step = 0; step < 300; ++step) {
    Scenario scenario = {
        .name = "stress",
        .experts_per_rank = 1 + static_cast<int64_t>(random() % 5),
        .top_k = 1 + static_cast<int64_t>(random() % 4),
        .alignment = int64_t{1} << (random() % 4),
        .hidden = 1 + static_cast<int64_t>(random() % 70),
        .tokens = {static_cast<int64_t>(random() % 60), static_cast<int64_t>(random() % 60)},
        .routes = Routes::kHoles,
        .seed = static_cast<uint32_t>(random())};
    const Problem problem = MakeProblem(scenario, 2);
    const Layout layout = BuildLayout(problem);
    const Handles handles = PrepareAll(world, problem);
    const OpContext dispatch = world.Next();
    const OpContext combine = world.Next();
    const auto delays = {random() % 300, random() % 300};
    world.Run([&](int64_t rank) {
      const auto index = static_cast<size_t>(rank);
      std::this_thread::sleep_for(std::chrono::microseconds(*(delays.begin() + rank)));
      const auto salt = static_cast<uint32_t>(step);
      TestMatrix x = TokenRows(problem, rank, DType::kBF16, salt);
      TestMatrix recv(DType::kBF16, handles[index]->counts().total + 4, x.cols());
      TestMatrix want = SlotRows(problem, layout, rank, DType::kBF16, salt);
      ASSERT_TRUE(world.rank(rank)
                      .Dispatch(dispatch, *handles[index], x.view(), nullptr, recv.view(), nullptr)
                      .ok());
      for (size_t slot = 0; slot < layout.slots[index].size(); ++slot) {
        if (layout.slots[index][slot].source < 0) continue;
        const auto row = static_cast<int64_t>(slot);
        ASSERT_EQ(std::memcmp(recv.At(row, 0), want.At(row, 0), want.row_bytes()), 0)
            << "step " << step << " slot " << slot;
      }
      TestMatrix y(DType::kBF16, x.rows(), x.cols());
      ASSERT_TRUE(
          world.rank(rank).Combine(combine, *handles[index], recv.view(), nullptr, y.view()).ok());
      for (int64_t t = 0; t < x.rows(); ++t) {
        const auto begin = problem.ranks[index].ids.begin() + t * problem.top_k;
        const auto valid = static_cast<double>(
            std::count_if(begin, begin + problem.top_k, [](int64_t id) { return id >= 0; }));
        for (int64_t h = 0; h < x.cols(); ++h) {
          ASSERT_EQ(y.Get(t, h), valid * x.Get(t, h)) << "step " << step;
        }
      }
    });
    if (testing::Test::HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(MultiGpu, EpStress, testing::Values("nccl", "nccl_lsa"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace expertd::conformance
