// The life of a group of real processes: leaving, forming again, being fenced, ending.
#include <signal.h>
#include <sys/wait.h>

#include <string>
#include <thread>
#include <vector>

#include "tests/integration/process_test.h"

namespace expertd::integration {
namespace {

class LifeTest : public ProcessTest {};

TEST_F(LifeTest, LayersAndWeightsSurviveANewEpoch) {
  StartAndForm(4);
  ASSERT_FALSE(HasFailure());
  MakeLayer(kLayer);
  // Weights that are not the initial ones.
  std::vector<v1::ForwardRequest> forwards = Forwards();
  for (auto& request : forwards) request.set_keep_for_backward(true);
  const auto tickets = driver().Run(forwards);
  ASSERT_OK(tickets);
  std::vector<v1::BackwardRequest> backwards(tickets->size());
  for (size_t r = 0; r < backwards.size(); ++r) {
    backwards[r].set_ticket((*tickets)[r].ticket());
    *backwards[r].mutable_output_gradient() = (*tickets)[r].output();
  }
  ASSERT_OK(driver().Run(backwards));
  v1::ApplyGradientsRequest apply;
  apply.set_layer_id(kLayer);
  apply.set_learning_rate(0.5);
  apply.set_expected_version(1);
  ASSERT_OK(driver().RunSame(apply));
  const std::vector<std::string> before = Outputs();
  const auto unused = driver().Run(forwards);
  ASSERT_OK(unused);
  const uint64_t epoch = group().epoch();

  ASSERT_OK(client::Down(processes().hosts(), Soon()));
  for (const client::HostReport& report : client::ReadHosts(processes().hosts(), Soon())) {
    EXPECT_EQ(report.group.state(), v1::GROUP_STATE_IDLE);
  }
  Form(processes().hosts(), Config(4));
  ASSERT_FALSE(HasFailure());
  EXPECT_GT(group().epoch(), epoch);
  for (int64_t r = 0; r < world(); ++r) {
    const auto layers = rank(r).Call(v1::ListLayersRequest(), Soon());
    ASSERT_OK(layers);
    ASSERT_EQ(layers->layers_size(), 1);
    EXPECT_EQ(layers->layers(0).state(), v1::LAYER_STATE_READY);
    EXPECT_EQ(layers->layers(0).weights_version(), 2u);
  }
  EXPECT_EQ(Outputs(), before);

  // An apply that had committed is not done twice, in whatever epoch it is repeated.
  const auto again = driver().RunSame(apply);
  ASSERT_OK(again);
  for (const auto& response : *again) {
    EXPECT_FALSE(response.applied());
    EXPECT_EQ(response.weights_version(), 2u);
  }
  // A ticket of the old epoch is refused by name.
  for (size_t r = 0; r < backwards.size(); ++r) backwards[r].set_ticket((*unused)[r].ticket());
  for (const absl::Status& status : driver().RunEach(backwards).statuses) {
    ExpectError(status, Reason::kTicketUnknown, {"epoch"});
  }
  EXPECT_EQ(Outputs(), before);
}

TEST_F(LifeTest, NewerEpochFencesTheOlderOne) {
  StartAndForm(3);
  ASSERT_FALSE(HasFailure());
  MakeLayer(kLayer);
  const std::vector<std::string> before = Outputs();
  const auto newer = client::Up(UpRequestOf(processes().hosts(), Config(3)), Soon());
  ASSERT_OK(newer);
  std::vector<v1::ForwardRequest> requests = Forwards();
  const v1::StepHeader old_header = driver().NextHeader();
  for (auto& request : requests) *request.mutable_header() = old_header;
  const auto replies = client::CallAll(group().clients(), requests, Soon());
  for (const absl::Status& status : replies.statuses) {
    ExpectError(status, Reason::kEpochStale, {StrCat(group().epoch()), StrCat(newer->epoch())});
  }
  client::StepDriver current(*newer, {.timeout = absl::Seconds(30)});
  const auto outputs = current.Run(Forwards());
  ASSERT_OK(outputs);
  for (size_t r = 0; r < before.size(); ++r) EXPECT_EQ((*outputs)[r].output().data(), before[r]);
}

TEST_F(LifeTest, LeavingTwiceIsSuccess) {
  StartAndForm(2);
  ASSERT_FALSE(HasFailure());
  v1::LeaveGroupRequest leave;
  leave.set_group_id(group().id());
  leave.set_epoch(group().epoch());
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (int64_t r = 0; r < world(); ++r) ASSERT_OK(rank(r).Call(leave, Soon()));
  }
}

TEST_F(LifeTest, AbortEndsTheEpochAndANewOneCanBeFormed) {
  StartAndForm(3);
  ASSERT_FALSE(HasFailure());
  MakeLayer(kLayer);
  const std::vector<std::string> before = Outputs();
  ASSERT_OK(
      client::Abort(processes().hosts(), group().id(), group().epoch(), "test wants it", Soon()));
  EXPECT_FALSE(driver().Run(Forwards()).ok());
  Form(processes().hosts(), Config(3));
  ASSERT_FALSE(HasFailure());
  EXPECT_EQ(Outputs(), before);
}

TEST_F(LifeTest, WatchReturnsWhenTheGroupChanges) {
  StartAndForm(2);
  ASSERT_FALSE(HasFailure());
  const auto described = rank(1).Call(v1::DescribeGroupRequest(), Soon());
  ASSERT_OK(described);
  v1::WatchGroupRequest watch;
  watch.set_known_version(described->group().version());
  watch.set_timeout_ms(30000);
  absl::StatusOr<v1::WatchGroupResponse> seen = absl::UnknownError("");
  std::thread watcher([&] { seen = rank(1).Call(watch, Soon()); });
  const absl::Status left = client::Down(processes().hosts(), Soon());
  watcher.join();
  ASSERT_OK(left);
  ASSERT_OK(seen);
  EXPECT_GT(seen->group().version(), described->group().version());
}

TEST_F(LifeTest, SigtermEndsEveryDaemonWithExitCodeZero) {
  StartAndForm(4);
  ASSERT_FALSE(HasFailure());
  MakeLayer(kLayer);
  EXPECT_EQ(Outputs().size(), 4u);
  for (size_t i = 0; i < processes().size(); ++i) processes().Signal(i, SIGTERM);
  for (size_t i = 0; i < processes().size(); ++i) {
    const absl::StatusOr<int> end = processes().AwaitEnd(i, absl::Now() + absl::Seconds(20));
    ASSERT_OK(end);
    EXPECT_TRUE(WIFEXITED(*end) && WEXITSTATUS(*end) == 0) << processes().Describe();
  }
}

TEST_F(LifeTest, SigtermOfOneDaemonInAnIdleMomentEndsItWithExitCodeZero) {
  StartAndForm(3);
  ASSERT_FALSE(HasFailure());
  processes().Signal(1, SIGTERM);
  const absl::StatusOr<int> end = processes().AwaitEnd(1, absl::Now() + absl::Seconds(20));
  ASSERT_OK(end);
  EXPECT_TRUE(WIFEXITED(*end) && WEXITSTATUS(*end) == 0) << processes().Describe();
}

TEST_F(LifeTest, DrainedDaemonTakesNoStepAndNoGroupUntilResumed) {
  StartAndForm(2);
  ASSERT_FALSE(HasFailure());
  MakeLayer(kLayer);
  ASSERT_OK(client::Drain(processes().hosts(), client::DrainMode::kDrain, Soon()));
  EXPECT_FALSE(driver().Run(Forwards()).ok());
  const client::CallOptions brief{.deadline = absl::Now() + absl::Seconds(10),
                                  .retry_window = absl::ZeroDuration()};
  const auto refused = client::Up(UpRequestOf(processes().hosts(), Config(2)), brief);
  ExpectError(refused.status(), Reason::kDraining, {});
  ASSERT_OK(client::Drain(processes().hosts(), client::DrainMode::kResume, Soon()));
  Form(processes().hosts(), Config(2));
  ASSERT_FALSE(HasFailure());
  EXPECT_EQ(Outputs().size(), 2u);
}

}  // namespace
}  // namespace expertd::integration
