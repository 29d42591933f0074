// Decisions of backend nccl_lsa: limits, tags, and how blocks share an operation's rows.
#include "kernels/ep/lsa_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"

namespace expertd {
namespace {

EpGroupConfig GoodConfig() {
  return {.world = 8,
          .max_tokens_per_rank = 8192,
          .max_recv_rows = 1 << 20,
          .max_hidden = 7168,
          .max_top_k = 8,
          .max_experts = 256};
}

TEST(LsaPlanTest, LimitsNameEveryValueOutOfRange) {
  EXPECT_TRUE(CheckLsaConfig(GoodConfig()).ok());
  EpGroupConfig config = GoodConfig();
  config.world = 73;
  config.max_top_k = 65;
  config.max_experts = 5000;
  const absl::Status status = CheckLsaConfig(config);
  EXPECT_TRUE(HasReason(status, Reason::kConfigInvalid));
  EXPECT_EQ(DetailOf(status).violations.size(), 3u);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("got 73, need 1 to 72"));
}

TEST(LsaPlanTest, TagsGrowWithSequenceAndOrdinalAndNeverUseTheLeftBit) {
  for (uint64_t epoch : {uint64_t{0}, uint64_t{1}, uint64_t{1790000000000}}) {
    uint64_t last = 0;
    for (uint64_t sequence : {1u, 2u, 3u, 70000u, 4000000000u}) {
      for (uint64_t ordinal : {uint64_t{1}, uint64_t{2}, kLsaMaxOrdinal - 1}) {
        const uint64_t tag = LsaTag(epoch, sequence, ordinal);
        EXPECT_GT(tag, last);
        EXPECT_EQ(tag & kLsaLeft, 0u);
        last = tag;
      }
    }
  }
  EXPECT_NE(LsaTag(1, 5, 1), LsaTag(2, 5, 1));
}

TEST(LsaPlanTest, BothRolesHaveBlocksWithinTheBudget) {
  for (int64_t world : {1, 2, 8}) {
    for (int64_t tokens : {0, 1, 128, 256, 257, 8192}) {
      for (int64_t budget : {0, 1, 2, 24, 132, 500}) {
        const LsaWork work = {
            .tokens = tokens, .world = world, .multiprocessors = 132, .budget = budget};
        for (const LsaShape& shape : {ScatterShape(work), GatherShape(work)}) {
          EXPECT_GE(shape.blocks, 1);
          EXPECT_LE(shape.blocks, budget == 0 ? 132 : std::min<int64_t>(budget, 132));
          EXPECT_TRUE(shape.team_warps == 1 || shape.team_warps == 8 || shape.team_warps == 4);
          EXPECT_EQ(shape.push_blocks > 0, world > 1);
          EXPECT_LT(shape.rest_begin(), shape.blocks);
          EXPECT_LE(shape.push_blocks, std::max(shape.blocks / 2, 1));
        }
      }
    }
  }
}

TEST(LsaPlanTest, FewTokensGetManyWarpsEach) {
  LsaWork work = {.tokens = 256, .world = 2, .multiprocessors = 132};
  EXPECT_EQ(ScatterShape(work).team_warps, 8);
  EXPECT_EQ(GatherShape(work).team_warps, 8);
  work.tokens = 257;
  EXPECT_EQ(ScatterShape(work).team_warps, 1);
  EXPECT_EQ(GatherShape(work).team_warps, 1);
  work.row_bytes = 14336;
  EXPECT_EQ(ScatterShape(work).team_warps, 4);
}

}  // namespace
}  // namespace expertd
