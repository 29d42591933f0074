// Random ids, fingerprints and keyed digests.
#include "base/ids.h"

#include <gtest/gtest.h>

#include <set>

namespace expertd {
namespace {

TEST(IdsTest, RandomIdsAreNotZeroAndDoNotRepeat) {
  std::set<uint64_t> seen;
  for (int i = 0; i < 1000; ++i) {
    const uint64_t id = RandomId();
    EXPECT_NE(id, 0u);
    EXPECT_TRUE(seen.insert(id).second);
  }
}

TEST(IdsTest, RandomBytesHaveTheSizeAskedFor) {
  EXPECT_EQ(RandomBytes(0), "");
  EXPECT_EQ(RandomBytes(1000).size(), 1000u);
  EXPECT_NE(RandomBytes(32), RandomBytes(32));
}

TEST(IdsTest, FingerprintIsFnv1a64) {
  EXPECT_EQ(Fingerprint(""), 0xcbf29ce484222325u);
  EXPECT_EQ(Fingerprint("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(Fingerprint("foobar"), 0x85944171f73967e8u);
  EXPECT_NE(Fingerprint(std::string_view("\0", 1)), Fingerprint(""));
}

TEST(IdsTest, KeyedDigestIsTheFirstHalfOfHmacSha256) {
  // RFC 4231, test case 2: key "Jefe".
  EXPECT_EQ(KeyedDigest("Jefe", "what do ya want for nothing?"), 0x5bdcc146bf60754eu);
}

TEST(IdsTest, KeyedDigestDiffersByKeyAndByMessage) {
  EXPECT_EQ(KeyedDigest("key", "message"), KeyedDigest("key", "message"));
  EXPECT_NE(KeyedDigest("key", "message"), KeyedDigest("kez", "message"));
  EXPECT_NE(KeyedDigest("key", "message"), KeyedDigest("key", "messagf"));
  EXPECT_NE(KeyedDigest("", "message"), KeyedDigest("key", "message"));
  EXPECT_NE(KeyedDigest(std::string_view(), ""), 0u);
}

TEST(IdsTest, HexHasSixteenDigits) {
  EXPECT_EQ(Hex(0), "0000000000000000");
  EXPECT_EQ(Hex(0xabc), "0000000000000abc");
  EXPECT_EQ(Hex(UINT64_MAX), "ffffffffffffffff");
}

}  // namespace
}  // namespace expertd
