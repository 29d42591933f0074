// Repeated, early, contradictory and cancelled requests.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/engine/cluster.h"

namespace expertd::engine {
namespace {

using testing::HasSubstr;

std::shared_ptr<Operation> Rows(int64_t rank) { return MakeForward(GlobalRows(rank, 1)); }

class EngineRetryTest : public testing::Test {
 protected:
  Cluster& Start(int64_t world, int64_t timeout_ms = 10000,
                 std::function<void(EngineOptions&)> change = nullptr) {
    cluster_ = std::make_unique<Cluster>(world, std::move(change));
    cluster_->FormWithLayer(timeout_ms);
    return *cluster_;
  }
  std::unique_ptr<Cluster> cluster_;
};

TEST_F(EngineRetryTest, ADuplicateOfAWaitingRequestGetsTheSameAnswer) {
  Cluster& cluster = Start(2);
  const uint64_t sequence = cluster.next++;
  auto first = cluster.Submit(0, Rows(0), sequence);
  auto again = cluster.Submit(0, Rows(0), sequence);
  auto peer = cluster.Submit(1, Rows(1), sequence);
  const Answer a = Await(std::move(first));
  EXPECT_TRUE(a->status.ok()) << a->status;
  EXPECT_EQ(a, Await(std::move(again)));
  EXPECT_TRUE(Await(std::move(peer))->status.ok());
  cluster.ExpectWorks();
}

TEST_F(EngineRetryTest, AFinishedRequestIsAnsweredFromTheStoreWithoutRunning) {
  Cluster& cluster = Start(2);
  const Answers answers = cluster.Good(Rows);
  const uint64_t sequence = cluster.next - 1;
  const uint64_t operations = cluster.engine(0).Counters().operations["Forward"];
  EXPECT_EQ(Await(cluster.Submit(0, Rows(0), sequence)), answers[0]);
  EXPECT_EQ(cluster.engine(0).Counters().operations["Forward"], operations);
  cluster.ExpectWorks();
}

TEST_F(EngineRetryTest, ARefusalIsReplayedToo) {
  Cluster& cluster = Start(2);
  auto refused = [](int64_t) {
    auto op = MakeForward(GlobalRows(0, 1));
    op->layer_id = "unknown";
    return op;
  };
  cluster.Step(refused);
  const Answer again = Await(cluster.Submit(0, refused(0), cluster.next - 1));
  EXPECT_EQ(ReasonOf(again->status), Reason::kLayerUnknown);
}

TEST_F(EngineRetryTest, AReplyPastItsKeepIsExpired) {
  Cluster& cluster = Start(1);
  const uint64_t sequence = cluster.next;
  for (int i = 0; i < 3; ++i) cluster.Good(Rows);  // two replies are kept
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(0, Rows(0), sequence))->status),
            Reason::kSequenceExpired);
  EXPECT_TRUE(Await(cluster.Submit(0, Rows(0), sequence + 1))->status.ok());
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(0, Rows(0), 0))->status), Reason::kSequenceExpired);
  cluster.ExpectWorks();
}

TEST_F(EngineRetryTest, AnotherRequestIdForTheSameSequenceIsAConflict) {
  Cluster& cluster = Start(2);
  const uint64_t sequence = cluster.next++;
  auto first = cluster.Submit(0, Rows(0), sequence, 1);
  const Answer other = Await(cluster.Submit(0, Rows(0), sequence, 2));
  EXPECT_EQ(ReasonOf(other->status), Reason::kSequenceConflict);
  auto peer = cluster.Submit(1, Rows(1), sequence, 3);
  EXPECT_TRUE(Await(std::move(first))->status.ok());
  EXPECT_TRUE(Await(std::move(peer))->status.ok());
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(0, Rows(0), sequence, 2))->status),
            Reason::kSequenceConflict);
  cluster.ExpectWorks();
}

