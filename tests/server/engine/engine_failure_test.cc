// Steps that fail on some rank: refusals, missing ranks, late requests, differing callers. After
// each of them the group must still work.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/server/engine/cluster.h"

namespace expertd::engine {
namespace {

using testing::HasSubstr;

std::string Metadata(const absl::Status& status, const std::string& key) {
  for (const auto& [name, value] : DetailOf(status).metadata) {
    if (name == key) return value;
  }
  return "(none)";
}

std::string Text(const Answer& answer) { return std::string(answer->status.message()); }

std::shared_ptr<Operation> Rows(int64_t rank) { return MakeForward(GlobalRows(rank, 1)); }

// A request that was refused when it was decoded.
std::shared_ptr<Operation> Rejected() {
  auto op = MakeForward(GlobalRows(0, 1));
  op->rejected = Error(Reason::kPayloadSizeMismatch).At("tokens", "got 3 bytes, need 32");
  return op;
}

// A formed group of `world` with a layer and a short time limit.
class EngineFailureTest : public testing::Test {
 protected:
  Cluster& Start(int64_t world, int64_t timeout_ms = 10000) {
    cluster_ = std::make_unique<Cluster>(world);
    cluster_->FormWithLayer(timeout_ms);
    return *cluster_;
  }
  std::unique_ptr<Cluster> cluster_;
};

TEST_F(EngineFailureTest, ARefusedRequestIsPeerRejectedElsewhereAndTheGroupGoesOn) {
  Cluster& cluster = Start(4);
  const Answers answers = cluster.Step([](int64_t rank) -> std::shared_ptr<Operation> {
    if (rank == 2) return Rejected();
    return Rows(rank);
  });
  for (int64_t rank = 0; rank < 4; ++rank) {
    const absl::Status& status = answers[static_cast<size_t>(rank)]->status;
    if (rank == 2) {
      EXPECT_EQ(ReasonOf(status), Reason::kPayloadSizeMismatch);
      EXPECT_EQ(DetailOf(status).violations.at(0).path, "tokens");
    } else {
      EXPECT_EQ(ReasonOf(status), Reason::kPeerRejected) << status;
      EXPECT_EQ(Metadata(status, "rank"), "2");
      EXPECT_EQ(Metadata(status, "peer_reason"), "PAYLOAD_SIZE_MISMATCH");
    }
  }
  EXPECT_EQ(cluster.engine(0).DescribeGroup().state, GroupState::kReady);
  cluster.ExpectWorks();
}

TEST_F(EngineFailureTest, RefusalsOfTheEngineAreToldToPeersToo) {
  Cluster& cluster = Start(2);
  const Answers answers = cluster.Step([](int64_t rank) {
    auto op = MakeForward(GlobalRows(0, 1));
    if (rank == 1) op->layer_id = "another";
    return op;
  });
  EXPECT_EQ(ReasonOf(answers[1]->status), Reason::kLayerUnknown);
  EXPECT_EQ(ReasonOf(answers[0]->status), Reason::kPeerRejected);
  EXPECT_THAT(Text(answers[0]), HasSubstr("LAYER_UNKNOWN"));
  cluster.ExpectWorks();
}

TEST_F(EngineFailureTest, EveryRankAnswersItsOwnRefusal) {
  Cluster& cluster = Start(2);
  for (const Answer& answer : cluster.Step([](int64_t) { return Rejected(); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kPayloadSizeMismatch);
  }
  cluster.ExpectWorks();
}

TEST_F(EngineFailureTest, DifferentOperationsOfOneSequenceAreAConflictOnAllRanks) {
  Cluster& cluster = Start(4);
  const Answers answers = cluster.Step([](int64_t rank) -> std::shared_ptr<Operation> {
    if (rank == 3) return MakeLayerOp(OpKind::kClearGradients);
    return Rows(rank);
  });
  for (const Answer& answer : answers) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kSequenceConflict);
    EXPECT_EQ(Metadata(answer->status, "value_a"), "Forward");
    EXPECT_EQ(Metadata(answer->status, "rank_b"), "3");
    EXPECT_EQ(Metadata(answer->status, "value_b"), "ClearGradients");
  }
  cluster.ExpectWorks();
}

TEST_F(EngineFailureTest, DifferingArgumentsAreAConflictOnAllRanks) {
  Cluster& cluster = Start(2);
  const Answers answers =
      cluster.Step([](int64_t rank) { return MakeApply(1, rank == 0 ? 0.5 : 0.25); });
  for (const Answer& answer : answers) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kSequenceConflict);
    EXPECT_EQ(Metadata(answer->status, "field"), "learning_rate");
  }
  EXPECT_EQ(cluster.engine(0).FindLayer("layer")->weights_version, 1u);
  cluster.ExpectWorks();
}

