// Tests of the waiting loop with calls that never touch a network.
#include "client/cpp/fan_out.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"

namespace expertd::client {
namespace {

using Done = std::function<void(grpc::Status)>;

const grpc::Status kUnavailable(grpc::StatusCode::UNAVAILABLE, "refused");

PendingCall Call(std::function<void(Done)> start) {
  return {Origin{0, "h:1"},
          [start = std::move(start)](grpc::ClientContext*, Done done) { start(std::move(done)); }};
}

CallOptions In(absl::Duration timeout) { return {.deadline = absl::Now() + timeout}; }

TEST(FanOutTest, NoCallsNoAnswers) { EXPECT_TRUE(FanOut({}, In(absl::Seconds(1))).empty()); }

TEST(FanOutTest, AnswersComeInTheOrderOfTheCalls) {
  const auto good = [](Done done) { done(grpc::Status::OK); };
  const auto bad = [](Done done) { done(grpc::Status(grpc::StatusCode::NOT_FOUND, "x")); };
  const auto statuses = FanOut({Call(good), Call(bad), Call(good)}, In(absl::Seconds(5)));
  ASSERT_EQ(statuses.size(), 3u);
  EXPECT_TRUE(statuses[0].ok());
  EXPECT_TRUE(absl::IsNotFound(statuses[1]));
  EXPECT_TRUE(statuses[2].ok());
}

TEST(FanOutTest, AllCallsRunAtOnce) {
  // Each call ends only when all three have been started.
  auto waiting = std::make_shared<std::vector<Done>>();
  const auto start = [waiting](Done done) {
    waiting->push_back(std::move(done));
    if (waiting->size() < 3) return;
    for (Done& each : *waiting) each(grpc::Status::OK);
  };
  for (const absl::Status& status :
       FanOut({Call(start), Call(start), Call(start)}, In(absl::Seconds(5)))) {
    EXPECT_TRUE(status.ok());
  }
}

TEST(FanOutTest, AnswersFromAnotherThread) {
  std::vector<std::thread> threads;
  const auto start = [&threads](Done done) {
    threads.emplace_back([done = std::move(done)] { done(grpc::Status::OK); });
  };
  EXPECT_TRUE(FanOut({Call(start)}, In(absl::Seconds(5)))[0].ok());
  for (std::thread& thread : threads) thread.join();
}

TEST(FanOutTest, UnavailableIsAskedAgain) {
  int calls = 0;
  const auto start = [&calls](Done done) { done(++calls < 3 ? kUnavailable : grpc::Status::OK); };
  EXPECT_TRUE(FanOut({Call(start)}, In(absl::Seconds(5)))[0].ok());
  EXPECT_EQ(calls, 3);
}

TEST(FanOutTest, NothingElseIsAskedAgain) {
  int calls = 0;
  const auto start = [&calls](Done done) {
    ++calls;
    done(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "queue full"));
  };
  EXPECT_TRUE(absl::IsResourceExhausted(FanOut({Call(start)}, In(absl::Seconds(5)))[0]));
  EXPECT_EQ(calls, 1);
}

TEST(FanOutTest, RetriesEndWithTheirWindowAndWithTheDeadline) {
  const auto start = [](Done done) { done(kUnavailable); };
  CallOptions options = In(absl::Seconds(30));
  options.retry_window = absl::Milliseconds(200);
  const absl::Time begin = absl::Now();
  EXPECT_TRUE(absl::IsUnavailable(FanOut({Call(start)}, options)[0]));
  EXPECT_TRUE(absl::IsUnavailable(FanOut({Call(start)}, In(absl::Milliseconds(200)))[0]));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
}

TEST(FanOutTest, OnceOneFailedForGoodOthersAreNotAskedAgain) {
  int calls = 0;
  const auto unavailable = [&calls](Done done) {
    ++calls;
    done(kUnavailable);
  };
  const auto bad = [](Done done) { done(grpc::Status(grpc::StatusCode::INTERNAL, "x")); };
  const auto statuses = FanOut({Call(unavailable), Call(bad)}, In(absl::Seconds(30)));
  EXPECT_TRUE(absl::IsUnavailable(statuses[0]));
  EXPECT_TRUE(absl::IsInternal(statuses[1]));
  EXPECT_EQ(calls, 1);
}

TEST(FanOutTest, AStopFlagEndsRetries) {
  std::atomic<bool> stop{false};
  int calls = 0;
  const auto start = [&](Done done) {
    if (++calls == 2) stop = true;
    done(kUnavailable);
  };
  CallOptions options = In(absl::Seconds(30));
  options.stop = &stop;
  const absl::Time begin = absl::Now();
  EXPECT_TRUE(absl::IsUnavailable(FanOut({Call(start)}, options)[0]));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace expertd::client
