// What ranks conclude from each other's records.
#include "kernels/ep/route_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "base/error.h"

namespace expertd {
namespace {

using Record = std::array<int32_t, kRecordHeader>;

Record Good() { return {kNoBadRoute, 0, 16, 4, 128, 100}; }

absl::Status Judge(const Record& own, const Record& peer) {
  const int32_t* const records[] = {own.data(), peer.data()};
  return JudgePeers(records, 0);
}

TEST(RouteRecordTest, AgreeingRecordsAreGood) {
  Record peer = Good();
  peer[kRecordTokens] = 7;  // token counts may differ
  EXPECT_TRUE(Judge(Good(), peer).ok());
}

TEST(RouteRecordTest, ARefusedInputIsNamedBeforeADifferenceThatComesFromIt) {
  Record peer = Good();
  peer[kRecordReject] = 1 + static_cast<int32_t>(Reason::kShapeMismatch);
  peer[kRecordTopK] = 1;
  const absl::Status status = Judge(Good(), peer);
  EXPECT_TRUE(HasReason(status, Reason::kPeerRejected)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("rank 1"));
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("SHAPE_MISMATCH"));
}

TEST(RouteRecordTest, DifferentArgumentsConflict) {
  for (int field : {kRecordExperts, kRecordTopK, kRecordAlignment}) {
    Record peer = Good();
    peer[static_cast<size_t>(field)] = 2;
    EXPECT_TRUE(HasReason(Judge(Good(), peer), Reason::kSequenceConflict));
  }
}

TEST(RouteRecordTest, ABadIdIsNamedWithItsPlace) {
  Record peer = Good();
  peer[kRecordBadRoute] = 2 * (3 * 4 + 1) + 1;  // token 3, k 1, a duplicate
  const absl::Status status = Judge(Good(), peer);
  EXPECT_TRUE(HasReason(status, Reason::kPeerRejected)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("topk_ids[3,1]"));
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("DUPLICATE_EXPERT"));
}

}  // namespace
}  // namespace expertd
