// Log lines as they reach standard error.
#include "base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <sstream>
#include <thread>
#include <vector>

namespace expertd {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::MatchesRegex;

// What `write` puts on standard error, which is a pipe meanwhile. At most a pipe's capacity.
template <typename Write>
std::string Capture(Write write) {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  const int saved = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  write();
  dup2(saved, STDERR_FILENO);
  close(saved);
  close(ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t got; (got = read(ends[0], buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<size_t>(got));
  }
  close(ends[0]);
  return text;
}

class LogTest : public testing::Test {
 protected:
  ~LogTest() override { SetLogLevel(LogLevel::kInfo); }
};

TEST_F(LogTest, ALineHasTimeLevelEventAndFields) {
  const std::string line = Capture(
      [] { Log(LogLevel::kInfo, "group_ready").Field("epoch", uint64_t{7}).Field("host", "a"); });
  EXPECT_THAT(line, MatchesRegex("[0-9-]+T[0-9:]+\\.[0-9][0-9][0-9]Z INFO event=group_ready "
                                 "epoch=7 host=a\n"));
}

TEST_F(LogTest, ValuesThatWouldBreakTheLineAreQuotedAndEscaped) {
  const auto logged = [](std::string_view value) {
    return Capture([&] { Log(LogLevel::kError, "e").Field("k", value); });
  };
  EXPECT_THAT(logged("a b"), EndsWith(" ERROR event=e k=\"a b\"\n"));
  EXPECT_THAT(logged("a=b"), EndsWith(" k=\"a=b\"\n"));
  EXPECT_THAT(logged("a\"b"), EndsWith(" k=\"a\\\"b\"\n"));
  EXPECT_THAT(logged("a\nERROR event=forged"), EndsWith(" k=\"a\\nERROR event=forged\"\n"));
  EXPECT_THAT(logged(""), EndsWith(" k=\"\"\n"));
  EXPECT_THAT(logged("\x1b[31mred"), EndsWith(" k=\"\\033[31mred\"\n"));
  EXPECT_THAT(logged(std::string_view("\0", 1)), EndsWith(" k=\"\\000\"\n"));
}

TEST_F(LogTest, LinesBelowTheLevelAreDropped) {
  EXPECT_EQ(Capture([] { Log(LogLevel::kDebug, "d").Field("k", 1); }), "");
  SetLogLevel(LogLevel::kDebug);
  EXPECT_THAT(Capture([] { Log(LogLevel::kDebug, "d").Field("k", 1); }),
              HasSubstr(" DEBUG event=d"));
  SetLogLevel(LogLevel::kError);
  EXPECT_EQ(Capture([] { Log(LogLevel::kWarning, "w"); }), "");
  EXPECT_EQ(GetLogLevel(), LogLevel::kError);
}

TEST_F(LogTest, LinesOfThreadsDoNotMix) {
  const std::string text = Capture([] {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([t] {
        for (int i = 0; i < 50; ++i) Log(LogLevel::kInfo, "e").Field("thread", t).Field("i", i);
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  std::istringstream lines(text);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    EXPECT_THAT(line, MatchesRegex(".*Z INFO event=e thread=[0-3] i=[0-9]+"));
  }
  EXPECT_EQ(count, 200);
}

}  // namespace
}  // namespace expertd
