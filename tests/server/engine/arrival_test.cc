// Arrival records as bytes, and what every rank concludes from them.
#include "server/engine/arrival.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/server/engine/test_seed.h"

namespace expertd::engine {
namespace {

using testing::HasSubstr;

ArrivalRecord Sample() {
  ArrivalRecord record;
  record.epoch = 0x0102030405060708;
  record.sequence = 9;
  record.op = OpKind::kBackward;
  record.layer_fingerprint = UINT64_MAX;
  record.forward_sequence = 8;
  record.dtype = DType::kBF16;
  record.token_count = 17;
  record.gradients_valid = true;
  record.weights_version = 3;
  record.weights_lineage = 0x1122334455667788;
  record.accumulated_backwards = 4;
  record.arguments = {{"aux", "0.5"}, {"", ""}};
  return record;
}

void ExpectSame(const ArrivalRecord& a, const ArrivalRecord& b) {
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.sequence, b.sequence);
  EXPECT_EQ(a.op, b.op);
  EXPECT_EQ(a.layer_fingerprint, b.layer_fingerprint);
  EXPECT_EQ(a.forward_sequence, b.forward_sequence);
  EXPECT_EQ(a.dtype, b.dtype);
  EXPECT_EQ(a.token_count, b.token_count);
  EXPECT_EQ(a.gradients_valid, b.gradients_valid);
  EXPECT_EQ(a.weights_version, b.weights_version);
  EXPECT_EQ(a.weights_lineage, b.weights_lineage);
  EXPECT_EQ(a.accumulated_backwards, b.accumulated_backwards);
  EXPECT_EQ(a.arguments, b.arguments);
  EXPECT_EQ(a.status, b.status);
}

TEST(ArrivalEncodingTest, RoundTripsEveryMember) {
  ArrivalRecord record = Sample();
  ExpectSame(*DecodeArrival(EncodeArrival(record)), record);
  record.status = Error(Reason::kExpertIdRange).Text("x").At("topk_ids[0,1]", "got 9");
  record.gradients_valid = false;
  record.arguments.clear();
  ExpectSame(*DecodeArrival(EncodeArrival(record)), record);
}

TEST(ArrivalEncodingTest, RoundTripsEveryOperation) {
  for (int op = 1; op <= static_cast<int>(OpKind::kClearGradients); ++op) {
    ArrivalRecord record = Sample();
    record.op = static_cast<OpKind>(op);
    EXPECT_EQ(DecodeArrival(EncodeArrival(record))->op, record.op);
    EXPECT_NE(OpName(record.op), "Unknown");
  }
}

TEST(ArrivalEncodingTest, TruncatedAndImpossibleRecordsAreInternalErrors) {
  const std::string bytes = EncodeArrival(Sample());
  for (size_t size = 0; size < bytes.size(); ++size) {
    const auto record = DecodeArrival(bytes.substr(0, size));
    // A record whose status was cut off counts as a refusal, never as a go-ahead.
    if (record.ok()) {
      EXPECT_FALSE(record->status.ok()) << size;
    } else {
      EXPECT_EQ(ReasonOf(record.status()), Reason::kInternal) << size;
    }
  }
  for (const auto& [offset, value] : {std::pair(68, 0), std::pair(68, 15), std::pair(69, 99)}) {
    std::string bad = bytes;
    bad[static_cast<size_t>(offset)] = static_cast<char>(value);  // op, op, dtype
    EXPECT_EQ(ReasonOf(DecodeArrival(bad).status()), Reason::kInternal);
  }
  std::string bad = bytes;
  bad[72] = 'x';  // the first argument's length
  EXPECT_EQ(ReasonOf(DecodeArrival(bad).status()), Reason::kInternal);
}

TEST(ArrivalEncodingTest, NegativeCountsAreInternalErrors) {
  ArrivalRecord tokens = Sample();
  tokens.token_count = -1;
  ArrivalRecord backwards = Sample();
  backwards.accumulated_backwards = -1;
  for (const ArrivalRecord& record : {tokens, backwards}) {
    EXPECT_EQ(ReasonOf(DecodeArrival(EncodeArrival(record)).status()), Reason::kInternal);
  }
}

TEST(ArrivalEncodingTest, IsTotalOnRandomBytes) {
  TestSeed seed;
  SCOPED_TRACE(seed.Trace());
  const std::string good = EncodeArrival(Sample());
  for (int i = 0; i < 20000; ++i) {
    const auto record = DecodeArrival(i % 2 == 0 ? seed.Bytes(seed.Below(120)) : seed.Mutate(good));
    if (!record.ok()) {
      EXPECT_EQ(ReasonOf(record.status()), Reason::kInternal);
    }
  }
}

// Records of three ranks that agree.
std::vector<ArrivalRecord> Three(OpKind op = OpKind::kForward) {
  ArrivalRecord record = Sample();
  record.op = op;
  std::vector<ArrivalRecord> records(3, record);
  for (size_t rank = 0; rank < 3; ++rank) records[rank].token_count = static_cast<int64_t>(rank);
  return records;
}

// What all ranks conclude; fails unless all conclude the same.
absl::Status Common(const std::vector<ArrivalRecord>& records) {
  const absl::Status first = Conclude(records, 0);
  for (int64_t rank = 1; rank < static_cast<int64_t>(records.size()); ++rank) {
    EXPECT_EQ(Conclude(records, rank), first) << rank;
  }
  return first;
}

TEST(ConcludeTest, RecordsThatAgreeGoOnThoughTokenCountsDiffer) {
  EXPECT_TRUE(Common(Three()).ok());
  EXPECT_TRUE(Conclude({Sample()}, 0).ok());
}

TEST(ConcludeTest, ARefusalIsItsRanksOwnStatusAndPeerRejectedElsewhere) {
  std::vector<ArrivalRecord> records = Three();
  records[1].status = Error(Reason::kShapeMismatch).Text("tokens");
  EXPECT_EQ(Conclude(records, 1), records[1].status);
  for (int64_t rank : {0, 2}) {
    const absl::Status status = Conclude(records, rank);
    EXPECT_EQ(ReasonOf(status), Reason::kPeerRejected);
    EXPECT_EQ(std::string(status.message()), "rank 1 refused its request: SHAPE_MISMATCH: tokens");
  }
}

TEST(ConcludeTest, OfSeveralRefusalsTheFirstRankIsNamed) {
  std::vector<ArrivalRecord> records = Three();
  records[1].status = Error(Reason::kShapeMismatch).Text("a");
  records[2].status = Error(Reason::kTicketMemory).Text("b");
  EXPECT_EQ(Conclude(records, 2), records[2].status);
  EXPECT_THAT(std::string(Conclude(records, 0).message()), HasSubstr("rank 1"));
}

TEST(ConcludeTest, ARefusalComesBeforeEveryDisagreement) {
  std::vector<ArrivalRecord> records = Three();
  records[0].op = OpKind::kPrepare;
  records[1].gradients_valid = false;
  records[2].status = Error(Reason::kShapeMismatch).Text("a");
  EXPECT_EQ(ReasonOf(Conclude(records, 0)), Reason::kPeerRejected);
}

TEST(ConcludeTest, EveryDisagreementIsAConflictThatNamesRanksAndValues) {
  struct Case {
    std::string field, a, b;
    std::function<void(ArrivalRecord&)> change;
  };
  const std::vector<Case> cases = {
      {"operation", "Forward", "Prepare", [](auto& r) { r.op = OpKind::kPrepare; }},
      {"layer", "18446744073709551615", "4", [](auto& r) { r.layer_fingerprint = 4; }},
      {"forward_sequence", "8", "7", [](auto& r) { r.forward_sequence = 7; }},
      {"dtype", "DTYPE_BF16", "DTYPE_F32", [](auto& r) { r.dtype = DType::kF32; }},
      {"aux", "0.5", "0.25", [](auto& r) { r.arguments[0].value = "0.25"; }},
  };
  for (const Case& c : cases) {
    std::vector<ArrivalRecord> records = Three();
    c.change(records[2]);
    records[2].weights_version = 99;  // a conflict comes before differing versions
    const absl::Status status = Common(records);
    EXPECT_EQ(ReasonOf(status), Reason::kSequenceConflict) << c.field;
    EXPECT_THAT(DetailOf(status).metadata,
                testing::ElementsAre(testing::Pair("field", c.field), testing::Pair("rank_a", "0"),
                                     testing::Pair("value_a", c.a), testing::Pair("rank_b", "2"),
                                     testing::Pair("value_b", c.b)));
  }
}

TEST(ConcludeTest, ArgumentsThatOneRankLacksAreAConflict) {
  std::vector<ArrivalRecord> records = Three();
  records[1].arguments.pop_back();
  EXPECT_EQ(ReasonOf(Common(records)), Reason::kSequenceConflict);
}

TEST(ConcludeTest, InvalidGradientsOfAnyRankStopBackwardAndApplyOnly) {
  for (int op = 1; op <= static_cast<int>(OpKind::kClearGradients); ++op) {
    const OpKind kind = static_cast<OpKind>(op);
    std::vector<ArrivalRecord> records = Three(kind);
    records[1].gradients_valid = false;
    const absl::Status status = Common(records);
    if (kind == OpKind::kBackward || kind == OpKind::kApplyGradients) {
      EXPECT_EQ(ReasonOf(status), Reason::kGradientsInvalid);
      EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
    } else {
      EXPECT_TRUE(status.ok()) << OpName(kind) << status;
    }
  }
}

TEST(ConcludeTest, AccumulatorsOfDifferentBackwardsStopBackwardAndApplyOnly) {
  for (int op = 1; op <= static_cast<int>(OpKind::kClearGradients); ++op) {
    const OpKind kind = static_cast<OpKind>(op);
    std::vector<ArrivalRecord> records = Three(kind);
    records[1].accumulated_backwards = 5;
    const absl::Status status = Common(records);
    if (kind == OpKind::kBackward || kind == OpKind::kApplyGradients) {
      EXPECT_EQ(ReasonOf(status), Reason::kGradientsInvalid);
      EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 has 4, rank 1 has 5"));
    } else {
      EXPECT_TRUE(status.ok()) << OpName(kind) << status;
    }
  }
}

TEST(ConcludeTest, WeightsOfOneVersionFromDifferentSourcesStopTheirUsesOnly) {
  for (int op = 1; op <= static_cast<int>(OpKind::kClearGradients); ++op) {
    const OpKind kind = static_cast<OpKind>(op);
    std::vector<ArrivalRecord> records = Three(kind);
    records[2].weights_lineage = 5;
    const absl::Status status = Common(records);
    if (kind == OpKind::kForward || kind == OpKind::kBackward || kind == OpKind::kApplyGradients) {
      EXPECT_EQ(ReasonOf(status), Reason::kLayerNeedsRestore);
      EXPECT_THAT(std::string(status.message()), HasSubstr("different sources"));
    } else {
      EXPECT_TRUE(status.ok()) << OpName(kind) << status;
    }
  }
}

TEST(ConcludeTest, DifferingWeightsVersionsStopTheirUsesOnly) {
  for (int op = 1; op <= static_cast<int>(OpKind::kClearGradients); ++op) {
    const OpKind kind = static_cast<OpKind>(op);
    std::vector<ArrivalRecord> records = Three(kind);
    records[2].weights_version = 4;
    const absl::Status status = Common(records);
    if (kind == OpKind::kForward || kind == OpKind::kBackward || kind == OpKind::kApplyGradients) {
      EXPECT_EQ(ReasonOf(status), Reason::kLayerNeedsRestore);
      EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 has 3, rank 2 has 4"));
    } else {
      EXPECT_TRUE(status.ok()) << OpName(kind) << status;
    }
  }
}

}  // namespace
}  // namespace expertd::engine
