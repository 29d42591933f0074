// The formed group's life through the engine: fencing, abort, leave, drain, watch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/engine/cluster.h"

namespace expertd::engine {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

std::shared_ptr<Operation> Rows(int64_t rank) { return MakeForward(GlobalRows(rank, 1)); }

SteadyTime In(int64_t ms) { return Clock::Real().Now() + milliseconds(ms); }

std::future<GroupInfo> StartWatch(Engine& engine, uint64_t known, int64_t ms = 20000) {
  auto promise = std::make_shared<std::promise<GroupInfo>>();
  engine.WatchGroup(known, In(ms), [promise](GroupInfo info) { promise->set_value(info); });
  return promise->get_future();
}

TEST(EngineGroupTest, ANewerEpochFencesTheOlderOneAndItsSteps) {
  Cluster cluster(2);
  cluster.Form(1);
  cluster.CreateReadyLayer();
  auto running = cluster.Submit(0, Rows(0), cluster.next);
  auto waiting = cluster.Submit(0, Rows(0), cluster.next + 2);
  cluster.Form(2);
  EXPECT_EQ(ReasonOf(Await(std::move(running))->status), Reason::kEpochStale);
  EXPECT_EQ(ReasonOf(Await(std::move(waiting))->status), Reason::kEpochStale);
  EXPECT_EQ(cluster.engine(0).Counters().queue_length, 0);
  EXPECT_EQ(cluster.engine(0).FindLayer("layer")->state, LayerState::kReady);
  cluster.ExpectWorks();  // layers survive epochs
}

TEST(EngineGroupTest, ANewerEpochFencesAJoinInProgress) {
  Cluster cluster(2);
  cluster.Claim(1);
  auto first = cluster.StartJoin(cluster.MakeJoin(0, 1));
  cluster.Form(2);
  EXPECT_EQ(ReasonOf(Await(std::move(first)).status()), Reason::kEpochStale);
}

TEST(EngineGroupTest, DeliveriesOfAFencedEpochDoNotFailTheNext) {
  Cluster cluster(2);
  cluster.Form(1);
  cluster.network.SetFilter(
      [](const Letter& letter) { return letter.record.epoch == 1 ? Fate::kHold : Fate::kDeliver; });
  auto stuck = cluster.Submit(0, MakeCreateLayer(), 1);
  cluster.Form(2);
  EXPECT_EQ(ReasonOf(Await(std::move(stuck))->status), Reason::kEpochStale);
  cluster.network.ReleaseAll();  // the transport of epoch 1 is gone: its delivery ends in an error
  cluster.CreateReadyLayer();
  cluster.ExpectWorks();
}

TEST(EngineGroupTest, TicketsOfAnOlderEpochAreRefusedByName) {
  Cluster cluster(1);
  cluster.Form(1);
  cluster.CreateReadyLayer();
  const Answer forward =
      cluster.Good([](int64_t) { return MakeForward(GlobalRows(0, 1), true); })[0];
  cluster.Form(2);
  const uint64_t ticket = static_cast<const ForwardOp&>(*forward).ticket;
  const Answer answer = cluster.Step([&](int64_t) { return MakeBackward(ticket, 1); })[0];
  EXPECT_EQ(ReasonOf(answer->status), Reason::kTicketUnknown);
  EXPECT_THAT(std::string(answer->status.message()), HasSubstr("another epoch"));
}

TEST(EngineGroupTest, ALayerOfAnotherMeshNeedsRestoreAndCannotBeInitialisedInPlace) {
  Cluster cluster(2);
  cluster.Form(1);
  cluster.CreateReadyLayer();
  // Rank 0 alone forms a group of one: its half of the experts is too little.
  cluster.config.ep_size = 1;
  cluster.Claim(2);
  JoinRequest request = cluster.MakeJoin(0, 2);
  request.members.resize(1);
  ASSERT_TRUE(Await(cluster.StartJoin(request)).ok());
  EXPECT_EQ(cluster.engine(0).FindLayer("layer")->state, LayerState::kNeedsRestore);
  cluster.epoch = 2;
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(0, Rows(0), 1))->status), Reason::kLayerNeedsRestore);
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(0, MakeInitialize(), 2))->status),
            Reason::kLayerNeedsRestore);
  EXPECT_TRUE(Await(cluster.Submit(0, MakeLayerOp(OpKind::kDeleteLayer), 3))->status.ok());
  EXPECT_TRUE(Await(cluster.Submit(0, MakeCreateLayer(), 4))->status.ok());
  EXPECT_TRUE(Await(cluster.Submit(0, MakeInitialize(), 5))->status.ok());
  EXPECT_TRUE(Await(cluster.Submit(0, Rows(0), 6))->status.ok());
}

TEST(EngineGroupTest, AbortEndsRunningStepsWithGroupBroken) {
  Cluster cluster(2);
  cluster.Form();
  cluster.CreateReadyLayer();
  auto running = cluster.Submit(0, Rows(0), cluster.next);
  auto waiting = cluster.Submit(0, Rows(0), cluster.next + 1);
  EXPECT_TRUE(cluster.Abort(0, 1).ok());
  EXPECT_EQ(ReasonOf(Await(std::move(running))->status), Reason::kGroupBroken);
  EXPECT_EQ(ReasonOf(Await(std::move(waiting))->status), Reason::kGroupBroken);
  const GroupInfo info = cluster.engine(0).DescribeGroup();
  EXPECT_EQ(info.state, GroupState::kBroken);
  EXPECT_THAT(info.reason, HasSubstr("test"));
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(0, Rows(0), 9))->status), Reason::kGroupBroken);
  cluster.Form(2);
  cluster.ExpectWorks();
}