TEST_F(EngineFailureTest, ReceiveCapacityIsRefusedOnAllRanks) {
  cluster_ = std::make_unique<Cluster>(2);
  cluster_->config.max_recv_rows_per_rank = 4;
  cluster_->Form();
  cluster_->CreateReadyLayer();
  ForwardInputs inputs = GlobalRows(0, 4);
  inputs.ids = {0, 1, 0, 1, 0, 1, 0, 1};  // 16 rows at rank 0
  for (const Answer& answer : cluster_->Step([&](int64_t) { return MakeForward(inputs); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kRecvCapacity) << answer->status;
  }
  EXPECT_EQ(cluster_->engine(0).DescribeGroup().state, GroupState::kReady);
  cluster_->Good([](int64_t rank) { return MakeForward(GlobalRows(rank, 1)); });
}

TEST_F(EngineFailureTest, ARankWithoutItsRequestIsNamedByTheOthers) {
  Cluster& cluster = Start(4, 300);
  const uint64_t sequence = cluster.next++;
  std::vector<std::future<Answer>> futures;
  for (int64_t rank : {0, 1, 3}) futures.push_back(cluster.Submit(rank, Rows(rank), sequence));
  for (auto& future : futures) {
    const Answer answer = Await(std::move(future));
    EXPECT_EQ(ReasonOf(answer->status), Reason::kStepTimeout) << answer->status;
    EXPECT_EQ(Metadata(answer->status, "missing_ranks"), "2") << answer->status;
  }
  // Rank 2 is told, moves on, and answers its late request with what it was told.
  WaitUntil([&] { return cluster.engine(2).DescribeGroup().next_sequence == sequence + 1; });
  const Answer late = Await(cluster.Submit(2, Rows(2), sequence));
  EXPECT_EQ(ReasonOf(late->status), Reason::kStepTimeout);
  EXPECT_THAT(Text(late), HasSubstr("left sequence"));
  EXPECT_EQ(Metadata(late->status, "missing_ranks"), "2");
  const absl::StatusOr<StepOutcome> outcome =
      cluster.engine(2).GetStepOutcome(cluster.epoch, sequence);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->state, StepState::kFailed);
  EXPECT_EQ(cluster.engine(0).DescribeGroup().state, GroupState::kReady);
  cluster.ExpectWorks();
}

TEST_F(EngineFailureTest, EverySurvivorNamesTheMissingRankEachTime) {
  Cluster& cluster = Start(2, 50);
  for (int i = 0; i < 20; ++i) {
    const uint64_t sequence = cluster.next++;
    const Answer answer = Await(cluster.Submit(0, Rows(0), sequence));
    EXPECT_EQ(Metadata(answer->status, "missing_ranks"), "1") << answer->status;
    WaitUntil([&] { return cluster.engine(1).DescribeGroup().next_sequence == sequence + 1; });
  }
}

TEST_F(EngineFailureTest, ARefusedRequestAnswersItsOwnReasonThoughARankIsMissing) {
  Cluster& cluster = Start(2, 200);
  const Answer answer = Await(cluster.Submit(0, Rejected(), cluster.next++));
  EXPECT_EQ(ReasonOf(answer->status), Reason::kPayloadSizeMismatch);
}

TEST_F(EngineFailureTest, TwoMissingRanksAreBothNamed) {
  Cluster& cluster = Start(4, 200);
  const uint64_t sequence = cluster.next++;
  auto first = cluster.Submit(0, Rows(0), sequence);
  auto second = cluster.Submit(2, Rows(2), sequence);
  EXPECT_EQ(Metadata(Await(std::move(first))->status, "missing_ranks"), "1,3");
  EXPECT_EQ(Metadata(Await(std::move(second))->status, "missing_ranks"), "1,3");
  for (int64_t rank : {1, 3}) {
    WaitUntil([&] { return cluster.engine(rank).DescribeGroup().next_sequence == sequence + 1; });
  }
  cluster.ExpectWorks();
}

