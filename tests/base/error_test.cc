// Errors: the builder, the reason table, contexts, collected violations and the encoding.
#include "base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

namespace expertd {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

std::vector<Reason> AllReasons() {
  std::vector<Reason> reasons;
  for (int i = 0; i <= static_cast<int>(Reason::kInternal); ++i) {
    reasons.push_back(static_cast<Reason>(i));
  }
  return reasons;
}

absl::Status Sample() {
  return Error(Reason::kRecvCapacity)
      .Text("rows: got ", 12, ", need at most ", int64_t{8})
      .With("rows", 12)
      .With("flag", "max_recv_rows_per_rank")
      .At("topk_ids[3,1]", "got 9, need 0..7")
      .At("tokens", "got nothing");
}

TEST(ErrorTest, EveryReasonHasItsOwnNameAndComesBackFromIt) {
  std::vector<std::string> names;
  for (Reason reason : AllReasons()) {
    const std::string name(ReasonName(reason));
    EXPECT_EQ(ReasonFromName(name), reason) << name;
    EXPECT_THAT(names, testing::Not(testing::Contains(name)));
    names.push_back(name);
    EXPECT_NE(ReasonCode(reason), absl::StatusCode::kOk);
  }
  EXPECT_EQ(names.size(), 46u);
  EXPECT_EQ(ReasonFromName("NO_SUCH_REASON"), Reason::kInternal);
  EXPECT_EQ(ReasonFromName(""), Reason::kInternal);
}

TEST(ErrorTest, CodesAreThoseOfThePublicTable) {
  EXPECT_EQ(ReasonCode(Reason::kShapeMismatch), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonCode(Reason::kConfigMismatch), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonCode(Reason::kTicketUnknown), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonCode(Reason::kPeerRejected), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonCode(Reason::kStepTimeout), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ReasonCode(Reason::kSequenceConflict), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ReasonCode(Reason::kTicketMemory), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonCode(Reason::kDraining), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonCode(Reason::kCheckpointCorrupt), absl::StatusCode::kDataLoss);
}

TEST(ErrorTest, TheBuilderKeepsTextMetadataAndViolations) {
  const absl::Status status = Sample();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Message(status), "rows: got 12, need at most 8: got 9, need 0..7 (topk_ids[3,1])");
  const ErrorDetail detail = DetailOf(status);
  EXPECT_EQ(detail.reason, Reason::kRecvCapacity);
  EXPECT_THAT(detail.metadata,
              ElementsAre(Pair("rows", "12"), Pair("flag", "max_recv_rows_per_rank")));
  EXPECT_THAT(detail.violations, ElementsAre(FieldViolation{"topk_ids[3,1]", "got 9, need 0..7"},
                                             FieldViolation{"tokens", "got nothing"}));
}

TEST(ErrorTest, AnErrorWithoutTextSaysItsFirstViolation) {
  const absl::Status status = Error(Reason::kConfigInvalid).At("rank", "got 4, need 0..3");
  EXPECT_EQ(Message(status), "got 4, need 0..3 (rank)");
}

TEST(ErrorTest, ConvertsToStatusOr) {
  const absl::StatusOr<int> value = Error(Reason::kLayerUnknown).Text("x");
  EXPECT_TRUE(HasReason(value.status(), Reason::kLayerUnknown));
}

TEST(ErrorTest, ForeignStatusesGetAReasonThatFitsTheirCode) {
  EXPECT_EQ(ReasonOf(absl::CancelledError("x")), Reason::kCancelled);
  EXPECT_EQ(ReasonOf(absl::DeadlineExceededError("x")), Reason::kStepTimeout);
  EXPECT_EQ(ReasonOf(absl::UnavailableError("x")), Reason::kPeerLost);
  EXPECT_EQ(ReasonOf(absl::UnknownError("x")), Reason::kInternal);
  EXPECT_FALSE(HasReason(absl::OkStatus(), Reason::kInternal));
}