TEST_F(EngineRetryTest, EarlyRequestsRunInOrderOnceTheGapIsFilled) {
  Cluster& cluster = Start(2);
  const uint64_t base = cluster.next;
  std::vector<std::future<Answer>> futures;
  for (uint64_t ahead : {2u, 1u}) {
    for (int64_t rank : {0, 1}) futures.push_back(cluster.Submit(rank, Rows(rank), base + ahead));
  }
  EXPECT_EQ(cluster.engine(0).GetStepOutcome(cluster.epoch, base + 2)->state, StepState::kWaiting);
  EXPECT_EQ(cluster.engine(0).GetStepOutcome(cluster.epoch, base + 3)->state, StepState::kAhead);
  for (int64_t rank : {0, 1}) futures.push_back(cluster.Submit(rank, Rows(rank), base));
  for (auto& future : futures) EXPECT_TRUE(Await(std::move(future))->status.ok());
  EXPECT_EQ(cluster.engine(0).DescribeGroup().next_sequence, base + 3);
}

TEST_F(EngineRetryTest, AGapThatStaysOpenIsAnsweredByTheDeadlineAndLeavesTheSequenceUsable) {
  Cluster& cluster = Start(2, 500);
  const uint64_t base = cluster.next;
  auto first = cluster.Submit(0, Rows(0), base + 1);
  auto second = cluster.Submit(1, Rows(1), base + 1);
  for (auto* future : {&first, &second}) {
    const Answer answer = Await(std::move(*future));
    EXPECT_EQ(ReasonOf(answer->status), Reason::kSequenceGap) << answer->status;
  }
  cluster.Good(Rows);  // fills the gap; behind it the refused one takes its turn
  WaitUntil([&] { return cluster.engine(0).DescribeGroup().next_sequence == base + 2; });
  WaitUntil([&] { return cluster.engine(1).DescribeGroup().next_sequence == base + 2; });
  ++cluster.next;
  cluster.ExpectWorks();
}

TEST_F(EngineRetryTest, ASequencePastTheWindowIsRefusedWithBothNumbers) {
  Cluster& cluster = Start(1);
  const Answer answer = Await(cluster.Submit(0, Rows(0), cluster.next + 64));
  EXPECT_EQ(ReasonOf(answer->status), Reason::kSequenceGap);
  EXPECT_THAT(std::string(answer->status.message()), HasSubstr("window is 64"));
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(0, Rows(0), UINT64_MAX))->status), Reason::kSequenceGap);
  cluster.ExpectWorks();
}

TEST_F(EngineRetryTest, AFullQueueRefusesNewWorkButServesRetries) {
  Cluster& cluster = Start(2, 10000, [](EngineOptions& options) { options.queue_capacity = 1; });
  const uint64_t sequence = cluster.next++;
  auto first = cluster.Submit(0, Rows(0), sequence);
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(0, Rows(0), sequence + 1))->status), Reason::kQueueFull);
  auto again = cluster.Submit(0, Rows(0), sequence);
  auto peer = cluster.Submit(1, Rows(1), sequence);
  EXPECT_TRUE(Await(std::move(first))->status.ok());
  EXPECT_TRUE(Await(std::move(again))->status.ok());
  EXPECT_TRUE(Await(std::move(peer))->status.ok());
  EXPECT_EQ(cluster.engine(0).Counters().queue_length, 0);
  cluster.ExpectWorks();
}

TEST_F(EngineRetryTest, BytesInFlightAreBoundedAndComeBack) {
  Cluster& cluster = Start(1, 10000, [](EngineOptions& options) { options.bytes_in_flight = 100; });
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(0, MakeForward(GlobalRows(0, 3)), cluster.next))->status),
            Reason::kBytesInFlight);
  for (int i = 0; i < 4; ++i) cluster.ExpectWorks();
  EXPECT_EQ(cluster.engine(0).Counters().bytes_in_flight, 0);
}

TEST_F(EngineRetryTest, ARequestPastItsDeadlineIsRefusedAndThePeersAreTold) {
  Cluster& cluster = Start(2);
  const Answers answers = cluster.Step([](int64_t rank) {
    auto op = Rows(rank);
    if (rank == 0) op->deadline = Clock::Real().Now() - std::chrono::seconds(1);
    return op;
  });
  EXPECT_EQ(ReasonOf(answers[0]->status), Reason::kStepTimeout);
  EXPECT_FALSE(answers[1]->status.ok());
  cluster.ExpectWorks();
}

