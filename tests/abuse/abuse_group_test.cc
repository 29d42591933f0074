// Wrong fields of claiming, joining, leaving, aborting and watching a group.
#include "tests/abuse/abuse_test.h"

namespace expertd::abuse {
namespace {

TEST_F(AbuseTest, ControlOfTheGroup) {
  const auto restore = [this] { FormAgain(); };
  const uint64_t future = 1000000;
  SpoilQuery<v1::CreateBootstrapIdRequest>(
      [&] {
        v1::CreateBootstrapIdRequest request;
        request.set_group_id("service-test");
        request.set_epoch(service_->group().epoch() + future);
        request.set_claimant("abuse");
        return request;
      },
      restore);
  SpoilQuery<v1::LeaveGroupRequest>(
      [&] {
        v1::LeaveGroupRequest request;
        request.set_group_id(service_->group().id());
        request.set_epoch(service_->group().epoch());
        return request;
      },
      restore);
  SpoilQuery<v1::AbortGroupRequest>(
      [&] {
        v1::AbortGroupRequest request;
        request.set_group_id(service_->group().id());
        request.set_epoch(service_->group().epoch());
        request.set_reason("abuse");
        return request;
      },
      restore);
  SpoilQuery<v1::WatchGroupRequest>([] {
    v1::WatchGroupRequest request;
    request.set_timeout_ms(50);
    return request;
  });
}

// Rank 1 joins with one thing wrong while rank 0 joins as it should; rank 0 is released at once.
TEST_F(AbuseTest, JoinGroup) {
  const auto infos = client::ReadHosts(service_->hosts(), testing::Soon());
  const auto make = [&](uint64_t epoch, const std::string& id) {
    client::UpRequest up;
    up.group_id = "service-test";
    up.hosts = service_->hosts();
    up.config = Config();
    up.claimant = "abuse";
    std::vector<client::PlacedRank> ranks;
    for (const client::HostReport& report : infos) {
      client::PlacedRank rank;
      rank.rank = static_cast<int64_t>(ranks.size());
      rank.host = report.host;
      rank.member.set_slot(report.info.slot());
      rank.member.set_address(report.info.address());
      rank.member.set_incarnation(report.info.incarnation());
      ranks.push_back(std::move(rank));
    }
    return client::MakeJoinRequests(up, ranks, epoch, id);
  };
  const auto valid = make(1, "id");
  for (const Spoilt& spoilt : testing::SpoilEveryField(valid[1])) {
    const std::string key = StrCat("JoinGroup ", spoilt.label);
    FormAgain();
    ASSERT_FALSE(HasFatalFailure());
    v1::CreateBootstrapIdRequest claim;
    claim.set_group_id("service-test");
    claim.set_epoch(service_->group().epoch() + 1);
    claim.set_claimant("abuse");
    const auto claimed = service_->rank(0).Call(claim, testing::Soon());
    ASSERT_TRUE(claimed.ok()) << claimed.status();
    auto requests = make(claim.epoch(), claimed->bootstrap_id());
    v1::JoinGroupRequest& wrong = requests[1];
    const auto& changed = static_cast<const v1::JoinGroupRequest&>(*spoilt.request);
    if (absl::StartsWith(spoilt.label, "epoch=next")) {
      wrong.set_epoch(claim.epoch() + 1);
    } else if (absl::StartsWith(spoilt.label, "epoch")) {
      wrong.set_epoch(changed.epoch());
    } else if (absl::StartsWith(spoilt.label, "bootstrap_id=empty")) {
      wrong.clear_bootstrap_id();
    } else if (absl::StartsWith(spoilt.label, "bootstrap_id")) {
      wrong.set_bootstrap_id(StrCat(wrong.bootstrap_id(), "x"));
    } else {
      wrong = changed;
      wrong.set_epoch(claim.epoch());
      wrong.set_bootstrap_id(claimed->bootstrap_id());
    }
    std::atomic<bool> ended = false;
    std::thread innocent([&] {
      (void)service_->rank(0).Call(requests[0], testing::Soon());
      ended = true;
    });
    const absl::Status guilty = service_->rank(1).Call(wrong, Patience(key)).status();
    v1::LeaveGroupRequest leave;
    leave.set_group_id("service-test");
    leave.set_epoch(claim.epoch());
    while (!ended) {  // its JoinGroup may come after a LeaveGroup
      (void)service_->rank(0).Call(leave, testing::Soon());
      absl::SleepFor(absl::Milliseconds(2));
    }
    innocent.join();
    Expect(key, guilty, "");
  }
  FormAgain();
  ExpectWorks("JoinGroup");
}

}  // namespace
}  // namespace expertd::abuse
