// A daemon that dies: what its peers answer, how soon, and how the group comes back.
#include <signal.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/process_test.h"

namespace expertd::integration {
namespace {

constexpr int64_t kRanks = 4;
constexpr int64_t kVictim = 2;
// What ranks wait for each other at most; a death must not take that long.
constexpr int64_t kTimeoutMs = 15000;
constexpr absl::Duration kNoticed = absl::Seconds(10);

class PeerFailureTest : public ProcessTest {
 protected:
  void SetUp() override {
    StartAndForm(kRanks, kTimeoutMs);
    ASSERT_FALSE(HasFailure());
    MakeLayer(kLayer);
    ASSERT_FALSE(HasFailure());
    EXPECT_EQ(Outputs().size(), static_cast<size_t>(kRanks));
  }

  void Kill() {
    processes().Signal(kVictim, SIGKILL);
    ASSERT_OK(processes().AwaitEnd(kVictim, absl::Now() + absl::Seconds(10)));
  }

  // The survivors' answers name the group's end.
  static void ExpectNamedEnd(const std::vector<absl::Status>& statuses) {
    for (int64_t r = 0; r < kRanks; ++r) {
      if (r == kVictim) continue;
      const absl::Status& status = statuses[static_cast<size_t>(r)];
      EXPECT_TRUE(HasReason(status, Reason::kPeerLost) || HasReason(status, Reason::kGroupBroken))
          << "rank " << r << ": " << status;
    }
  }

