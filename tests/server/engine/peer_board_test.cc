// The board where records meet the exchanges that wait for them.
#include "server/engine/peer_board.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>

#include "base/error.h"

namespace expertd::engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr char kSecret[] = "bootstrap";
using WaitResult = absl::StatusOr<std::vector<std::string>>;

SteadyTime In(int64_t ms) { return Clock::Real().Now() + std::chrono::milliseconds(ms); }
// Long enough for a loaded machine; nothing that works waits for it.
SteadyTime Later() { return In(30000); }

PeerRecord From(int64_t rank, uint64_t sequence, std::string bytes, uint64_t epoch = 5,
                std::string stage = "arrive") {
  PeerRecord record;
  record.group_id = "g";
  record.epoch = epoch;
  record.from_rank = rank;
  record.stage = std::move(stage);
  record.sequence = sequence;
  record.bytes = std::move(bytes);
  record.proof = ProofOf(record, kSecret);
  return record;
}

// A board of rank 0 of three in epoch 5.
class PeerBoardTest : public testing::Test {
 protected:
  PeerBoardTest() { board_.Begin("g", 5, 0, 3, kSecret); }
  std::future<WaitResult> StartWait(uint64_t sequence, SteadyTime deadline = Later()) {
    return std::async(std::launch::async,
                      [=, this] { return board_.Wait("arrive", sequence, "mine", deadline); });
  }
  absl::Status Because() { return Error(Reason::kPeerLost).Text("because"); }

  PeerBoard board_;
};

TEST_F(PeerBoardTest, AWaitCompletesWithAllRecordsInRankOrder) {
  EXPECT_TRUE(board_.Post(From(2, 1, "two")).ok());
  auto wait = StartWait(1);
  EXPECT_TRUE(board_.Post(From(1, 1, "one")).ok());
  EXPECT_THAT(*wait.get(), ElementsAre("mine", "one", "two"));
}

TEST_F(PeerBoardTest, AGroupOfOneCompletesAtOnce) {
  board_.Begin("g", 6, 0, 1, kSecret);
  EXPECT_THAT(*board_.Wait("arrive", 1, "mine", In(-1)), ElementsAre("mine"));
}

TEST_F(PeerBoardTest, ATimeoutNamesTheMissingRanks) {
  EXPECT_THAT(board_.Missing("arrive", 1), ElementsAre(1, 2));
  board_.Post(From(1, 1, "one")).IgnoreError();
  const WaitResult result = board_.Wait("arrive", 1, "mine", In(20));
  EXPECT_EQ(ReasonOf(result.status()), Reason::kStepTimeout);
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("ranks 2 did not come to sequence 1 in time (stage arrive)"));
  EXPECT_THAT(DetailOf(result.status()).metadata,
              testing::Contains(testing::Pair("missing_ranks", "2")));
  EXPECT_THAT(board_.Missing("arrive", 1), ElementsAre(2));
}

TEST_F(PeerBoardTest, EmptyRecordsCountAsThere) {
  board_.Post(From(1, 1, "")).IgnoreError();
  board_.Post(From(2, 1, "")).IgnoreError();
  EXPECT_THAT(*board_.Wait("arrive", 1, "", Later()), ElementsAre("", "", ""));
}

TEST_F(PeerBoardTest, StagesAndSequencesAreApart) {
  for (int64_t rank : {1, 2}) {
    board_.Post(From(rank, 1, "other stage", 5, "apply")).IgnoreError();
    board_.Post(From(rank, 2, "other sequence")).IgnoreError();
  }
  EXPECT_EQ(ReasonOf(board_.Wait("arrive", 1, "mine", In(10)).status()), Reason::kStepTimeout);
  EXPECT_TRUE(board_.Wait("apply", 1, "mine", Later()).ok());
  EXPECT_TRUE(board_.Wait("arrive", 2, "mine", Later()).ok());
}

TEST_F(PeerBoardTest, AFailedRankEndsOnlyWaitsThatLackItsRecord) {
  for (int64_t rank : {1, 2}) board_.Post(From(rank, 1, "there")).IgnoreError();
  auto wait = StartWait(2);
  board_.Fail(5, 2, Because());
  EXPECT_EQ(wait.get().status(), Because());
  EXPECT_TRUE(board_.Wait("arrive", 1, "mine", Later()).ok());
  EXPECT_EQ(board_.Wait("arrive", 3, "mine", Later()).status(), Because());
}