TEST_F(EngineRetryTest, CancellingARunningStepReachesEveryRank) {
  Cluster& cluster = Start(4);
  const uint64_t sequence = cluster.next++;
  std::vector<std::future<Answer>> futures;
  for (int64_t rank : {0, 1, 2}) futures.push_back(cluster.Submit(rank, Rows(rank), sequence));
  WaitUntil([&] {
    return cluster.engine(1).GetStepOutcome(cluster.epoch, sequence)->state == StepState::kRunning;
  });
  cluster.engine(1).CancelOperation({"group", cluster.epoch, sequence, 1000 + sequence});
  for (auto& future : futures) {
    const Answer answer = Await(std::move(future));
    EXPECT_EQ(ReasonOf(answer->status), Reason::kCancelled) << answer->status;
    EXPECT_THAT(std::string(answer->status.message()), HasSubstr("caller of rank 1"));
  }
  WaitUntil([&] { return cluster.engine(3).DescribeGroup().next_sequence == sequence + 1; });
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(3, Rows(3), sequence))->status), Reason::kCancelled);
  cluster.ExpectWorks();
}

TEST_F(EngineRetryTest, CancellingAWaitingRequestAnswersAtOnceAndItsTurnIsStillTaken) {
  Cluster& cluster = Start(2);
  const uint64_t base = cluster.next;
  auto waiting = cluster.Submit(0, Rows(0), base + 1);
  auto peer = cluster.Submit(1, Rows(1), base + 1);
  cluster.engine(0).CancelOperation({"group", cluster.epoch, base + 1, 1001 + base});
  EXPECT_EQ(ReasonOf(Await(std::move(waiting))->status), Reason::kCancelled);
  cluster.Good(Rows);
  const Answer told = Await(std::move(peer));
  EXPECT_EQ(ReasonOf(told->status), Reason::kPeerRejected) << told->status;
  EXPECT_THAT(std::string(told->status.message()), HasSubstr("CANCELLED"));
  ++cluster.next;
  cluster.ExpectWorks();
}

TEST_F(EngineRetryTest, ACancelWithAnotherRequestIdOrEpochIsIgnored) {
  Cluster& cluster = Start(2);
  const uint64_t sequence = cluster.next++;
  auto first = cluster.Submit(0, Rows(0), sequence);
  cluster.engine(0).CancelOperation({"group", cluster.epoch, sequence, 1});
  cluster.engine(0).CancelOperation({"group", 9, sequence, 1000 + sequence});
  cluster.engine(0).CancelOperation({"group", cluster.epoch, sequence + 5, 1000 + sequence});
  auto peer = cluster.Submit(1, Rows(1), sequence);
  EXPECT_TRUE(Await(std::move(first))->status.ok());
  EXPECT_TRUE(Await(std::move(peer))->status.ok());
}

TEST_F(EngineRetryTest, ACancelDoesNotTakeTheAnswerFromAnotherWaiter) {
  Cluster& cluster = Start(2);
  const uint64_t sequence = cluster.next++;
  auto first = cluster.Submit(0, Rows(0), sequence);
  auto again = cluster.Submit(0, Rows(0), sequence);
  cluster.engine(0).CancelOperation({"group", cluster.epoch, sequence, 1000 + sequence});
  auto peer = cluster.Submit(1, Rows(1), sequence);
  EXPECT_TRUE(Await(std::move(first))->status.ok());
  EXPECT_TRUE(Await(std::move(again))->status.ok());
  EXPECT_TRUE(Await(std::move(peer))->status.ok());
}