TEST(EngineGroupTest, AbortAndLeaveEndAJoin) {
  for (const bool abort : {true, false}) {
    Cluster cluster(2);
    cluster.Claim(1);
    auto join = cluster.StartJoin(cluster.MakeJoin(0, 1));
    EXPECT_TRUE((abort ? cluster.Abort(0, 1) : cluster.Leave(0, 1)).ok());
    EXPECT_EQ(ReasonOf(Await(std::move(join)).status()), Reason::kCancelled);
    cluster.Form(2);
  }
}

TEST(EngineGroupTest, LeavingIsIdempotentAndAnOlderEpochIsStale) {
  Cluster cluster(2);
  cluster.Form(5);
  EXPECT_EQ(ReasonOf(cluster.Leave(0, 4)), Reason::kEpochStale);
  EXPECT_EQ(ReasonOf(cluster.Abort(0, 4)), Reason::kEpochStale);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(cluster.Leave(0, 5).ok());
  EXPECT_EQ(cluster.engine(0).DescribeGroup().state, GroupState::kIdle);
  EXPECT_EQ(cluster.engine(0).HighestEpochSeen(), 5u);
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(0, Rows(0), 1))->status), Reason::kGroupNotReady);
  EXPECT_TRUE(cluster.Leave(0, 9).ok());
  cluster.Form(6);
}

TEST(EngineGroupTest, DrainFinishesTheStepsThatAreQueued) {
  Cluster cluster(2);
  cluster.Form();
  cluster.CreateReadyLayer();
  std::vector<std::future<Answer>> futures;
  for (uint64_t ahead : {0u, 1u, 2u}) {
    futures.push_back(cluster.Submit(0, Rows(0), cluster.next + ahead));
  }
  auto drained = cluster.StartDrain(0, false);
  EXPECT_EQ(cluster.engine(0).DescribeGroup().state, GroupState::kDraining);
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(0, Rows(0), cluster.next + 3))->status),
            Reason::kDraining);
  for (uint64_t ahead : {0u, 1u, 2u}) {
    futures.push_back(cluster.Submit(1, Rows(1), cluster.next + ahead));
  }
  for (auto& future : futures) {
    const Answer answer = Await(std::move(future));
    EXPECT_TRUE(answer->status.ok()) << answer->status;
  }
  EXPECT_TRUE(Await(std::move(drained)).ok());
  EXPECT_EQ(cluster.engine(0).DescribeGroup().state, GroupState::kIdle);
  EXPECT_TRUE(cluster.engine(0).Draining());
}

TEST(EngineGroupTest, ADrainingDaemonTakesNoGroupUntilResumed) {
  Cluster cluster(1);
  EXPECT_TRUE(Await(cluster.StartDrain(0, false)).ok());
  EXPECT_EQ(ReasonOf(cluster.engine(0).CreateBootstrapId("group", 1, "test").status()),
            Reason::kDraining);
  EXPECT_TRUE(Await(cluster.StartDrain(0, true)).ok());
  cluster.Form();
}

TEST(EngineGroupTest, WatchAnswersEveryChangeOnce) {
  Cluster cluster(1);
  Engine& engine = cluster.engine(0);
  const uint64_t version = engine.DescribeGroup().version;
  EXPECT_EQ(Await(StartWatch(engine, version + 7)).version, version);  // differs already
  auto claimed = StartWatch(engine, version);
  cluster.Claim(1);
  const uint64_t after_claim = Await(std::move(claimed)).version;
  EXPECT_GT(after_claim, version);
  auto joining = StartWatch(engine, after_claim);
  EXPECT_TRUE(Await(cluster.StartJoin(cluster.MakeJoin(0, 1))).ok());
  EXPECT_EQ(Await(std::move(joining)).state, GroupState::kJoining);
  const uint64_t ready = engine.DescribeGroup().version;
  EXPECT_EQ(Await(StartWatch(engine, ready, 50)).version, ready);  // time is up
  auto left = StartWatch(engine, ready);
  EXPECT_TRUE(cluster.Leave(0, 1).ok());
  EXPECT_EQ(Await(std::move(left)).state, GroupState::kIdle);
}

TEST(EngineGroupTest, DestroyingAnEngineAnswersAllThatIsInFlight) {
  auto cluster = std::make_unique<Cluster>(2);
  cluster->Form();
  cluster->CreateReadyLayer();
  auto running = cluster->Submit(0, Rows(0), cluster->next);
  auto waiting = cluster->Submit(0, Rows(0), cluster->next + 1);
  auto early = cluster->Submit(1, Rows(1), cluster->next + 3);
  auto watch = StartWatch(cluster->engine(0), cluster->engine(0).DescribeGroup().version);
  const SteadyTime start = Clock::Real().Now();
  cluster.reset();
  EXPECT_LT(ToSeconds(Clock::Real().Now() - start), 5.0);
  EXPECT_EQ(ReasonOf(Await(std::move(running))->status), Reason::kCancelled);
  EXPECT_EQ(ReasonOf(Await(std::move(waiting))->status), Reason::kCancelled);
  EXPECT_EQ(ReasonOf(Await(std::move(early))->status), Reason::kCancelled);
  Await(std::move(watch));
}

TEST(EngineGroupTest, DestroyingAnEngineEndsAJoin) {
  auto cluster = std::make_unique<Cluster>(2);
  cluster->Claim(1);
  auto join = cluster->StartJoin(cluster->MakeJoin(0, 1));
  const SteadyTime start = Clock::Real().Now();
  cluster.reset();
  EXPECT_LT(ToSeconds(Clock::Real().Now() - start), 5.0);
  EXPECT_EQ(ReasonOf(Await(std::move(join)).status()), Reason::kCancelled);
}

}  // namespace
}  // namespace expertd::engine