TEST_F(PeerBoardTest, AFailureOfAnotherEpochIsIgnored) {
  board_.Fail(4, 1, Because());
  for (int64_t rank : {1, 2}) board_.Post(From(rank, 1, "x")).IgnoreError();
  EXPECT_TRUE(board_.Wait("arrive", 1, "mine", Later()).ok());
  EXPECT_EQ(ReasonOf(board_.Wait("arrive", 2, "mine", In(10)).status()), Reason::kStepTimeout);
  board_.Fail(5, 1, Because());
  board_.Begin("g", 6, 0, 3, kSecret);
  EXPECT_EQ(ReasonOf(board_.Wait("arrive", 1, "mine", In(10)).status()), Reason::kStepTimeout);
}

TEST_F(PeerBoardTest, ACancelEndsWaitsBeforeAndAfterIt) {
  auto wait = StartWait(1);
  board_.Cancel(1, Because());
  EXPECT_EQ(wait.get().status(), Because());
  EXPECT_EQ(board_.Wait("apply", 1, "mine", Later()).status(), Because());
  EXPECT_EQ(ReasonOf(board_.Wait("arrive", 2, "mine", In(10)).status()), Reason::kStepTimeout);
}

TEST_F(PeerBoardTest, ACancelEndsEvenAnExchangeThatIsComplete) {
  for (int64_t rank : {1, 2}) board_.Post(From(rank, 1, "there")).IgnoreError();
  board_.Cancel(1, Because());
  EXPECT_EQ(board_.Wait("arrive", 1, "mine", Later()).status(), Because());
}

TEST_F(PeerBoardTest, TheEndOfTheEpochEndsWaitsAndRefusesRecords) {
  auto wait = StartWait(1);
  board_.End(Because());
  EXPECT_EQ(wait.get().status(), Because());
  EXPECT_EQ(board_.Wait("arrive", 1, "mine", Later()).status(), Because());
  EXPECT_EQ(ReasonOf(board_.Post(From(1, 1, "late"))), Reason::kEpochStale);
  EXPECT_EQ(ReasonOf(board_.Check(From(1, 1, "late"))), Reason::kEpochStale);
}

TEST_F(PeerBoardTest, RecordsOfOlderEpochsAndOtherGroupsAreStale) {
  EXPECT_EQ(ReasonOf(board_.Post(From(1, 1, "x", 4))), Reason::kEpochStale);
  PeerRecord record = From(1, 1, "x");
  record.group_id = "h";
  record.proof = ProofOf(record, kSecret);
  EXPECT_EQ(ReasonOf(board_.Post(record)), Reason::kEpochStale);
}

TEST_F(PeerBoardTest, AWrongProofOrRankIsRefused) {
  EXPECT_TRUE(board_.Check(From(1, 1, "x")).ok());
  std::vector<PeerRecord> bad(7, From(1, 1, "x"));
  bad[0].proof ^= 1;
  bad[1].bytes = "y";
  bad[2].stage = "apply";
  bad[3].sequence = 2;
  bad[4].from_rank = 2;
  bad[5] = From(3, 1, "x");
  bad[6] = From(-1, 1, "x");
  for (const PeerRecord& record : bad) {
    EXPECT_EQ(ReasonOf(board_.Post(record)), Reason::kPermissionDenied);
    EXPECT_EQ(ReasonOf(board_.Check(record)), Reason::kPermissionDenied);
  }
  EXPECT_EQ(ReasonOf(board_.Post(From(0, 1, "x"))), Reason::kPermissionDenied);  // ourselves
  PeerRecord other_key = From(1, 1, "x");
  other_key.proof = ProofOf(other_key, "another");
  EXPECT_EQ(ReasonOf(board_.Post(other_key)), Reason::kPermissionDenied);
  EXPECT_THAT(board_.Missing("arrive", 1), ElementsAre(1, 2));
}

TEST_F(PeerBoardTest, TheSameRecordAgainIsFineAndAnotherIsAConflict) {
  EXPECT_TRUE(board_.Post(From(1, 1, "x")).ok());
  EXPECT_TRUE(board_.Post(From(1, 1, "x")).ok());
  EXPECT_EQ(ReasonOf(board_.Post(From(1, 1, "y"))), Reason::kSequenceConflict);
  board_.Post(From(2, 1, "z")).IgnoreError();
  EXPECT_THAT(*board_.Wait("arrive", 1, "mine", Later()), ElementsAre("mine", "x", "z"));
}