TEST_F(EngineFailureTest, LostRecordsEndByTheDeadlineAndTheGroupGoesOn) {
  Cluster& cluster = Start(2, 300);
  cluster.network.SetFilter([](const Letter& letter) {
    return letter.record.from_rank == 1 && !letter.close ? Fate::kDrop : Fate::kDeliver;
  });
  const Answers answers = cluster.Step(Rows);
  // Rank 1 has all records and waits for data: each learns of the other's end or sees its own.
  for (const Answer& answer : answers) EXPECT_EQ(ReasonOf(answer->status), Reason::kStepTimeout);
  cluster.network.ReleaseAll();
  cluster.ExpectWorks();
}

TEST_F(EngineFailureTest, ALateRecordOfAnEndedSequenceHarmsNothing) {
  Cluster& cluster = Start(2, 300);
  cluster.network.SetFilter([](const Letter& letter) {
    return letter.record.from_rank == 1 && !letter.close ? Fate::kHold : Fate::kDeliver;
  });
  cluster.Step(Rows);
  cluster.network.ReleaseAll();
  cluster.ExpectWorks();
  cluster.ExpectWorks();
}

TEST_F(EngineFailureTest, ACloseThatIsLostLeavesTheLateRankToItsOwnDeadline) {
  Cluster& cluster = Start(2, 300);
  cluster.network.SetFilter(
      [](const Letter& letter) { return letter.close ? Fate::kDrop : Fate::kDeliver; });
  const uint64_t sequence = cluster.next++;
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(0, Rows(0), sequence))->status), Reason::kStepTimeout);
  // Rank 0's record is there: rank 1 goes past arrival and waits for data in vain.
  const Answer late = Await(cluster.Submit(1, Rows(1), sequence));
  EXPECT_FALSE(late->status.ok());
  cluster.network.ReleaseAll();
  EXPECT_EQ(cluster.engine(1).DescribeGroup().state, GroupState::kReady);
  cluster.ExpectWorks();
}

TEST_F(EngineFailureTest, ABackwardThatFailsHalfWayInvalidatesTheGradientsOfAllRanks) {
  Cluster& cluster = Start(2, 500);
  std::vector<uint64_t> tickets;
  for (const Answer& answer :
       cluster.Good([](int64_t rank) { return MakeForward(GlobalRows(rank, 1), true); })) {
    tickets.push_back(static_cast<const ForwardOp&>(*answer).ticket);
  }
  const auto backward = [&](int64_t rank) {
    return MakeBackward(tickets[static_cast<size_t>(rank)], 1);
  };
  cluster.network.SetFilter([](const Letter& letter) {
    return letter.record.from_rank == 1 && !letter.close ? Fate::kDrop : Fate::kDeliver;
  });
  const Answers failed = cluster.Step(backward);
  EXPECT_FALSE(failed[0]->status.ok());
  EXPECT_FALSE(failed[1]->status.ok());
  cluster.network.ReleaseAll();
  for (const Answer& answer : cluster.Step(backward)) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kGradientsInvalid) << answer->status;
  }
  for (const Answer& answer : cluster.Step([](int64_t) { return MakeApply(1); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kGradientsInvalid);
  }
  cluster.Good([](int64_t) { return MakeLayerOp(OpKind::kClearGradients); });
  cluster.Good(backward);  // tickets are consumed only by a Backward that committed
  cluster.Good([](int64_t) { return MakeApply(1); });
}

