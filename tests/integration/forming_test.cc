// Forming groups of real daemon processes: agreement, epochs, claims.
#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/process_test.h"

namespace expertd::integration {
namespace {

class FormingTest : public ProcessTest {
 protected:
  // What Up would send to the ranks, in an epoch that is claimed.
  std::vector<v1::JoinGroupRequest> Claimed(const v1::GroupConfig& config) {
    const auto reports = client::ReadHosts(processes().hosts(), Soon());
    std::vector<client::HostInfo> infos;
    uint64_t highest = 0;
    for (const client::HostReport& report : reports) {
      EXPECT_TRUE(report.status.ok()) << report.status;
      infos.push_back({report.host, report.info});
      highest = std::max(highest, report.info.highest_epoch_seen());
    }
    const auto ranks = client::Place(infos);
    const auto epoch = client::ChooseEpoch(highest, absl::ToUnixMillis(absl::Now()));
    EXPECT_TRUE(ranks.ok() && epoch.ok());
    client::RankClient root({0, ranks->front().host});
    const auto bootstrap = client::ClaimEpoch(root, "integration", *epoch, "test", Soon());
    EXPECT_TRUE(bootstrap.ok()) << bootstrap.status();
    return client::MakeJoinRequests(UpRequestOf(processes().hosts(), config), *ranks, *epoch,
                                    bootstrap->id);
  }

