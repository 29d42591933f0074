// The device thread: order, urgency, idleness, and the end.
#include "server/engine/device_thread.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <vector>

namespace expertd::engine {
namespace {

TEST(DeviceThreadTest, RunsTasksInTheOrderPosted) {
  std::vector<int> order;
  {
    DeviceThread thread;
    for (int i = 0; i < 1000; ++i) thread.Post([&order, i] { order.push_back(i); });
  }
  ASSERT_EQ(order.size(), 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(DeviceThreadTest, UrgentTasksGoBeforeThoseThatWaitInTheirOwnOrder) {
  std::vector<int> order;
  std::promise<void> gate;
  std::promise<void> started;
  {
    DeviceThread thread;
    thread.Post([&] {
      started.set_value();
      gate.get_future().wait();
    });
    started.get_future().wait();
    thread.Post([&] { order.push_back(3); });
    thread.PostUrgent([&] { order.push_back(1); });
    thread.PostUrgent([&] { order.push_back(2); });
    gate.set_value();
  }
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
}

TEST(DeviceThreadTest, TasksMayPostTasksAlsoWhileItEnds) {
  int ran = 0;
  {
    auto thread = std::make_unique<DeviceThread>();
    DeviceThread* device = thread.get();
    device->Post([&, device] {
      ++ran;
      device->Post([&, device] {
        ++ran;
        device->PostUrgent([&] { ++ran; });
      });
    });
  }
  EXPECT_EQ(ran, 3);
}

TEST(DeviceThreadTest, ReleasesWhatATaskHeldBeforeTheNextOneRuns) {
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> watch = held;
  bool gone = false;
  {
    DeviceThread thread;
    thread.Post([held = std::move(held)] {});
    thread.Post([&] { gone = watch.expired(); });
  }
  EXPECT_TRUE(gone);
}

TEST(DeviceThreadTest, SaysHowLongItsTaskHasBeenRunning) {
  DeviceThread thread;
  EXPECT_EQ(thread.RunningFor(Clock::Real().Now()), Duration::zero());
  std::promise<void> gate;
  std::promise<void> started;
  std::promise<void> done;
  thread.Post([&] {
    started.set_value();
    gate.get_future().wait();
  });
  started.get_future().wait();
  EXPECT_GE(thread.RunningFor(Clock::Real().Now() + std::chrono::seconds(5)),
            std::chrono::seconds(5));
  gate.set_value();
  thread.Post([&] { done.set_value(); });
  done.get_future().wait();
}

}  // namespace
}  // namespace expertd::engine
