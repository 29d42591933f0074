// Joins through the engine: those that fit, those that do not, and what every rank is told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/engine/join.h"
#include "tests/server/engine/cluster.h"

namespace expertd::engine {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

std::string Metadata(const absl::Status& status, const std::string& key) {
  for (const auto& [name, value] : DetailOf(status).metadata) {
    if (name == key) return value;
  }
  return "(none)";
}

SteadyTime In(int64_t ms) { return Clock::Real().Now() + milliseconds(ms); }

TEST(EngineJoinTest, DifferingConfigsAreAMismatchOnAllRanksThatNamesBothValues) {
  Cluster cluster(3);
  cluster.config.max_experts = 9;
  cluster.Claim(1);
  std::vector<std::future<JoinAnswer>> futures;
  for (int64_t rank = 0; rank < 3; ++rank) {
    JoinRequest request = cluster.MakeJoin(rank, 1);
    if (rank == 2) request.config.max_hidden = 16;
    futures.push_back(cluster.StartJoin(request));
  }
  for (auto& future : futures) {
    const JoinAnswer answer = Await(std::move(future));
    EXPECT_EQ(ReasonOf(answer.status()), Reason::kConfigMismatch) << answer.status();
    EXPECT_EQ(Metadata(answer.status(), "field"), "max_hidden");
    EXPECT_EQ(Metadata(answer.status(), "value_a"), "8");
    EXPECT_EQ(Metadata(answer.status(), "rank_b"), "2");
    EXPECT_EQ(Metadata(answer.status(), "value_b"), "16");
  }
  for (int64_t rank = 0; rank < 3; ++rank) {
    WaitUntil([&] { return cluster.engine(rank).DescribeGroup().state == GroupState::kIdle; });
  }
  cluster.Form(2);
}

TEST(EngineJoinTest, AMismatchReachesARankThatIsSlowToHear) {
  Cluster cluster(2);
  cluster.network.SetFilter(
      [](const Letter& letter) { return letter.to_rank == 1 ? Fate::kHold : Fate::kDeliver; });
  cluster.Claim(1);
  JoinRequest other = cluster.MakeJoin(1, 1);
  other.config.max_hidden = 16;
  auto slow = cluster.StartJoin(other);
  EXPECT_EQ(ReasonOf(Await(cluster.StartJoin(cluster.MakeJoin(0, 1))).status()),
            Reason::kConfigMismatch);
  cluster.network.ReleaseAll();
  EXPECT_EQ(ReasonOf(Await(std::move(slow)).status()), Reason::kConfigMismatch);
}

TEST(EngineJoinTest, AnInvalidConfigIsItsRanksOwnErrorAndPeersAreTold) {
  Cluster cluster(2);
  cluster.Claim(1);
  auto good = cluster.StartJoin(cluster.MakeJoin(0, 1));
  JoinRequest bad = cluster.MakeJoin(1, 1);
  bad.config.max_top_k = 33;
  EXPECT_EQ(ReasonOf(Await(cluster.StartJoin(bad)).status()), Reason::kConfigInvalid);
  EXPECT_EQ(ReasonOf(Await(std::move(good)).status()), Reason::kPeerRejected);
}

TEST(EngineJoinTest, RanksThatDisagreeOnTheirNumberAreAllToldAtOnce) {
  Cluster cluster(3);
  cluster.config.max_experts = 12;
  cluster.Claim(1);
  const SteadyTime start = Clock::Real().Now();
  auto wide = cluster.StartJoin(cluster.MakeJoin(1, 1));  // expects three
  JoinRequest narrow = cluster.MakeJoin(0, 1);
  narrow.config.ep_size = 2;
  narrow.members.pop_back();
  const JoinAnswer told = Await(cluster.StartJoin(narrow));
  EXPECT_EQ(ReasonOf(told.status()), Reason::kConfigMismatch) << told.status();
  EXPECT_EQ(Metadata(told.status(), "field"), "ep_size");
  const JoinAnswer waiting = Await(std::move(wide));
  EXPECT_EQ(ReasonOf(waiting.status()), Reason::kConfigMismatch) << waiting.status();
  EXPECT_EQ(Metadata(waiting.status(), "field"), "ep_size");
  EXPECT_LT(ToSeconds(Clock::Real().Now() - start), 8.0);  // the limit of a join is 20 s
  cluster.Form(2);
}

TEST(EngineJoinTest, RanksOfDifferentGroupsInOneEpochAreBothToldAtOnce) {
  Cluster cluster(2);
  cluster.Claim(1);
  const SteadyTime start = Clock::Real().Now();
  JoinRequest other = cluster.MakeJoin(1, 1);
  other.group_id = "another";
  auto early = cluster.StartJoin(other);  // its record is at rank 0 before rank 0 joins
  WaitUntil([&] { return cluster.network.delivered() > 0; });
  EXPECT_EQ(ReasonOf(Await(cluster.StartJoin(cluster.MakeJoin(0, 1))).status()),
            Reason::kEpochStale);
  EXPECT_EQ(ReasonOf(Await(std::move(early)).status()), Reason::kEpochStale);
  EXPECT_LT(ToSeconds(Clock::Real().Now() - start), 8.0);
  cluster.Form(2);
}

TEST(EngineJoinTest, AnotherJoinOfTheSameEpochIsAMismatchThatNamesTheField) {
  Cluster cluster(2);
  cluster.Form(1);
  const auto refused = [&](const std::function<void(JoinRequest&)>& change, const char* field) {
    JoinRequest request = cluster.MakeJoin(1, 1);
    change(request);
    const JoinAnswer answer = Await(cluster.StartJoin(request));
    EXPECT_EQ(ReasonOf(answer.status()), Reason::kConfigMismatch) << answer.status();
    EXPECT_EQ(Metadata(answer.status(), "field"), field);
  };
  refused([](JoinRequest& r) { r.bootstrap_id = "another"; }, "bootstrap_id");
  refused([](JoinRequest& r) { r.config.max_hidden = 16; }, "max_hidden");
  refused([](JoinRequest& r) { r.members[0].address = "elsewhere"; }, "members");
  EXPECT_TRUE(Await(cluster.StartJoin(cluster.MakeJoin(1, 1))).ok());
  cluster.CreateReadyLayer();
  cluster.ExpectWorks();
}

TEST(EngineJoinTest, EpochsFromTheFarFutureLockNobodyOut) {
  Cluster cluster(2);
  for (const uint64_t epoch : {UINT64_MAX, MaxEpoch() + 1000000}) {
    const auto claim = cluster.engine(0).CreateBootstrapId("group", epoch, "test");
    EXPECT_EQ(ReasonOf(claim.status()), Reason::kConfigInvalid) << claim.status();
    JoinRequest request = cluster.MakeJoin(1, epoch);
    request.bootstrap_id = "id";
    EXPECT_EQ(ReasonOf(Await(cluster.StartJoin(request)).status()), Reason::kConfigInvalid);
    // Anybody can write such a record; it proves nothing.
    PeerRecord forged;
    forged.group_id = "group";
    forged.epoch = epoch;
    forged.from_rank = 1;
    forged.stage = "arrive";
    forged.sequence = 1;
    cluster.engine(0).OnPeerRecord(forged).IgnoreError();
    EXPECT_EQ(cluster.engine(0).HighestEpochSeen(), 0u);
  }
  cluster.Form(1);
}

TEST(EngineJoinTest, ADaemonWithoutPeersRefusesAGroupOfMany) {
  Cluster cluster(2, [](EngineOptions& options) { options.peer_transport = nullptr; });
  cluster.Claim(1);
  const JoinAnswer answer = Await(cluster.StartJoin(cluster.MakeJoin(0, 1)));
  EXPECT_EQ(ReasonOf(answer.status()), Reason::kBackendUnsupported) << answer.status();
}

TEST(EngineJoinTest, AMissingRankIsNamedByTheDeadline) {
  Cluster cluster(3);
  cluster.Claim(1);
  JoinRequest request = cluster.MakeJoin(0, 1);
  request.deadline = In(300);
  const JoinAnswer answer = Await(cluster.StartJoin(request));
  EXPECT_EQ(ReasonOf(answer.status()), Reason::kStepTimeout);
  EXPECT_EQ(Metadata(answer.status(), "missing_ranks"), "1,2");
}

TEST(EngineJoinTest, ARankMayComeLongBeforeTheOthers) {
  Cluster cluster(2);
  cluster.Claim(1);
  auto early = cluster.StartJoin(cluster.MakeJoin(1, 1));
  WaitUntil([&] { return cluster.engine(1).DescribeGroup().state == GroupState::kJoining; });
  EXPECT_TRUE(Await(cluster.StartJoin(cluster.MakeJoin(0, 1))).ok());
  EXPECT_TRUE(Await(std::move(early)).ok());
}

TEST(EngineJoinTest, AnUnreachableMemberIsTriedAgainUntilItIsThere) {
  Cluster cluster(2);
  cluster.network.Detach("rank1");
  cluster.Claim(1);
  auto first = cluster.StartJoin(cluster.MakeJoin(0, 1));
  auto second = cluster.StartJoin(cluster.MakeJoin(1, 1));
  cluster.network.Attach("rank1", &cluster.engine(1));
  EXPECT_TRUE(Await(std::move(first)).ok());
  EXPECT_TRUE(Await(std::move(second)).ok());
}

TEST(EngineJoinTest, RequestsThatCannotBeRightAreRefusedAtOnce) {
  Cluster cluster(2);
  cluster.Claim(1);
  const auto refused = [&](const std::function<void(JoinRequest&)>& change, Reason reason) {
    JoinRequest request = cluster.MakeJoin(0, 1);
    change(request);
    const JoinAnswer answer = Await(cluster.StartJoin(request));
    EXPECT_EQ(ReasonOf(answer.status()), reason) << answer.status();
  };
  refused([](JoinRequest& r) { r.group_id.clear(); }, Reason::kConfigInvalid);
  refused([](JoinRequest& r) { r.epoch = 0; }, Reason::kConfigInvalid);
  refused([](JoinRequest& r) { r.bootstrap_id.clear(); }, Reason::kConfigInvalid);
  refused([](JoinRequest& r) { r.members.pop_back(); }, Reason::kConfigInvalid);
  refused([](JoinRequest& r) { r.members.clear(); }, Reason::kConfigInvalid);
  refused([](JoinRequest& r) { r.config.ep_size = int64_t{1} << 62; }, Reason::kConfigInvalid);
  refused([](JoinRequest& r) { r.config.dp_size = INT64_MIN; }, Reason::kConfigInvalid);
  refused([](JoinRequest& r) { r.members[0].incarnation ^= 1; }, Reason::kConfigMismatch);
  refused([](JoinRequest& r) { std::swap(r.members[0], r.members[1]); }, Reason::kConfigMismatch);
  JoinRequest request = cluster.MakeJoin(0, 1);
  for (int64_t rank : {int64_t{-1}, int64_t{2}, INT64_MAX}) {
    request.rank = rank;
    std::promise<JoinAnswer> promise;
    cluster.engine(0).JoinGroup(request, [&](JoinAnswer answer) { promise.set_value(answer); });
    EXPECT_EQ(ReasonOf(Await(promise.get_future()).status()), Reason::kConfigInvalid);
  }
  cluster.epoch = 1;
}

TEST(EngineJoinTest, ABootstrapIdServesOnce) {
  Cluster cluster(1);
  cluster.Form(1);
  const std::string used = cluster.bootstrap_id;
  JoinRequest request = cluster.MakeJoin(0, 2);
  const JoinAnswer answer = Await(cluster.StartJoin(request));
  EXPECT_EQ(ReasonOf(answer.status()), Reason::kConfigInvalid);
  EXPECT_EQ(DetailOf(answer.status()).violations.at(0).path, "bootstrap_id");
}

TEST(EngineJoinTest, ASecondClaimantIsRefusedWithTheOwnersName) {
  Cluster cluster(1);
  cluster.Claim(5);
  const auto again = cluster.engine(0).CreateBootstrapId("group", 5, "test");
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->bootstrap_id, cluster.bootstrap_id);
  const auto other = cluster.engine(0).CreateBootstrapId("group", 5, "another");
  EXPECT_EQ(ReasonOf(other.status()), Reason::kSequenceConflict);
  EXPECT_EQ(Metadata(other.status(), "claimant"), "test");
  const auto older = cluster.engine(0).CreateBootstrapId("group", 4, "test");
  EXPECT_EQ(ReasonOf(older.status()), Reason::kEpochStale);
  EXPECT_EQ(ReasonOf(cluster.engine(0).CreateBootstrapId("", 0, "").status()),
            Reason::kConfigInvalid);
}

TEST(EngineJoinTest, OlderAndEqualEpochsAreAnsweredAsStaleOrJoined) {
  Cluster cluster(1);
  cluster.Form(5);
  EXPECT_TRUE(Await(cluster.StartJoin(cluster.MakeJoin(0, 5))).ok());
  const JoinAnswer older = Await(cluster.StartJoin(cluster.MakeJoin(0, 4)));
  EXPECT_EQ(ReasonOf(older.status()), Reason::kEpochStale);
  EXPECT_EQ(Metadata(older.status(), "current_epoch"), "5");
}

}  // namespace
}  // namespace expertd::engine