  std::vector<absl::Status> Join(const std::vector<v1::JoinGroupRequest>& requests) {
    std::vector<std::unique_ptr<client::RankClient>> clients;
    std::vector<client::RankClient*> pointers;
    for (const std::string& host : processes().hosts()) {
      const auto rank = static_cast<int64_t>(clients.size());
      clients.push_back(std::make_unique<client::RankClient>(client::Origin{rank, host}));
      pointers.push_back(clients.back().get());
    }
    return client::CallAll(pointers, requests, Soon()).statuses;
  }
};

TEST_F(FormingTest, FourDaemonsFormAGroupInSlotOrder) {
  Start(4);
  ASSERT_FALSE(HasFailure());
  std::vector<std::string> hosts = processes().hosts();
  std::ranges::reverse(hosts);  // The order in which they are named does not count.
  Form(hosts, Config(4));
  ASSERT_FALSE(HasFailure());
  for (const client::HostReport& report : client::ReadHosts(processes().hosts(), Soon())) {
    ASSERT_OK(report.status);
    EXPECT_EQ(report.group.state(), v1::GROUP_STATE_READY);
    EXPECT_EQ(report.group.group_id(), "integration");
    EXPECT_EQ(report.group.epoch(), group().epoch());
    EXPECT_EQ(report.group.rank(), report.info.slot());
    EXPECT_EQ(report.group.next_sequence(), 1u);
    EXPECT_EQ(report.group.backend(), "gloo");
    ASSERT_EQ(report.group.members_size(), 4);
    EXPECT_EQ(report.group.members(static_cast<int>(report.group.rank())).address(),
              report.info.address());
    EXPECT_EQ(report.info.group_state(), v1::GROUP_STATE_READY);
    EXPECT_EQ(report.info.highest_epoch_seen(), group().epoch());
  }
  MakeLayer(kLayer);
  EXPECT_EQ(Outputs().size(), 4u);
}

TEST_F(FormingTest, ConfigMismatchIsNamedOnEveryRankAndNobodyIsIn) {
  Start(4);
  ASSERT_FALSE(HasFailure());
  std::vector<v1::JoinGroupRequest> requests = Claimed(Config(4));
  ASSERT_FALSE(HasFailure());
  requests[2].mutable_config()->set_max_hidden(128);
  for (const absl::Status& status : Join(requests)) {
    ExpectError(status, Reason::kConfigMismatch, {"max_hidden", "256", "128", "rank 0", "rank 2"});
  }
  for (const client::HostReport& report : client::ReadHosts(processes().hosts(), Soon())) {
    EXPECT_NE(report.group.state(), v1::GROUP_STATE_READY);
  }
  Form(processes().hosts(), Config(4));
}

TEST_F(FormingTest, InvalidConfigIsRefusedWithEveryViolation) {
  Start(2);
  ASSERT_FALSE(HasFailure());
  v1::GroupConfig config = Config(2);
  config.set_max_top_k(33);
  config.set_max_tokens_per_rank(-1);
  config.set_max_experts(3);
  for (const absl::Status& status : Join(Claimed(config))) {
    ExpectError(status, Reason::kConfigInvalid,
                {"max_top_k", "33", "max_tokens_per_rank", "max_experts"});
    EXPECT_EQ(DetailOf(status).violations.size(), 3u) << status;
  }
}

TEST_F(FormingTest, StaleEpochIsRefusedWithBothNumbers) {
  StartAndForm(2);
  ASSERT_FALSE(HasFailure());
  const uint64_t epoch = group().epoch();
  const auto older = client::ClaimEpoch(rank(0), "integration", epoch - 1, "late", Soon());
  ExpectError(older.status(), Reason::kEpochStale, {StrCat(epoch - 1), StrCat(epoch)});
  const auto same = client::ClaimEpoch(rank(0), "integration", epoch, "late", Soon());
  ExpectError(same.status(), Reason::kSequenceConflict, {StrCat(epoch), "late"});
  v1::JoinGroupRequest join;
  join.set_group_id("integration");
  join.set_epoch(epoch - 1);
  join.set_bootstrap_id("anything");
  *join.mutable_config() = Config(2);
  *join.mutable_members() = group().infos.front().members();
  ExpectError(rank(0).Call(join, Soon()).status(), Reason::kEpochStale,
              {StrCat(epoch - 1), StrCat(epoch)});
  MakeLayer(kLayer);  // The group has not noticed.
}

TEST_F(FormingTest, OfTwoClaimantsOneWinsAndTheOtherIsToldWho) {
  Start(1);
  ASSERT_FALSE(HasFailure());
  const std::string host = processes().hosts().front();
  const uint64_t epoch = absl::ToUnixMillis(absl::Now());
  const std::string names[] = {"claimant-a", "claimant-b"};
  absl::Status statuses[2];
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      client::RankClient client({0, host});
      statuses[i] = client::ClaimEpoch(client, "integration", epoch, names[i], Soon()).status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_NE(statuses[0].ok(), statuses[1].ok()) << statuses[0] << " and " << statuses[1];
  const int loser = statuses[0].ok() ? 1 : 0;
  ExpectError(statuses[loser], Reason::kSequenceConflict, {names[1 - loser]});
}

TEST_F(FormingTest, TwoControllersAtOnceLeaveOneWorkingGroup) {
  Start(3);
  ASSERT_FALSE(HasFailure());
  absl::StatusOr<client::Group> groups[2] = {absl::UnknownError(""), absl::UnknownError("")};
  std::vector<std::thread> threads;
  for (absl::StatusOr<client::Group>& group : groups) {
    threads.emplace_back([this, &group] {
      group = client::Up(UpRequestOf(processes().hosts(), Config(3)), Soon());
    });
  }
  for (std::thread& thread : threads) thread.join();
  uint64_t newest = 0;
  for (const auto& group : groups) {
    if (group.ok()) {
      newest = std::max(newest, group->epoch());
    } else {
      // The one that lost is told why, by the service.
      EXPECT_TRUE(client::HasDetail(group.status())) << group.status();
    }
  }
  ASSERT_GT(newest, 0u) << groups[0].status() << " and " << groups[1].status();
  const auto attached = client::Attach(processes().hosts(), Soon());
  ASSERT_OK(attached);
  EXPECT_EQ(attached->epoch(), newest);
}

TEST_F(FormingTest, DaemonThatIsMissingIsNamedByTheOthers) {
  Start(3);
  ASSERT_FALSE(HasFailure());
  std::vector<v1::JoinGroupRequest> requests = Claimed(Config(3, /*timeout_ms=*/1000));
  ASSERT_FALSE(HasFailure());
  // Rank 1 gets no JoinGroup at all. A join waits ten seconds or two step limits.
  const std::vector<std::string> hosts = processes().hosts();
  client::RankClient first({0, hosts[0]});
  client::RankClient third({2, hosts[2]});
  const std::vector<client::RankClient*> callers = {&first, &third};
  const auto replies =
      client::CallAll<v1::JoinGroupRequest>(callers, {requests[0], requests[2]}, Soon());
  for (const absl::Status& status : replies.statuses) {
    ExpectMissing(status, "1");
  }
}

}  // namespace
}  // namespace expertd::integration