  // Survivors' hosts.
  std::vector<std::string> Remaining() {
    std::vector<std::string> hosts = processes().hosts();
    hosts.erase(hosts.begin() + kVictim);
    return hosts;
  }
};

TEST_F(PeerFailureTest, DeathDuringAStepIsNamedOnAllOthersWithinTheDeadline) {
  // The others have arrived and wait for the victim, which never gets its request.
  std::vector<client::RankClient*> survivors;
  std::vector<v1::ForwardRequest> requests;
  for (int64_t r = 0; r < kRanks; ++r) {
    if (r == kVictim) continue;
    survivors.push_back(&rank(r));
    requests.push_back(Forward(r));
    *requests.back().mutable_header() = driver().NextHeader();
  }
  absl::Time answered;
  client::Replies<v1::ForwardRequest> replies;
  std::thread caller([&] {
    replies = client::CallAll(survivors, requests, Soon());
    answered = absl::Now();
  });
  // Until one of them runs the step.
  const absl::Time limit = absl::Now() + absl::Seconds(20);
  v1::GetStepOutcomeRequest outcome;
  outcome.set_epoch(group().epoch());
  outcome.set_sequence(requests.front().header().sequence());
  bool running = false;
  while (!running && absl::Now() < limit) {
    const auto response = rank(0).Call(outcome, Soon());
    running = response.ok() && response->state() == v1::STEP_STATE_RUNNING;
  }
  const absl::Time killed = absl::Now();
  Kill();
  caller.join();
  EXPECT_TRUE(running);
  EXPECT_LT(answered - killed, kNoticed);
  for (const absl::Status& status : replies.statuses) {
    EXPECT_TRUE(HasReason(status, Reason::kPeerLost) || HasReason(status, Reason::kGroupBroken))
        << status;
    EXPECT_TRUE(absl::StrContains(status.message(), StrCat("rank ", kVictim))) << status;
  }
}

TEST_F(PeerFailureTest, DeathUnderLoadEndsEveryStepInANamedError) {
  MakeLayer("wide", /*hidden=*/256);
  ASSERT_FALSE(HasFailure());
  std::vector<v1::ForwardRequest> requests;
  for (int64_t r = 0; r < kRanks; ++r) requests.push_back(Forward(r, 512, "wide", 256));
  std::atomic<int> steps = 0;
  std::vector<absl::Status> statuses;
  absl::Time answered;
  std::thread caller([&] {
    for (;;) {
      auto replies = driver().RunEach(requests);
      bool ok = true;
      for (const absl::Status& status : replies.statuses) ok = ok && status.ok();
      if (ok && ++steps < 2000) continue;
      statuses = replies.statuses;
      answered = absl::Now();
      return;
    }
  });
  const absl::Time limit = absl::Now() + absl::Seconds(20);
  while (steps < 5 && absl::Now() < limit) absl::SleepFor(absl::Milliseconds(1));
  const absl::Time killed = absl::Now();
  Kill();
  caller.join();
  ASSERT_GE(steps, 5);
  EXPECT_LT(answered - killed, kNoticed);
  ExpectNamedEnd(statuses);
}

TEST_F(PeerFailureTest, RemainingAndAFreshDaemonFormANewGroup) {
  Kill();
  ASSERT_FALSE(HasFailure());
  ASSERT_OK(processes().Add(kVictim, absl::Now() + absl::Seconds(20)));
  std::vector<std::string> hosts = Remaining();  // The fresh daemon is the last one.
  const uint64_t epoch = group().epoch();
  Form(hosts, Config(kRanks, kTimeoutMs));
  ASSERT_FALSE(HasFailure());
  EXPECT_GT(group().epoch(), epoch);

  // The fresh daemon has no weights: the layer serves nothing, by name, until it is made anew.
  for (const absl::Status& status : driver().RunEach(Forwards()).statuses) {
    EXPECT_TRUE(HasReason(status, Reason::kLayerNeedsRestore) ||
                HasReason(status, Reason::kLayerUnknown) ||
                HasReason(status, Reason::kPeerRejected))
        << status;
  }
  const auto layers = rank(0).Call(v1::ListLayersRequest(), Soon());
  ASSERT_OK(layers);
  ASSERT_EQ(layers->layers_size(), 1);
  EXPECT_EQ(layers->layers(0).state(), v1::LAYER_STATE_NEEDS_RESTORE);
  EXPECT_FALSE(layers->layers(0).reason().empty());

  MakeLayer("another");
  ASSERT_FALSE(HasFailure());
  EXPECT_EQ(Outputs("another").size(), static_cast<size_t>(kRanks));
}

TEST_F(PeerFailureTest, RemainingDaemonsFormASmallerGroup) {
  Kill();
  ASSERT_FALSE(HasFailure());
  Form(Remaining(), Config(kRanks - 1, kTimeoutMs));
  ASSERT_FALSE(HasFailure());
  MakeLayer("smaller");
  ASSERT_FALSE(HasFailure());
  EXPECT_EQ(Outputs("smaller").size(), static_cast<size_t>(kRanks - 1));
}

TEST_F(PeerFailureTest, StepAfterADeathIsRefusedByNameNotByTimeout) {
  Kill();
  ASSERT_FALSE(HasFailure());
  const absl::Time begin = absl::Now();
  std::vector<client::RankClient*> survivors;
  for (int64_t r = 0; r < kRanks; ++r) {
    if (r != kVictim) survivors.push_back(&rank(r));
  }
  std::vector<v1::ForwardRequest> requests;
  for (client::RankClient* client : survivors) {
    requests.push_back(Forward(client->origin().rank));
    *requests.back().mutable_header() = driver().NextHeader();
  }
  for (const absl::Status& status : client::CallAll(survivors, requests, Soon()).statuses) {
    EXPECT_TRUE(HasReason(status, Reason::kPeerLost) || HasReason(status, Reason::kGroupBroken))
        << status;
  }
  EXPECT_LT(absl::Now() - begin, kNoticed);
  for (client::RankClient* client : survivors) {
    const auto described = client->Call(v1::DescribeGroupRequest(), Soon());
    ASSERT_OK(described);
    EXPECT_EQ(described->group().state(), v1::GROUP_STATE_BROKEN);
    EXPECT_FALSE(described->group().reason().empty());
  }
}

}  // namespace
}  // namespace expertd::integration
