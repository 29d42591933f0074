// Tests of placing daemons on ranks and of choosing an epoch.
#include "client/cpp/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "client/cpp/bootstrap.h"

namespace expertd::client {
namespace {

using ::testing::HasSubstr;

HostInfo Host(const std::string& host, int64_t slot, uint64_t incarnation) {
  HostInfo info;
  info.host = host;
  info.info.set_slot(slot);
  info.info.set_incarnation(incarnation);
  info.info.set_version("1.4.2");
  info.info.set_address("10.0.0." + std::to_string(slot) + ":7070");
  return info;
}

TEST(PlaceTest, SlotOrderGivesRanks) {
  const auto ranks = Place({Host("c:1", 7, 30), Host("a:1", 0, 10), Host("b:1", 3, 20)});
  ASSERT_TRUE(ranks.ok()) << ranks.status();
  ASSERT_EQ(ranks->size(), 3u);
  EXPECT_EQ((*ranks)[0].host, "a:1");
  EXPECT_EQ((*ranks)[1].host, "b:1");
  EXPECT_EQ((*ranks)[2].host, "c:1");
  EXPECT_EQ((*ranks)[2].rank, 2);
  EXPECT_EQ((*ranks)[2].member.slot(), 7);
  EXPECT_EQ((*ranks)[2].member.address(), "10.0.0.7:7070");
  EXPECT_EQ((*ranks)[2].member.incarnation(), 30u);
}

TEST(PlaceTest, ADaemonWithoutAddressIsReachedAsTheClientDoes) {
  HostInfo host = Host("a:1", 0, 1);
  host.info.clear_address();
  const auto ranks = Place({host});
  ASSERT_TRUE(ranks.ok());
  EXPECT_EQ((*ranks)[0].member.address(), "a:1");
}

TEST(PlaceTest, NoHostsIsAnError) {
  EXPECT_EQ(ReasonOf(Place({}).status()), Reason::kConfigInvalid);
}

TEST(PlaceTest, EveryProblemIsReportedAtOnce) {
  HostInfo third = Host("c:1", 5, 30);
  third.info.set_version("1.6.0");
  const absl::Status status = Place({Host("a:1", 5, 10), Host("b:1", 2, 20), third}).status();
  const ErrorDetail detail = DetailOf(status);
  ASSERT_EQ(detail.violations.size(), 3u);  // Slot 5 twice; versions of c against a and b.
  EXPECT_THAT(std::string(status.message()), HasSubstr("slot 5 at a:1 and c:1"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("1.6.0"));
}

TEST(PlaceTest, TheSameDaemonUnderTwoNames) {
  const absl::Status status = Place({Host("a:1", 0, 10), Host("127.0.0.1:1", 0, 10)}).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("the same daemon twice"));
  EXPECT_EQ(DetailOf(status).violations.size(), 1u);
}

TEST(PlaceTest, OneDeviceOfOneHostServesOneDaemon) {
  HostInfo a = Host("a:1", 0, 10);
  HostInfo b = Host("b:1", 1, 20);
  for (HostInfo* host : {&a, &b}) {
    host->info.set_boot_id("boot");
    host->info.mutable_device()->set_kind("cuda");
    host->info.mutable_device()->set_uuid("GPU-1");
  }
  const absl::Status status = Place({a, b}).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("GPU-1 at slots 0 and 1"));
  b.info.set_boot_id("another");
  EXPECT_TRUE(Place({a, b}).ok());
  b.info.set_boot_id("boot");
  a.info.mutable_device()->clear_uuid();
  b.info.mutable_device()->clear_uuid();
  EXPECT_TRUE(Place({a, b}).ok());
}

TEST(PlaceTest, CpuDaemonsShareTheProcessor) {
  HostInfo a = Host("a:1", 0, 10);
  HostInfo b = Host("a:2", 1, 20);
  for (HostInfo* host : {&a, &b}) {
    host->info.set_boot_id("boot");
    host->info.mutable_device()->set_kind("cpu");
    host->info.mutable_device()->set_uuid("cpu");
  }
  EXPECT_TRUE(Place({a, b}).ok());
}

TEST(VersionsFitTest, OneMinorVersionApart) {
  EXPECT_TRUE(VersionsFit("1.4.2", "1.4.9"));
  EXPECT_TRUE(VersionsFit("1.4.2", "1.5.0"));
  EXPECT_FALSE(VersionsFit("1.4.2", "1.6.0"));
  EXPECT_FALSE(VersionsFit("1.4.2", "2.4.2"));
  EXPECT_TRUE(VersionsFit("dev", "dev"));
  EXPECT_FALSE(VersionsFit("dev", "1.4.2"));
}

TEST(ChooseEpochTest, TheClockLeadsUnlessSomethingNewerWasSeen) {
  EXPECT_EQ(*ChooseEpoch(0, 1700000000000), 1700000000000u);
  EXPECT_EQ(*ChooseEpoch(1700000000000, 1700000000000), 1700000000001u);
  EXPECT_EQ(*ChooseEpoch(1800000000000, 1700000000000), 1800000000001u);
}

TEST(ChooseEpochTest, AClockBefore1970StillGivesAnEpoch) { EXPECT_EQ(*ChooseEpoch(0, -5), 1u); }

TEST(ChooseEpochTest, NothingIsNewerThanTheLastNumber) {
  EXPECT_EQ(ReasonOf(ChooseEpoch(std::numeric_limits<uint64_t>::max(), 1).status()),
            Reason::kConfigInvalid);
}

TEST(MakeClaimantTest, DiffersEveryTime) { EXPECT_NE(MakeClaimant(), MakeClaimant()); }

}  // namespace
}  // namespace expertd::client