// One rank timed out in the arrival of a Backward that the other went on with.
TEST_F(EngineFailureTest, GradientsOfDifferentBackwardsAreNeverApplied) {
  Cluster& cluster = Start(2, 500);
  std::vector<uint64_t> tickets;
  for (const Answer& answer :
       cluster.Good([](int64_t rank) { return MakeForward(GlobalRows(rank, 1), true); })) {
    tickets.push_back(static_cast<const ForwardOp&>(*answer).ticket);
  }
  // What a rank that went on alone looks like: ClearGradients that reached one rank only.
  cluster.Good([&](int64_t rank) { return MakeBackward(tickets[static_cast<size_t>(rank)], 1); });
  cluster.network.SetFilter([](const Letter& letter) {
    return letter.record.from_rank == 1 ? Fate::kDrop : Fate::kDeliver;
  });
  const Answers cleared =
      cluster.Step([](int64_t) { return MakeLayerOp(OpKind::kClearGradients); });
  ASSERT_FALSE(cleared[0]->status.ok());
  ASSERT_TRUE(cleared[1]->status.ok()) << cleared[1]->status;
  cluster.network.ReleaseAll();
  for (const Answer& answer : cluster.Step([](int64_t) { return MakeApply(1); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kGradientsInvalid) << answer->status;
  }
  EXPECT_EQ(cluster.engine(1).FindLayer("layer")->weights_version, 1u);
  cluster.Good([](int64_t) { return MakeLayerOp(OpKind::kClearGradients); });
  cluster.Good([](int64_t) { return MakeApply(1); });
}

// One rank started again from another seed; both are at version 1.
TEST_F(EngineFailureTest, WeightsOfDifferentSeedsAreNeverUsedTogether) {
  Cluster& cluster = Start(2, 500);
  cluster.network.SetFilter([](const Letter& letter) {
    return letter.record.from_rank == 1 ? Fate::kDrop : Fate::kDeliver;
  });
  const Answers started = cluster.Step([](int64_t) { return MakeInitialize(8); });
  ASSERT_FALSE(started[0]->status.ok());
  ASSERT_TRUE(started[1]->status.ok()) << started[1]->status;
  cluster.network.ReleaseAll();
  for (const Answer& answer : cluster.Step(Rows)) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kLayerNeedsRestore) << answer->status;
  }
  for (const Answer& answer : cluster.Step([](int64_t) { return MakeApply(1); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kLayerNeedsRestore) << answer->status;
  }
  // A new epoch sees it at once.
  cluster.Form(3);
  for (int64_t rank : {0, 1}) {
    EXPECT_EQ(cluster.engine(rank).FindLayer("layer")->state, LayerState::kNeedsRestore);
  }
  cluster.Good([](int64_t) { return MakeInitialize(8); });
  cluster.ExpectWorks();
}

TEST_F(EngineFailureTest, OptimizersThatDifferBetweenRanksAreAConflict) {
  Cluster& cluster = Start(2, 500);
  const auto configure = [](int64_t) {
    auto op = std::make_shared<ConfigureOptimizerOp>();
    op->layer_id = "layer";
    op->optimizer.kind = OptimizerKind::kSgd;
    op->optimizer.weight_decay = 0.5;
    return op;
  };
  cluster.network.SetFilter([](const Letter& letter) {
    return letter.record.from_rank == 1 ? Fate::kDrop : Fate::kDeliver;
  });
  const Answers configured = cluster.Step(configure);
  ASSERT_FALSE(configured[0]->status.ok());
  ASSERT_TRUE(configured[1]->status.ok()) << configured[1]->status;
  cluster.network.ReleaseAll();
  for (const Answer& answer : cluster.Step([](int64_t) { return MakeApply(1); })) {
    EXPECT_EQ(ReasonOf(answer->status), Reason::kSequenceConflict) << answer->status;
    EXPECT_EQ(Metadata(answer->status, "field"), "optimizer.weight_decay");
  }
  cluster.Good(configure);
  cluster.Good([](int64_t) { return MakeApply(1); });
}

TEST_F(EngineFailureTest, ALostPeerEndsTheStepAtOnce) {
  Cluster& cluster = Start(2, 20000);
  cluster.Destroy(1);
  const SteadyTime start = Clock::Real().Now();
  const Answer answer = Await(cluster.Submit(0, Rows(0), cluster.next++));
  EXPECT_EQ(ReasonOf(answer->status), Reason::kPeerLost) << answer->status;
  EXPECT_THAT(Text(answer), HasSubstr("rank 1"));
  EXPECT_LT(ToSeconds(Clock::Real().Now() - start), 10.0);
  EXPECT_EQ(cluster.engine(0).DescribeGroup().state, GroupState::kBroken);
  const Answer next = Await(cluster.Submit(0, Rows(0), cluster.next++));
  EXPECT_EQ(ReasonOf(next->status), Reason::kGroupBroken);
}

TEST_F(EngineFailureTest, WorkBehindALostPeerIsAnsweredWithGroupBroken) {
  Cluster& cluster = Start(2, 20000);
  auto second = cluster.Submit(0, Rows(0), cluster.next + 1);
  cluster.Destroy(1);
  auto first = cluster.Submit(0, Rows(0), cluster.next);
  EXPECT_EQ(ReasonOf(Await(std::move(first))->status), Reason::kPeerLost);
  EXPECT_EQ(ReasonOf(Await(std::move(second))->status), Reason::kGroupBroken);
  EXPECT_EQ(cluster.engine(0).Counters().queue_length, 0);
}

}  // namespace
}  // namespace expertd::engine
