// Admission by sequence and request id: every outcome, and random operations against a plain model.
#include "server/engine/sequence.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/error.h"
#include "tests/server/engine/test_seed.h"

namespace expertd::engine {
namespace {

absl::Status Closed() { return Error(Reason::kStepTimeout).Text("closed"); }

SequenceBook MakeBook(int64_t window = 4, int64_t kept = 2) {
  return SequenceBook({.window = window, .kept_replies = kept, .kept_outcomes = 8});
}

// Runs the next sequence, which must have been admitted.
void RunOne(SequenceBook& book) {
  ASSERT_TRUE(book.Runnable());
  book.Begin();
  EXPECT_FALSE(book.Runnable());
  book.End();
}

Reason ReasonOf(const AdmissionResult& result) { return expertd::ReasonOf(result.status); }

TEST(SequenceBookTest, TheFirstSequenceIsOne) {
  SequenceBook book = MakeBook();
  EXPECT_EQ(book.next(), 1u);
  EXPECT_FALSE(book.Runnable());
  EXPECT_EQ(book.Admit(1, 7).admission, Admission::kAccepted);
  EXPECT_EQ(book.waiting(), 1);
  RunOne(book);
  EXPECT_EQ(book.next(), 2u);
  EXPECT_EQ(book.waiting(), 0);
}

TEST(SequenceBookTest, SequenceZeroIsPast) {
  SequenceBook book = MakeBook();
  EXPECT_EQ(ReasonOf(book.Admit(0, 7)), Reason::kSequenceExpired);
}

TEST(SequenceBookTest, EarlyOnesWaitUntilTheGapIsFilled) {
  SequenceBook book = MakeBook();
  EXPECT_EQ(book.Admit(2, 7).admission, Admission::kAccepted);
  EXPECT_FALSE(book.Runnable());
  EXPECT_EQ(book.Admit(1, 8).admission, Admission::kAccepted);
  RunOne(book);
  RunOne(book);
  EXPECT_EQ(book.next(), 3u);
}

TEST(SequenceBookTest, TheWindowEndsWithBothNumbersInTheText) {
  SequenceBook book = MakeBook(4);
  EXPECT_EQ(book.Admit(4, 7).admission, Admission::kAccepted);
  const AdmissionResult result = book.Admit(5, 7);
  EXPECT_EQ(result.admission, Admission::kRefused);
  EXPECT_EQ(ReasonOf(result), Reason::kSequenceGap);
  EXPECT_EQ(std::string(result.status.message()),
            "sequence 5 is too far ahead: next is 1, window is 4");
  EXPECT_EQ(ReasonOf(book.Admit(UINT64_MAX, 7)), Reason::kSequenceGap);
}

TEST(SequenceBookTest, TheSameRequestIsADuplicateWhileItWaitsAndWhileItRuns) {
  SequenceBook book = MakeBook();
  book.Admit(1, 7);
  EXPECT_EQ(book.Admit(1, 7).admission, Admission::kDuplicate);
  book.Begin();
  EXPECT_EQ(book.Admit(1, 7).admission, Admission::kDuplicate);
  EXPECT_EQ(book.waiting(), 1);
}

TEST(SequenceBookTest, AnotherRequestIdIsAConflictInEveryState) {
  SequenceBook book = MakeBook();
  book.Admit(1, 7);
  EXPECT_EQ(ReasonOf(book.Admit(1, 8)), Reason::kSequenceConflict);
  book.Begin();
  EXPECT_EQ(ReasonOf(book.Admit(1, 8)), Reason::kSequenceConflict);
  book.End();
  EXPECT_EQ(ReasonOf(book.Admit(1, 8)), Reason::kSequenceConflict);
}

TEST(SequenceBookTest, KeptRepliesAreReplayedAndOlderOnesExpired) {
  SequenceBook book = MakeBook();
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) {
    book.Admit(sequence, sequence + 100);
    RunOne(book);
  }
  EXPECT_EQ(ReasonOf(book.Admit(1, 101)), Reason::kSequenceExpired);
  EXPECT_FALSE(book.ReplyKept(1));
  EXPECT_EQ(book.Admit(2, 102).admission, Admission::kReplay);
  EXPECT_EQ(book.Admit(3, 103).admission, Admission::kReplay);
  EXPECT_TRUE(book.ReplyKept(2));
  EXPECT_TRUE(book.ReplyKept(3));
  EXPECT_FALSE(book.ReplyKept(4));
}

TEST(SequenceBookTest, ACloseBeforeTheRequestIsToldToIt) {
  SequenceBook book = MakeBook();
  EXPECT_EQ(book.Close(1, Closed()), SequenceBook::CloseEffect::kRecorded);
  const AdmissionResult before = book.Admit(1, 7);
  EXPECT_EQ(before.admission, Admission::kClosed);
  EXPECT_EQ(before.status, Closed());
  EXPECT_TRUE(book.SkipClosed());
  EXPECT_EQ(book.next(), 2u);
  EXPECT_EQ(book.Admit(1, 7).admission, Admission::kClosed);  // also after next() has moved on
  EXPECT_FALSE(book.SkipClosed());
}

TEST(SequenceBookTest, ACloseOfAWaitingOrRunningSequenceCancelsIt) {
  SequenceBook book = MakeBook();
  book.Admit(1, 7);
  book.Admit(2, 8);
  EXPECT_EQ(book.Close(2, Closed()), SequenceBook::CloseEffect::kCancelled);
  book.Begin();
  EXPECT_EQ(book.Close(1, Closed()), SequenceBook::CloseEffect::kCancelled);
  EXPECT_FALSE(book.SkipClosed());
  EXPECT_EQ(book.Admit(1, 7).admission, Admission::kDuplicate);
  book.End();
  EXPECT_EQ(book.Admit(1, 7).admission, Admission::kReplay);
}

TEST(SequenceBookTest, ACloseAfterTheEndIsIgnoredAndOneFarAheadIsRecordedWithinABound) {
  SequenceBook book({.window = 4, .kept_replies = 2, .kept_outcomes = 3});
  book.Admit(1, 7);
  RunOne(book);
  EXPECT_EQ(book.Close(1, Closed()), SequenceBook::CloseEffect::kIgnored);
  EXPECT_EQ(book.Close(0, Closed()), SequenceBook::CloseEffect::kIgnored);
  EXPECT_EQ(book.Close(UINT64_MAX, Closed()), SequenceBook::CloseEffect::kRecorded);
  EXPECT_EQ(book.Close(60, Closed()), SequenceBook::CloseEffect::kRecorded);
  EXPECT_EQ(book.Close(5, Closed()), SequenceBook::CloseEffect::kRecorded);
  EXPECT_EQ(book.Close(6, Closed()), SequenceBook::CloseEffect::kIgnored);
  EXPECT_EQ(book.Admit(60, 7).admission, Admission::kClosed);
}

TEST(SequenceBookTest, AChainOfClosedSequencesIsSkippedOneByOne) {
  SequenceBook book = MakeBook();
  for (uint64_t sequence : {3u, 1u, 2u}) book.Close(sequence, Closed());
  book.Admit(4, 7);
  EXPECT_TRUE(book.SkipClosed());
  EXPECT_TRUE(book.SkipClosed());
  EXPECT_TRUE(book.SkipClosed());
  EXPECT_FALSE(book.SkipClosed());
  RunOne(book);
  EXPECT_EQ(book.next(), 5u);
}

TEST(SequenceBookTest, TheFirstReasonOfACloseStays) {
  SequenceBook book = MakeBook();
  book.Close(1, Closed());
  EXPECT_EQ(book.Close(1, Error(Reason::kCancelled).Text("again")),
            SequenceBook::CloseEffect::kRecorded);
  EXPECT_EQ(book.Admit(1, 7).status, Closed());
}

TEST(SequenceBookTest, ReasonsOfClosedSequencesAreKeptForAWhile) {
  SequenceBook book = MakeBook();
  book.Close(1, Closed());
  book.SkipClosed();
  for (uint64_t sequence = 2; sequence <= 9; ++sequence) {
    EXPECT_EQ(book.Admit(1, 7).admission, Admission::kClosed) << sequence;
    book.Admit(sequence, 7);
    RunOne(book);
  }
  EXPECT_EQ(ReasonOf(book.Admit(1, 7)), Reason::kSequenceExpired);
}

// What a SequenceBook must do, said as plainly as possible: every sequence has a fate.
struct Model {
  enum class Fate { kWaiting, kRunning, kDone, kClosed };
  struct Entry {
    Fate fate;
    uint64_t request = 0;
  };
  int64_t window, kept;
  uint64_t next = 1;
  std::map<uint64_t, Entry> seen;

