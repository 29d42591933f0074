// Tests of the probe server over real HTTP.
#include "server/observe/probe_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>

namespace expertd::observe {
namespace {

// One request on a connection of its own; the whole answer.
std::string Http(const std::string& address, const std::string& request) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  const timeval timeout = {.tv_sec = 20, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(ParseHostPort(address)->port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  EXPECT_EQ(send(fd, request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t n = recv(fd, buffer, sizeof(buffer), 0); n > 0;
       n = recv(fd, buffer, sizeof(buffer), 0)) {
    answer.append(buffer, static_cast<size_t>(n));
  }
  close(fd);
  return answer;
}

std::string Request(const std::string& method, const std::string& path) {
  return method + " " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
}

class ProbeServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<ProbeServer>> server =
        ProbeServer::Create({"127.0.0.1", 0}, {.metrics = [] { return std::string("m 1\n"); },
                                               .ready = [this] { return ready_.load(); },
                                               .group_ready = [this] { return group_.load(); }});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  // The status line of GET `path`.
  std::string Get(const std::string& path) {
    const std::string answer = Http(server_->address(), Request("GET", path));
    return answer.substr(0, answer.find("\r\n"));
  }

  std::atomic<bool> ready_{true};
  std::atomic<bool> group_{false};
  std::unique_ptr<ProbeServer> server_;
};

TEST_F(ProbeServerTest, HealthDoesNotDependOnReadiness) {
  ready_ = false;
  EXPECT_EQ(Get("/healthz"), "HTTP/1.1 200 OK");
}

TEST_F(ProbeServerTest, ReadinessDoesNotDependOnTheGroup) {
  EXPECT_EQ(Get("/readyz"), "HTTP/1.1 200 OK");
  EXPECT_EQ(Get("/groupz"), "HTTP/1.1 503 Service Unavailable");
  ready_ = false;
  group_ = true;
  EXPECT_EQ(Get("/readyz"), "HTTP/1.1 503 Service Unavailable");
  EXPECT_EQ(Get("/groupz"), "HTTP/1.1 200 OK");
}

TEST_F(ProbeServerTest, MetricsAreTextWithAVersion) {
  const std::string answer = Http(server_->address(), Request("GET", "/metrics"));
  EXPECT_NE(answer.find("text/plain; version=0.0.4"), std::string::npos) << answer;
  EXPECT_NE(answer.find("\r\n\r\nm 1\n"), std::string::npos) << answer;
}

TEST_F(ProbeServerTest, OtherPathsAndMethodsAreRefused) {
  EXPECT_EQ(Get("/"), "HTTP/1.1 404 Not Found");
  const std::string answer = Http(server_->address(), Request("DELETE", "/metrics"));
  EXPECT_EQ(answer.substr(0, 12), "HTTP/1.1 405") << answer;
  EXPECT_NE(answer.find("Allow: GET, HEAD"), std::string::npos);
}

TEST_F(ProbeServerTest, GarbageDoesNotStopIt) {
  Http(server_->address(), "\1\2\3\r\n\r\n");
  EXPECT_EQ(Get("/healthz"), "HTTP/1.1 200 OK");
}

TEST_F(ProbeServerTest, TakenPortIsNamed) {
  const absl::StatusOr<std::unique_ptr<ProbeServer>> second =
      ProbeServer::Create(*ParseHostPort(server_->address()), {});
  EXPECT_TRUE(absl::IsAlreadyExists(second.status())) << second.status();
}

}  // namespace
}  // namespace expertd::observe
