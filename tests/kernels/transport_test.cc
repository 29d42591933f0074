// TransportBetween: every way, and why not a faster one.
#include "kernels/transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace expertd {
namespace {

using testing::HasSubstr;

struct Pair {
  TransportFacts self{.host_key = "h", .device_uuid = "GPU-a", .pci_bus_id = "0:1"};
  TransportFacts peer{.host_key = "h", .device_uuid = "GPU-b", .pci_bus_id = "0:2"};
  std::vector<DevicePeer> seen = {{.ordinal = 1, .uuid = "GPU-x", .access = true},
                                  {.ordinal = 2, .uuid = "GPU-b", .access = true, .nvlink = true}};

  Transport Way(std::string_view backend = "nccl") const {
    return TransportBetween(backend, self, peer, seen);
  }
};

TEST(Transport, CpuBackendsHaveOneWayEach) {
  EXPECT_EQ(Pair().Way("loopback").name, "loopback");
  EXPECT_EQ(Pair().Way("gloo").name, "gloo tcp");
}

TEST(Transport, NvlinkIsFirst) {
  EXPECT_EQ(Pair().Way().name, "nvlink p2p");
  EXPECT_EQ(Pair().Way().reason, "");
}

TEST(Transport, WithoutNvlinkPeersUsePcie) {
  Pair pair;
  pair.seen[1].nvlink = false;
  EXPECT_EQ(pair.Way().name, "p2p pcie");
  for (TransportFacts* one : {&pair.self, &pair.peer}) {
    one->nccl.p2p_nvlink_only = true;
    EXPECT_EQ(pair.Way().name, "shm");
    EXPECT_THAT(pair.Way().reason, HasSubstr("NCCL_P2P_LEVEL"));
    one->nccl = {};
  }
}

TEST(Transport, WithoutPeerAccessItIsSharedMemory) {
  Pair pair;
  pair.seen[1].access = false;
  EXPECT_EQ(pair.Way().name, "shm");
  EXPECT_THAT(pair.Way().reason, HasSubstr("no peer access"));
}

TEST(Transport, EitherRankMayForbidAWay) {
  for (const bool self : {true, false}) {
    Pair pair;
    TransportFacts& one = self ? pair.self : pair.peer;
    one.nccl.p2p_disabled = true;
    EXPECT_EQ(pair.Way().name, "shm");
    EXPECT_THAT(pair.Way().reason, HasSubstr("NCCL_P2P_DISABLE"));
    one.nccl.shm_disabled = true;
    EXPECT_EQ(pair.Way().name, "network");
    EXPECT_THAT(pair.Way().reason, HasSubstr("NCCL_SHM_DISABLE"));
  }
}

TEST(Transport, SharedMemoryOffAloneChangesNothing) {
  Pair pair;
  pair.self.nccl.shm_disabled = true;
  EXPECT_EQ(pair.Way().name, "nvlink p2p");
}

TEST(Transport, AGpuThatCannotBeSeenIsSaidToBeUnknown) {
  Pair pair;
  pair.seen.pop_back();
  EXPECT_EQ(pair.Way().name, "unknown");
  EXPECT_THAT(pair.Way().reason, HasSubstr("0:2"));
}

TEST(Transport, OtherHostsAreReachedOverTheNetwork) {
  Pair pair;
  pair.peer.host_key = "elsewhere";
  EXPECT_EQ(pair.Way().name, "network");
  EXPECT_THAT(pair.Way().reason, HasSubstr("elsewhere"));
}

TEST(Transport, AHostIsNameAndBootUnlessTheEnvironmentNamesIt) {
  EXPECT_EQ(NcclHostKey({}, "a", "1"), NcclHostKey({}, "a", "1"));
  EXPECT_NE(NcclHostKey({}, "a", "1"), NcclHostKey({}, "a", "2"));
  EXPECT_NE(NcclHostKey({}, "a", "1"), NcclHostKey({}, "b", "1"));
  EXPECT_EQ(NcclHostKey({.host_id = "x"}, "a", "1"), "x");
}

}  // namespace
}  // namespace expertd