TEST_F(EngineRetryTest, TheLastWaiterToLeaveCancelsARunningStep) {
  Cluster& cluster = Start(2);
  const uint64_t sequence = cluster.next++;
  const StepHeader header{"group", cluster.epoch, sequence, 1000 + sequence};
  auto first = cluster.Submit(0, Rows(0), sequence);
  auto again = cluster.Submit(0, Rows(0), sequence);
  WaitUntil([&] {
    return cluster.engine(0).GetStepOutcome(cluster.epoch, sequence)->state == StepState::kRunning;
  });
  cluster.engine(0).CancelOperation(header);
  cluster.engine(0).CancelOperation(header);
  EXPECT_EQ(ReasonOf(Await(std::move(first))->status), Reason::kCancelled);
  EXPECT_EQ(ReasonOf(Await(std::move(again))->status), Reason::kCancelled);
  WaitUntil([&] { return cluster.engine(1).DescribeGroup().next_sequence == sequence + 1; });
  cluster.ExpectWorks();
}

TEST_F(EngineRetryTest, TheLastWaiterToLeaveEndsAWaitingStep) {
  Cluster& cluster = Start(2);
  const uint64_t later = cluster.next + 1;
  const StepHeader header{"group", cluster.epoch, later, 1000 + later};
  auto first = cluster.Submit(0, Rows(0), later);
  auto again = cluster.Submit(0, Rows(0), later);
  cluster.engine(0).CancelOperation(header);
  EXPECT_EQ(first.wait_for(std::chrono::milliseconds(0)), std::future_status::timeout);
  cluster.engine(0).CancelOperation(header);
  EXPECT_EQ(ReasonOf(Await(std::move(first))->status), Reason::kCancelled);
  EXPECT_EQ(ReasonOf(Await(std::move(again))->status), Reason::kCancelled);
  // Whoever asks again for the abandoned sequence is one waiter, who may leave too.
  auto late = cluster.Submit(0, Rows(0), later);
  cluster.engine(0).CancelOperation(header);
  EXPECT_EQ(ReasonOf(Await(std::move(late))->status), Reason::kCancelled);
  cluster.Good(Rows);
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(1, Rows(1), later))->status), Reason::kPeerRejected);
  ++cluster.next;
  cluster.ExpectWorks();
}

TEST_F(EngineRetryTest, StepsOfTheWrongGroupOrEpochDoNotTakeTheSequence) {
  Cluster& cluster = Start(1);
  cluster.epoch = 7;
  EXPECT_EQ(ReasonOf(Await(cluster.Submit(0, Rows(0), cluster.next))->status), Reason::kEpochStale);
  cluster.epoch = 2;
  auto op = Rows(0);
  auto promise = std::make_shared<std::promise<Answer>>();
  op->header = {"another", cluster.epoch, cluster.next, 5};
  cluster.engine(0).Submit(op, [promise](Answer answer) { promise->set_value(answer); });
  EXPECT_EQ(ReasonOf(Await(promise->get_future())->status), Reason::kGroupNotReady);
  cluster.ExpectWorks();
}

TEST_F(EngineRetryTest, OutcomesOfStepsCanBeAsked) {
  Cluster& cluster = Start(1);
  cluster.Good(Rows);
  const absl::StatusOr<StepOutcome> outcome =
      cluster.engine(0).GetStepOutcome(cluster.epoch, cluster.next - 1);
  ASSERT_TRUE(outcome.ok());
  EXPECT_EQ(outcome->state, StepState::kSucceeded);
  EXPECT_EQ(outcome->kind, OpKind::kForward);
  EXPECT_EQ(outcome->request_id, 1000 + cluster.next - 1);
  EXPECT_EQ(ReasonOf(cluster.engine(0).GetStepOutcome(9, 1).status()), Reason::kEpochStale);
}

TEST_F(EngineRetryTest, InputsAreReleasedWhenTheStepHasEnded) {
  Cluster& cluster = Start(1);
  auto op = MakeForward(GlobalRows(0, 1));
  const std::weak_ptr<const void> inputs = op->keep_alive;
  Await(cluster.Submit(0, op, cluster.next++));
  EXPECT_TRUE(inputs.expired());
}

}  // namespace
}  // namespace expertd::engine
