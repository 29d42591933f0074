// Tests of addresses: what parses, and what binding says when it fails.
#include "server/observe/listen_address.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

namespace expertd::observe {
namespace {

TEST(ListenAddressTest, ParsesHostAndPort) {
  EXPECT_EQ(ParseHostPort("127.0.0.1:7301")->host, "127.0.0.1");
  EXPECT_EQ(ParseHostPort("127.0.0.1:7301")->port, 7301);
  EXPECT_EQ(ParseHostPort("[::1]:0")->host, "::1");
  EXPECT_EQ(ParseHostPort("a.example:65535")->port, 65535);
  EXPECT_EQ(JoinHostPort("::1", 5), "[::1]:5");
  EXPECT_EQ(JoinHostPort("a", 5), "a:5");
}

TEST(ListenAddressTest, RefusesWhatIsNotAnAddress) {
  for (const char* text : {"", ":", "a", "a:", ":1", "a:x", "a:-1", "a:65536", "a:1 ", "::1:5",
                           "[]:5", "a:99999999999999999999"}) {
    EXPECT_FALSE(ParseHostPort(text).ok()) << text;
  }
}

TEST(ListenAddressTest, TakenAddressIsNamed) {
  const absl::StatusOr<int> first = Listen({"127.0.0.1", 0});
  ASSERT_TRUE(first.ok()) << first.status();
  const int port = BoundPort(*first);
  EXPECT_GT(port, 0);
  const absl::StatusOr<int> second = Listen({"127.0.0.1", port});
  EXPECT_TRUE(absl::IsAlreadyExists(second.status())) << second.status();
  EXPECT_NE(second.status().message().find(JoinHostPort("127.0.0.1", port)),
            absl::string_view::npos);
  close(*first);
}

TEST(ListenAddressTest, ForeignAddressIsNamed) {
  const absl::StatusOr<int> socket = Listen({"192.0.2.1", 0});  // reserved for documentation
  EXPECT_TRUE(absl::IsInvalidArgument(socket.status())) << socket.status();
  EXPECT_NE(socket.status().message().find("192.0.2.1"), absl::string_view::npos);
}

}  // namespace
}  // namespace expertd::observe
