// Random refusals, absences, cancellations, retries, losses and re-formings on a group of four:
// every request is answered, all ranks stay in step, and the group works afterwards.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/server/engine/cluster.h"
#include "tests/server/engine/test_seed.h"

namespace expertd::engine {
namespace {

constexpr int64_t kWorld = 4;

class EngineChaosTest : public testing::Test {
 protected:
  EngineChaosTest() { cluster_.FormWithLayer(100); }

  // One sequence in which every rank behaves at random.
  void RandomStep(TestSeed& seed) {
    const uint64_t sequence = cluster_.next++;
    std::vector<std::future<Answer>> futures;
    std::vector<int64_t> absent;
    for (int64_t rank = 0; rank < kWorld; ++rank) {
      const uint64_t choice = seed.Below(10);
      if (choice == 0) {
        absent.push_back(rank);
        continue;
      }
      std::shared_ptr<Operation> op = MakeForward(GlobalRows(rank, 1), choice == 1);
      if (choice == 2) op->rejected = Error(Reason::kPayloadSizeMismatch).Text("refused");
      if (choice == 3) op->deadline = Clock::Real().Now() + std::chrono::milliseconds(1);
      futures.push_back(cluster_.Submit(rank, op, sequence));
      if (choice == 4) {  // a retry beside the first
        futures.push_back(cluster_.Submit(rank, MakeForward(GlobalRows(rank, 1)), sequence));
      }
      if (choice == 5) {
        cluster_.engine(rank).CancelOperation({"group", cluster_.epoch, sequence, 1000 + sequence});
      }
    }
    for (auto& future : futures) Await(std::move(future));
    for (int64_t rank : absent) {  // late, and perhaps told already why it is too late
      Await(cluster_.Submit(rank, MakeForward(GlobalRows(rank, 1)), sequence));
    }
    for (int64_t rank = 0; rank < kWorld; ++rank) {
      WaitUntil([&] { return cluster_.engine(rank).DescribeGroup().next_sequence > sequence; });
      EXPECT_EQ(cluster_.engine(rank).DescribeGroup().next_sequence, sequence + 1);
      EXPECT_EQ(cluster_.engine(rank).DescribeGroup().state, GroupState::kReady);
      EXPECT_EQ(cluster_.engine(rank).Counters().queue_length, 0);
      EXPECT_EQ(cluster_.engine(rank).Counters().bytes_in_flight, 0);
    }
  }

  // A step that has room for slow machines, in an epoch of its own.
  void ExpectWorksAgain(uint64_t epoch) {
    cluster_.config.base_timeout_ms = 10000;
    cluster_.Form(epoch);
    cluster_.ExpectWorks();
    cluster_.config.base_timeout_ms = 100;
  }

  Cluster cluster_{kWorld};
};

TEST_F(EngineChaosTest, RanksStayInStepWhateverTheirCallersDo) {
  TestSeed seed;
  SCOPED_TRACE(seed.Trace());
  for (int i = 0; i < 60; ++i) RandomStep(seed);
  ExpectWorksAgain(3);
}

TEST_F(EngineChaosTest, RanksStayInStepThoughRecordsAreLost) {
  TestSeed seed;
  SCOPED_TRACE(seed.Trace());
  auto random = std::make_shared<TestSeed>(seed);
  cluster_.network.SetFilter(
      [random](const Letter&) { return random->Below(10) == 0 ? Fate::kDrop : Fate::kDeliver; });
  for (int i = 0; i < 30; ++i) RandomStep(seed);
  cluster_.network.ReleaseAll();
  ExpectWorksAgain(3);
}

TEST_F(EngineChaosTest, StepsFromManyThreadsAreAllAnsweredWhileTheGroupIsFormedAnew) {
  TestSeed seed;
  SCOPED_TRACE(seed.Trace());
  std::atomic<bool> stop = false;
  std::atomic<uint64_t> epoch = cluster_.epoch;
  std::atomic<int64_t> asked = 0;
  std::atomic<int64_t> answered = 0;
  std::vector<std::thread> callers;
  for (int64_t rank = 0; rank < kWorld; ++rank) {
    callers.emplace_back([&, rank] {
      Engine& engine = cluster_.engine(rank);
      while (!stop) {
        const GroupInfo info = engine.DescribeGroup();
        std::shared_ptr<Operation> op = MakeForward(GlobalRows(rank, 1));
        op->header = {"group", epoch, info.next_sequence, info.next_sequence};
        auto done = std::make_shared<std::promise<void>>();
        ++asked;
        engine.Submit(op, [done, &answered](const Answer&) {
          ++answered;
          done->set_value();
        });
        engine.CancelOperation({"group", epoch, info.next_sequence + 1, 0});
        Await(done->get_future());
      }
    });
  }
  for (uint64_t next = 3; next <= 9; ++next) {
    if (seed.Below(3) == 0) {
      EXPECT_TRUE(cluster_.Abort(0, epoch).ok());
    }
    if (seed.Below(3) == 0) {
      EXPECT_TRUE(cluster_.Leave(1, epoch).ok());
    }
    cluster_.Form(next);
    epoch = next;
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(asked, answered);
  ExpectWorksAgain(10);
}

}  // namespace
}  // namespace expertd::engine
