// EP conformance: cancelled, late, lost and given-up ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "base/strings.h"
#include "tests/conformance/ep/ep_world.h"

namespace expertd::conformance {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

class EpFailure : public testing::TestWithParam<std::string> {
 protected:
  bool survives(EpWorld& world) { return world.rank(0).capabilities().survives_cancel; }
};

double MillisSince(SteadyTime start) { return ToMicros(Clock::Real().Now() - start) / 1000; }

absl::Status Reduce(EpWorld& world, int64_t rank, const OpContext& context, int64_t count = 1000) {
  std::vector<float> data(static_cast<size_t>(count), 1.0f);
  return world.rank(rank).AllReduceSum(context, data.data(), count);
}

// After a failure: a backend that survives serves the next sequence, another says that it is
// broken.
void ExpectNextSequence(EpWorld& world, bool survives, const std::vector<int64_t>& ranks) {
  const OpContext context = world.Next();
  world.Run([&](int64_t rank) {
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) return;
    const absl::Status status = Reduce(world, rank, context);
    if (survives) {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      EXPECT_TRUE(HasReason(status, Reason::kGroupBroken)) << status;
    }
  });
}

// Rank 2 never comes. Ranks 0 and 1 wait until they are cancelled.
TEST_P(EpFailure, CancelEndsAWaitingOperationWithinAHundredMilliseconds) {
  EpWorld world(GetParam(), 3);
  const OpContext context = world.Next();
  std::promise<void> both_started;
  std::atomic<int> started{0};
  std::vector<absl::Status> statuses(2);
  std::vector<std::thread> waiting;
  for (int64_t rank : {0, 1}) {
    waiting.emplace_back([&, rank] {
      if (++started == 2) both_started.set_value();
      statuses[static_cast<size_t>(rank)] = Reduce(world, rank, context, 1 << 20);
    });
  }
  both_started.get_future().wait();
  const SteadyTime start = Clock::Real().Now();
  for (int64_t rank : {0, 1, 2}) world.rank(rank).Cancel(context.sequence);
  for (std::thread& thread : waiting) thread.join();
  EXPECT_LT(MillisSince(start), 100);
  // Rank 1 may see that rank 0 has left before its own cancel arrives.
  EXPECT_TRUE(HasReason(statuses[0], Reason::kCancelled)) << statuses[0];
  EXPECT_TRUE(HasReason(statuses[1], Reason::kCancelled) ||
              HasReason(statuses[1], Reason::kPeerLost))
      << statuses[1];
  // The late rank finds its sequence cancelled and does not wait for anybody.
  EXPECT_TRUE(HasReason(Reduce(world, 2, context), Reason::kCancelled) || !survives(world));
  ExpectNextSequence(world, survives(world),
                     survives(world) ? std::vector<int64_t>{0, 1, 2} : std::vector<int64_t>{0, 1});
}

TEST_P(EpFailure, CancelOfALaterSequenceCoversEarlierOnes) {
  EpWorld world(GetParam(), 2);
  const OpContext context = world.Next();
  world.rank(0).Cancel(context.sequence + 10);
  EXPECT_TRUE(HasReason(Reduce(world, 0, context), Reason::kCancelled));
}

TEST_P(EpFailure, CancelOfAnEarlierSequenceChangesNothing) {
  EpWorld world(GetParam(), 2);
  const OpContext first = world.Next();
  world.Run([&](int64_t rank) { EXPECT_TRUE(Reduce(world, rank, first).ok()); });
  world.rank(0).Cancel(first.sequence);
  const OpContext second = world.Next();
  world.Run([&](int64_t rank) {
    const absl::Status status = Reduce(world, rank, second);
    EXPECT_TRUE(status.ok()) << status;
  });
}

TEST_P(EpFailure, DeadlineNamesTheMissingRank) {
  EpWorld world(GetParam(), 3);
  const OpContext context = world.Next(milliseconds(50));
  std::vector<absl::Status> statuses(3);
  const SteadyTime start = Clock::Real().Now();
  world.Run([&](int64_t rank) {
    if (rank != 1) statuses[static_cast<size_t>(rank)] = Reduce(world, rank, context, 100);
  });
  EXPECT_LT(MillisSince(start), 1000);
  int timeouts = 0;
  for (size_t rank : {0u, 2u}) {
    if (!HasReason(statuses[rank], Reason::kStepTimeout)) {
      // The other one was first and left.
      EXPECT_TRUE(HasReason(statuses[rank], Reason::kPeerLost)) << statuses[rank];
      continue;
    }
    ++timeouts;
    EXPECT_THAT(std::string(statuses[rank].message()), HasSubstr("rank 1"));
  }
  EXPECT_GE(timeouts, 1);
  if (!survives(world)) return;
  // The late rank is not made to wait for a sequence that the others have left.
  const absl::Status late =
      Reduce(world, 1, {context.sequence, Soon(std::chrono::seconds(20))}, 100);
  EXPECT_TRUE(HasReason(late, Reason::kStepTimeout)) << late;
  ExpectNextSequence(world, true, {0, 1, 2});
}

