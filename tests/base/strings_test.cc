// Joining of text parts of every string and number type.
#include "base/strings.h"

#include <gtest/gtest.h>

namespace expertd {
namespace {

TEST(StringsTest, JoinsEveryKindOfPart) {
  const std::string_view view = "view";
  const absl::string_view absl_view("absl");
  EXPECT_EQ(StrCat("literal ", view, " ", absl_view, " ", std::string("string"), " ", 7, " ",
                   int64_t{-8}, " ", uint64_t{18446744073709551615u}, " ", 0.5, " ", true),
            "literal view absl string 7 -8 18446744073709551615 0.5 1");
  EXPECT_EQ(StrCat(), "");
  EXPECT_EQ(StrCat(std::string_view()), "");
}

TEST(StringsTest, KeepsZeroBytes) {
  const std::string_view bytes("a\0b", 3);
  EXPECT_EQ(StrCat(bytes, "c"), std::string("a\0bc", 4));
}

TEST(StringsTest, AppendsInPlace) {
  std::string text = "a";
  StrAppend(&text, std::string_view("b"), 1);
  StrAppend(&text);
  EXPECT_EQ(text, "ab1");
}

TEST(StringsTest, ViewsConvertBothWays) {
  const std::string_view view("x\0y", 3);
  EXPECT_EQ(StdView(AbslView(view)), view);
  EXPECT_EQ(StdView(AbslView(view)).data(), view.data());
}

}  // namespace
}  // namespace expertd