TEST_F(PeerBoardTest, EarlyRecordsAreAdoptedWhenTheirEpochBegins) {
  PeerRecord forged = From(2, 1, "forged", 6);
  forged.proof ^= 1;
  EXPECT_TRUE(board_.Post(forged).ok());  // cannot be checked yet
  EXPECT_TRUE(board_.Post(From(1, 1, "one", 6)).ok());
  EXPECT_TRUE(board_.Post(From(2, 1, "two", 6)).ok());
  EXPECT_TRUE(board_.Post(From(1, 1, "far", 7)).ok());
  board_.Begin("g", 6, 0, 3, kSecret);
  EXPECT_THAT(*board_.Wait("arrive", 1, "mine", Later()), ElementsAre("mine", "one", "two"));
  board_.Begin("g", 7, 0, 3, kSecret);
  EXPECT_THAT(board_.Missing("arrive", 1), ElementsAre(2));
}

TEST_F(PeerBoardTest, EarlyRecordsOfAnEpochThatIsPassedOverAreForgotten) {
  board_.Post(From(1, 1, "one", 6)).IgnoreError();
  board_.Begin("g", 7, 0, 3, kSecret);
  EXPECT_EQ(ReasonOf(board_.Post(From(1, 1, "one", 6))), Reason::kEpochStale);
  EXPECT_THAT(board_.Missing("arrive", 1), ElementsAre(1, 2));
}

TEST(PeerBoardEarlyTest, AWaitBeforeAnyEpochIsAnError) {
  PeerBoard board;
  EXPECT_EQ(ReasonOf(board.Wait("arrive", 1, "x", Clock::Real().Now()).status()),
            Reason::kGroupNotReady);
}

TEST(PeerBoardEarlyTest, ABoardThatNeverBeganKeepsRecordsWithinABound) {
  PeerBoard board;
  EXPECT_EQ(ReasonOf(board.Post(From(1, 1, std::string((16 << 20) + 1, 'x')))), Reason::kQueueFull);
  for (int i = 0; i < 4096; ++i) ASSERT_TRUE(board.Post(From(1, 1, "x")).ok());
  EXPECT_EQ(ReasonOf(board.Post(From(1, 1, "x"))), Reason::kQueueFull);
  board.Begin("g", 5, 0, 2, kSecret);
  EXPECT_TRUE(board.Wait("arrive", 1, "mine", Later()).ok());
}

TEST_F(PeerBoardTest, ForgottenSequencesTakeNoMemoryAndTheJoinStays) {
  for (int64_t rank : {1, 2}) {
    board_.Post(From(rank, 0, "join")).IgnoreError();
    board_.Post(From(rank, 1, "one")).IgnoreError();
    board_.Post(From(rank, 2, "two")).IgnoreError();
  }
  board_.Cancel(1, Because());
  board_.Forget(1);
  EXPECT_THAT(board_.Missing("arrive", 0), IsEmpty());
  EXPECT_THAT(board_.Missing("arrive", 1), ElementsAre(1, 2));
  EXPECT_THAT(board_.Missing("arrive", 2), IsEmpty());
  EXPECT_TRUE(board_.Post(From(1, 1, "late, and another one")).ok());  // dropped
  EXPECT_THAT(board_.Missing("arrive", 1), ElementsAre(1, 2));
  board_.Forget(0);
  EXPECT_THAT(board_.Missing("arrive", 2), IsEmpty());
}

TEST(PeerBoardThreadsTest, RanksThatPostFromManyThreadsAllComplete) {
  constexpr int64_t kRanks = 4;
  constexpr uint64_t kSteps = 200;
  std::vector<PeerBoard> boards(kRanks);
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    boards[static_cast<size_t>(rank)].Begin("g", 5, rank, kRanks, kSecret);
  }
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      for (uint64_t step = 1; step <= kSteps; ++step) {
        const std::string mine = std::to_string(rank) + ":" + std::to_string(step);
        for (int64_t peer = 0; peer < kRanks; ++peer) {
          if (peer == rank) continue;
          EXPECT_TRUE(boards[static_cast<size_t>(peer)].Post(From(rank, step, mine)).ok());
        }
        PeerBoard& board = boards[static_cast<size_t>(rank)];
        const WaitResult all = board.Wait("arrive", step, mine, Later());
        ASSERT_TRUE(all.ok()) << all.status();
        for (int64_t r = 0; r < kRanks; ++r) {
          ASSERT_EQ((*all)[static_cast<size_t>(r)], std::to_string(r) + ":" + std::to_string(step));
        }
        board.Forget(step);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace expertd::engine