// What a cancelled operation left behind must not be taken for a later operation's data.
TEST_P(EpFailure, BytesOfACancelledOperationNeverReachALaterOne) {
  EpWorld world(GetParam(), 2);
  if (!survives(world)) GTEST_SKIP() << GetParam() << " is broken after a cancel, by design";
  for (int round = 0; round < 50; ++round) {
    const OpContext cancelled = world.Next();
    std::thread waiting([&] {
      std::vector<float> stale(64, -1e9f);
      static_cast<void>(world.rank(0).AllReduceSum(cancelled, stale.data(), 64));
    });
    world.rank(0).Cancel(cancelled.sequence);
    world.rank(1).Cancel(cancelled.sequence);
    waiting.join();
    const OpContext next = world.Next();
    world.Run([&](int64_t rank) {
      std::vector<float> data(64, static_cast<float>(rank + 1));
      const absl::Status status = world.rank(rank).AllReduceSum(next, data.data(), 64);
      ASSERT_TRUE(status.ok()) << status;
      ASSERT_EQ(data, std::vector<float>(64, 3.0f));
    });
  }
}

TEST_P(EpFailure, LostPeerIsNamed) {
  EpWorld world(GetParam(), 3);
  const OpContext context = world.Next();
  std::vector<absl::Status> statuses(3);
  const SteadyTime start = Clock::Real().Now();
  world.Run([&](int64_t rank) {
    if (rank == 2) {
      world.Kill(2);
    } else {
      statuses[static_cast<size_t>(rank)] = Reduce(world, rank, context);
    }
  });
  EXPECT_LT(MillisSince(start), 5000);
  bool named = false;
  for (size_t rank : {0u, 1u}) {
    // On loopback the other survivor may have left the sequence first, for the same reason.
    EXPECT_TRUE(HasReason(statuses[rank], Reason::kPeerLost)) << statuses[rank];
    named = named || std::string(statuses[rank].message()).find('2') != std::string::npos;
  }
  EXPECT_TRUE(named) << statuses[0] << statuses[1];
}

TEST_P(EpFailure, AbortEndsRunningAndLaterOperations) {
  EpWorld world(GetParam(), 2);
  const OpContext context = world.Next();
  std::promise<void> started;
  absl::Status status;
  std::thread waiting([&] {
    started.set_value();
    status = Reduce(world, 0, context);
  });
  started.get_future().wait();
  const SteadyTime start = Clock::Real().Now();
  world.rank(0).Abort();
  waiting.join();
  EXPECT_LT(MillisSince(start), 1000);
  EXPECT_TRUE(HasReason(status, Reason::kGroupBroken)) << status;
  EXPECT_TRUE(HasReason(Reduce(world, 0, world.Next()), Reason::kGroupBroken));
  EXPECT_TRUE(HasReason(Reduce(world, 1, world.Next()), Reason::kPeerLost));
}

TEST_P(EpFailure, LeavingAfterTheLastOperationTakesNothingFromPeers) {
  for (int round = 0; round < 10; ++round) {
    EpWorld world(GetParam(), 3);
    const OpContext context = world.Next();
    world.Run([&](int64_t rank) {
      const absl::Status status = Reduce(world, rank, context, 300000 + 1000 * round);
      EXPECT_TRUE(status.ok()) << "rank " << rank << ": " << status;
      world.Kill(rank);
    });
  }
}

// Messages far over the socket buffers, both ways at once.
TEST_P(EpFailure, LargeMessagesBothWaysDoNotDeadlock) {
  EpWorld world(GetParam(), 2);
  constexpr int64_t kCount = 24 << 20;  // 96 MB
  const OpContext context = world.Next(std::chrono::seconds(60));
  world.Run([&](int64_t rank) {
    std::vector<float> data(kCount, static_cast<float>(rank + 1));
    const absl::Status status = world.rank(rank).AllReduceSum(context, data.data(), kCount);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(std::count(data.begin(), data.end(), 3.0f), kCount);
  });
}

TEST_P(EpFailure, CapabilitiesSayWhatTheBackendIs) {
  EpWorld world(GetParam(), 1);
  const EpCapabilities& capabilities = world.rank(0).capabilities();
  EXPECT_EQ(capabilities.name, GetParam());
  EXPECT_EQ(capabilities.survives_cancel, GetParam() == "loopback");
  EXPECT_EQ(capabilities.multi_process, GetParam() == "gloo");
  EXPECT_GE(capabilities.max_world, 72);
}

INSTANTIATE_TEST_SUITE_P(Backends, EpFailure, testing::Values("loopback", "gloo"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace expertd::conformance
