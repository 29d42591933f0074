// Reading, splitting and the bigram entropy.
#include "client/expertctl/train/corpus.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace expertd::train {
namespace {

namespace fs = std::filesystem;

class ReadTextTest : public testing::Test {
 protected:
  ReadTextTest() : root_(fs::path(testing::TempDir()) / absl::StrCat("corpus_", getpid())) {
    fs::create_directories(root_ / "b");
  }
  ~ReadTextTest() override { fs::remove_all(root_); }

  void Write(const std::string& name, const std::string& content) {
    std::ofstream(root_ / name) << content;
  }

  fs::path root_;
};

TEST_F(ReadTextTest, FolderIsReadInPathOrderWithEqualContentsOnce) {
  Write("c", "third");
  Write("b/x", "second");
  Write("a", "first");
  Write("d", "first");
  fs::create_symlink(root_ / "c", root_ / "e");
  fs::create_symlink(root_ / "missing", root_ / "dangling");
  fs::create_directory_symlink(root_, root_ / "b" / "cycle");
  const auto text = ReadText(root_.string());
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(*text, "firstsecondthird");
}

TEST_F(ReadTextTest, LinkToAFileOutsideIsFollowed) {
  Write("b/x", "outside");
  fs::create_directory(root_ / "in");
  fs::create_symlink("../b/x", root_ / "in" / "link");
  EXPECT_EQ(*ReadText((root_ / "in").string()), "outside");
}

TEST_F(ReadTextTest, FileIsReadAsItIs) {
  Write("f", std::string("a\0\r\n\xff", 5));
  EXPECT_EQ(*ReadText((root_ / "f").string()), std::string("a\0\r\n\xff", 5));
}

TEST_F(ReadTextTest, MissingOrEmptyTextNamesTheFlag) {
  Write("empty", "");
  for (const char* name : {"missing", "b", "empty"}) {
    const absl::Status status = ReadText((root_ / name).string()).status();
    EXPECT_TRUE(absl::IsNotFound(status)) << name;
    EXPECT_NE(status.message().find("--data"), absl::string_view::npos) << status;
  }
}

// Byte i tells its position, so that every piece shows where it came from.
std::string Numbered(int64_t size) {
  std::string text;
  for (int64_t i = 0; i < size; i += 8) {
    std::string number = absl::StrCat(i);
    text += std::string(8 - number.size(), ' ') + number;
  }
  return text.substr(0, size);
}

TEST(SplitTextTest, EveryTenthBlockIsValidationAndNothingIsLostOrShared) {
  const int64_t period = kBlockBytes * kValidationEvery;
  const std::string text = Numbered(2 * period + 100);
  const auto corpus = SplitText(text);
  ASSERT_TRUE(corpus.ok()) << corpus.status();
  ASSERT_EQ(corpus->train.size(), 3);
  ASSERT_EQ(corpus->validation.size(), 2);
  EXPECT_EQ(corpus->validation[1], text.substr(2 * period - kBlockBytes, kBlockBytes));
  EXPECT_EQ(corpus->train[0] + corpus->validation[0] + corpus->train[1] + corpus->validation[1] +
                corpus->train[2],
            text);
}

TEST(SplitTextTest, SplitIsDeterministic) {
  const std::string text = Numbered(100000);
  EXPECT_EQ(SplitText(text)->validation, SplitText(text)->validation);
}

TEST(SplitTextTest, ShortestTextHasOneValidationBlock) {
  const int64_t period = kBlockBytes * kValidationEvery;
  const auto corpus = SplitText(Numbered(period));
  ASSERT_TRUE(corpus.ok());
  EXPECT_EQ(corpus->train.size(), 1);
  EXPECT_EQ(corpus->validation.size(), 1);
  EXPECT_TRUE(absl::IsInvalidArgument(SplitText(Numbered(period - 1)).status()));
}

TEST(SpreadSampleTest, TakesEvenlySpreadRuns) {
  const std::vector<std::string> runs = {"a", "b", "c", "d", "e"};
  EXPECT_EQ(SpreadSample(runs, 2), (std::vector<std::string>{"a", "c"}));
  EXPECT_EQ(SpreadSample(runs, 5), runs);
  EXPECT_EQ(SpreadSample(runs, 6), runs);
  EXPECT_TRUE(SpreadSample({}, 3).empty());
}

// Pairs of "aabab": aa, ab, ba, ab. After a: one a, two b; after b: one a.
// -(1/4 ln 1/3 + 2/4 ln 2/3 + 1/4 ln 1).
TEST(BigramEntropyTest, MatchesHandWorkedCase) {
  EXPECT_NEAR(BigramEntropy({"aabab"}), 0.25 * std::log(3.0) + 0.5 * std::log(1.5), 1e-12);
}

TEST(BigramEntropyTest, PairsDoNotCrossRuns) {
  EXPECT_EQ(BigramEntropy({"ab", "ac"}), std::log(2.0));
  EXPECT_EQ(BigramEntropy({"ab", "cd"}), 0);
}

TEST(BigramEntropyTest, NothingToCountIsZero) {
  EXPECT_EQ(BigramEntropy({}), 0);
  EXPECT_EQ(BigramEntropy({"", "a"}), 0);
}

}  // namespace
}  // namespace expertd::train