  bool Is(uint64_t s, Fate fate) const {
    auto it = seen.find(s);
    return it != seen.end() && it->second.fate == fate;
  }
  Admission Admit(uint64_t s, uint64_t request) {
    if (Is(s, Fate::kClosed)) return Admission::kClosed;
    auto it = seen.find(s);
    if (it == seen.end()) {
      if (s < next || s >= next + static_cast<uint64_t>(window)) return Admission::kRefused;
      seen[s] = {Fate::kWaiting, request};
      return Admission::kAccepted;
    }
    if (it->second.fate == Fate::kDone && s + static_cast<uint64_t>(kept) < next) {
      return Admission::kRefused;
    }
    if (it->second.request != request) return Admission::kRefused;
    return it->second.fate == Fate::kDone ? Admission::kReplay : Admission::kDuplicate;
  }
};

TEST(SequenceBookTest, RandomOperationsAgreeWithTheModel) {
  TestSeed seed;
  SCOPED_TRACE(seed.Trace());
  for (int round = 0; round < 200; ++round) {
    Model model{.window = static_cast<int64_t>(1 + seed.Below(6)),
                .kept = static_cast<int64_t>(1 + seed.Below(4)),
                .seen = {}};
    SequenceBook book(
        {.window = model.window, .kept_replies = model.kept, .kept_outcomes = 1000000});
    for (int i = 0; i < 300; ++i) {
      const uint64_t s = model.next + seed.Below(10) - std::min<uint64_t>(model.next, 4);
      switch (seed.Below(4)) {
        case 0:
        case 1: {
          const uint64_t request = seed.Below(2);
          ASSERT_EQ(book.Admit(s, request).admission, model.Admit(s, request)) << s;
          break;
        }
        case 2: {
          const SequenceBook::CloseEffect effect = book.Close(s, Closed());
          const bool admitted =
              model.Is(s, Model::Fate::kWaiting) || model.Is(s, Model::Fate::kRunning);
          const bool ahead = s >= model.next;
          ASSERT_EQ(effect, s >= model.next && admitted ? SequenceBook::CloseEffect::kCancelled
                            : ahead                     ? SequenceBook::CloseEffect::kRecorded
                                                        : SequenceBook::CloseEffect::kIgnored);
          if (effect == SequenceBook::CloseEffect::kRecorded) {
            model.seen[s] = {Model::Fate::kClosed, 0};
          }
          break;
        }
        case 3: {
          const uint64_t now = model.next;
          if (model.Is(now, Model::Fate::kClosed)) {
            ASSERT_TRUE(book.SkipClosed());
            ++model.next;
          } else if (model.Is(now, Model::Fate::kWaiting)) {
            ASSERT_TRUE(book.Runnable());
            book.Begin();
            model.seen[now].fate = Model::Fate::kRunning;
          } else if (model.Is(now, Model::Fate::kRunning)) {
            ASSERT_FALSE(book.Runnable());
            book.End();
            model.seen[now].fate = Model::Fate::kDone;
            ++model.next;
          } else {
            ASSERT_FALSE(book.Runnable());
            ASSERT_FALSE(book.SkipClosed());
          }
          break;
        }
      }
      ASSERT_EQ(book.next(), model.next);
    }
  }
}

}  // namespace
}  // namespace expertd::engine