TEST(ErrorTest, ContextComesBeforeTheTextAndKeepsTheDetail) {
  const absl::Status status = WithContext(WithContext(Sample(), "rank 3"), "Forward");
  EXPECT_THAT(Message(status), testing::StartsWith("Forward: rank 3: rows: got 12"));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailOf(status).metadata, DetailOf(Sample()).metadata);
  EXPECT_EQ(DetailOf(status).violations, DetailOf(Sample()).violations);
  EXPECT_TRUE(WithContext(absl::OkStatus(), "x").ok());
}

TEST(ErrorTest, ContextOfAForeignStatusKeepsItsCode) {
  const absl::Status status = WithContext(absl::NotFoundError("file"), "open");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Message(status), "open: file");
}

TEST(ViolationsTest, AreReportedTogetherUnderTheFirstReason) {
  Violations violations;
  EXPECT_TRUE(violations.ToStatus("Forward").ok());
  EXPECT_TRUE(violations.empty());
  violations.Add(Reason::kShapeMismatch, "tokens.shape[1]", "got 12, need 16");
  violations.Add(Reason::kDtypeUnsupported, "topk_ids.dtype", "got DTYPE_F32");
  EXPECT_EQ(violations.size(), 2u);
  const absl::Status status = violations.ToStatus("Forward");
  EXPECT_EQ(Message(status),
            "Forward: tokens.shape[1]: got 12, need 16; topk_ids.dtype: got DTYPE_F32");
  EXPECT_EQ(ReasonOf(status), Reason::kShapeMismatch);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(status).violations.size(), 2u);
}

TEST(StatusEncodingTest, RoundTripsEveryReasonWithItsDetail) {
  for (Reason reason : AllReasons()) {
    const absl::Status status =
        Error(reason).Text(std::string("a\0b \xff", 5)).With("k", "").At("", "d");
    const absl::Status back = DecodeStatus(EncodeStatus(status));
    EXPECT_EQ(back.code(), status.code());
    EXPECT_EQ(Message(back), Message(status));
    EXPECT_EQ(ReasonOf(back), reason);
    EXPECT_EQ(DetailOf(back).metadata, DetailOf(status).metadata);
    EXPECT_EQ(DetailOf(back).violations, DetailOf(status).violations);
  }
  EXPECT_TRUE(DecodeStatus(EncodeStatus(absl::OkStatus())).ok());
}

TEST(StatusEncodingTest, AForeignStatusKeepsItsCode) {
  const absl::Status back = DecodeStatus(EncodeStatus(absl::NotFoundError("gone")));
  EXPECT_EQ(back.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Message(back), "gone");
}

TEST(StatusEncodingTest, EveryTruncationIsAnErrorAndNeverOk) {
  const std::string bytes = EncodeStatus(Sample());
  for (size_t size = 0; size < bytes.size(); ++size) {
    const absl::Status status = DecodeStatus(std::string_view(bytes).substr(0, size));
    EXPECT_EQ(ReasonOf(status), Reason::kInternal) << size;
  }
}

TEST(StatusEncodingTest, HugeCountsAreRefusedWithoutAllocating) {
  std::string bytes = EncodeStatus(Error(Reason::kInternal).Text("x"));
  bytes.replace(bytes.size() - 8, 4, "\xff\xff\xff\xff");  // the number of metadata entries
  EXPECT_THAT(Message(DecodeStatus(bytes)), HasSubstr("cannot be read"));
}

TEST(StatusEncodingTest, IsTotalOnRandomAndMutatedBytes) {
  const char* given = std::getenv("EXPERTD_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  SCOPED_TRACE("EXPERTD_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const std::string good = EncodeStatus(Sample());
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = i % 2 == 0 ? good : std::string(random() % 64, '\0');
    const size_t changes = i % 2 == 0 ? 1 + random() % 4 : bytes.size();
    for (size_t c = 0; c < changes && !bytes.empty(); ++c) {
      bytes[i % 2 == 0 ? random() % bytes.size() : c] = static_cast<char>(random());
    }
    const absl::Status status = DecodeStatus(bytes);
    DetailOf(WithContext(status, "again"));
    EXPECT_EQ(DecodeStatus(EncodeStatus(status)).ok(), status.ok());
  }
}

}  // namespace
}  // namespace expertd
