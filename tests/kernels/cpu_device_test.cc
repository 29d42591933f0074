// CpuDevice: pool, alignment, budget, copies, facts.
#include "kernels/cpu/cpu_device.h"
#include "kernels/backends.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "base/error.h"

namespace expertd {
namespace {

TEST(CpuDevice, BlockSizesCoverTheRequestInQuarterSteps) {
  EXPECT_EQ(CpuBlockSize(1), 256);
  EXPECT_EQ(CpuBlockSize(256), 256);
  EXPECT_EQ(CpuBlockSize(257), 512);
  EXPECT_EQ(CpuBlockSize(1 << 20), 1 << 20);
  EXPECT_EQ(CpuBlockSize((1 << 20) + 1), (1 << 20) + (1 << 18));
  for (int64_t bytes = 1; bytes < (int64_t{1} << 40); bytes = bytes * 3 / 2 + 1) {
    const int64_t block = CpuBlockSize(bytes);
    ASSERT_GE(block, bytes);
    ASSERT_EQ(block % 256, 0);
    ASSERT_EQ(CpuBlockSize(block), block) << "a class is its own size";
    if (bytes > 1024) {
      ASSERT_LE(block, bytes + bytes / 4 + 256);
    }
  }
}

TEST(CpuDevice, BuffersAreAlignedAndReused) {
  CpuDevice device;
  for (int round = 0; round < 3; ++round) {
    auto one = device.Allocate(1000);
    auto two = device.Allocate(3000);
    ASSERT_TRUE(one.ok() && two.ok());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(one->data()) % 256, 0u);
    EXPECT_EQ(one->size(), 1000);
    std::memset(one->data(), 1, 1000);
  }
  EXPECT_EQ(device.block_allocations(), 2);
}

TEST(CpuDevice, SizeZeroGivesANonNullPointer) {
  CpuDevice device;
  auto buffer = device.Allocate(0);
  ASSERT_TRUE(buffer.ok());
  EXPECT_NE(buffer->data(), nullptr);
  EXPECT_EQ(buffer->size(), 0);
}

TEST(CpuDevice, BudgetIsEnforcedAndFreedMemoryServesOtherSizes) {
  CpuDevice device(10000);
  {
    auto most = device.Allocate(8000);
    ASSERT_TRUE(most.ok());
    const absl::Status refused = device.Allocate(4000).status();
    EXPECT_TRUE(HasReason(refused, Reason::kMemoryBudget)) << refused;
    EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("at most 10000"));
  }
  EXPECT_TRUE(device.Allocate(4000).ok()) << "the pooled block must be given up for it";
  EXPECT_TRUE(HasReason(device.Allocate(-1).status(), Reason::kMemoryBudget));
  EXPECT_TRUE(HasReason(device.Allocate(int64_t{1} << 62).status(), Reason::kMemoryBudget));
}

TEST(CpuDevice, CopiesAndZeroAcceptNothing) {
  CpuDevice device;
  char from[4] = {1, 2, 3, 4};
  char to[4] = {};
  EXPECT_TRUE(device.CopyToDevice(to, from, 4).ok());
  EXPECT_EQ(to[3], 4);
  EXPECT_TRUE(device.Zero(to, 2).ok());
  EXPECT_EQ(to[1], 0);
  EXPECT_EQ(to[2], 3);
  EXPECT_TRUE(device.CopyToHost(nullptr, nullptr, 0).ok());
  EXPECT_TRUE(device.Zero(nullptr, 0).ok());
}

TEST(CpuDevice, FactsNameThisMachine) {
  CpuDevice device;
  EXPECT_EQ(device.facts().kind, "cpu");
  EXPECT_FALSE(device.facts().name.empty());
  EXPECT_GT(device.facts().memory_bytes, int64_t{1} << 27);
  EXPECT_EQ(CpuModelName("processor : 0\nmodel name\t: A CPU @ 1 GHz\nflags : x\n"),
            "A CPU @ 1 GHz");
  EXPECT_EQ(CpuModelName("processor : 0\n"), "unknown CPU");
}

TEST(CpuDevice, ThreadCountIsAtLeastOne) {
  const int before = CpuThreads();
  EXPECT_GE(before, 1);
  SetCpuThreads(0);
  EXPECT_EQ(CpuThreads(), 1);
  SetCpuThreads(before);
}

TEST(CpuDevice, MarksMeasureTheTimeBetweenThem) {
  CpuDevice device;
  for (int round = 0; round < 3; ++round) {
    device.ForgetMarks();
    const SteadyTime start = Clock::Real().Now();
    EXPECT_EQ(*device.Mark(), 0);
    while (ToMicros(Clock::Real().Now() - start) < 2000) {
    }
    EXPECT_EQ(*device.Mark(), 1);
    EXPECT_EQ(*device.Mark(), 2);
    const double total = ToMicros(Clock::Real().Now() - start);
    const double first = *device.MicrosBetween(0, 1);
    EXPECT_GT(first, 1900);
    EXPECT_LE(*device.MicrosBetween(0, 2), total);
    EXPECT_DOUBLE_EQ(*device.MicrosBetween(0, 2), first + *device.MicrosBetween(1, 2));
  }
}

}  // namespace
}  // namespace expertd
