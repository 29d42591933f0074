// Routing arithmetic against a brute force, for world sizes up to 72, and validation of ids.
#include "kernels/ep/ep_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "base/error.h"
#include "kernels/ep/route_lists.h"

namespace expertd {
namespace {

using testing::HasSubstr;

// Ids of all ranks: [world][T * K].
struct Case {
  int64_t world;
  int64_t experts;
  int64_t top_k;
  std::vector<std::vector<int64_t>> ids;

  RoutingView View(int64_t rank) const {
    const auto& own = ids[static_cast<size_t>(rank)];
    return {own.data(), DType::kI64, static_cast<int64_t>(own.size()) / top_k, top_k};
  }
};

Case RandomCase(int64_t world, int64_t local, int64_t top_k, int64_t max_tokens, uint32_t seed) {
  std::mt19937 random(seed);
  Case made = {world, world * local, std::min(top_k, world * local), {}};
  for (int64_t rank = 0; rank < world; ++rank) {
    std::vector<int64_t> ids;
    const int64_t tokens = static_cast<int64_t>(random()) % (max_tokens + 1);
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<int64_t> all(static_cast<size_t>(made.experts));
      for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int64_t>(e);
      std::shuffle(all.begin(), all.end(), random);
      for (int64_t k = 0; k < made.top_k; ++k) {
        ids.push_back(random() % 5 == 0 ? -1 : all[static_cast<size_t>(k)]);
      }
    }
    made.ids.push_back(std::move(ids));
  }
  return made;
}

std::vector<int64_t> CountAll(const Case& c) {
  std::vector<int64_t> counts(static_cast<size_t>(c.world * c.experts));
  for (int64_t rank = 0; rank < c.world; ++rank) {
    CountRoutes(c.View(rank), std::span(counts).subspan(static_cast<size_t>(rank * c.experts),
                                                        static_cast<size_t>(c.experts)));
  }
  return counts;
}

// Walks the routes in the order of SEMANTICS and compares every slot.
void ExpectSlots(const Case& c, const EpLayoutConfig& config, const EpLayout& layout) {
  const int64_t local = c.experts / c.world;
  const int64_t limit = config.policy == CapacityPolicy::kDrop
                            ? config.capacity / (local * config.alignment) * config.alignment
                            : std::numeric_limits<int64_t>::max();
  std::vector<std::vector<int64_t>> slots;
  for (int64_t rank = 0; rank < c.world; ++rank) {
    slots.emplace_back(c.ids[static_cast<size_t>(rank)].size());
    AssignSlots(c.View(rank), layout, rank, slots.back());
  }
  for (int64_t owner = 0; owner < c.world; ++owner) {
    const RecvCounts counts = layout.CountsOf(owner);
    int64_t base = 0;
    for (int64_t j = 0; j < local; ++j) {
      int64_t kept = 0;
      int64_t dropped = 0;
      for (int64_t rank = 0; rank < c.world; ++rank) {
        const auto& ids = c.ids[static_cast<size_t>(rank)];
        for (size_t i = 0; i < ids.size(); ++i) {
          if (ids[i] != owner * local + j) continue;
          const int64_t slot = slots[static_cast<size_t>(rank)][i];
          ASSERT_EQ(slot, kept < limit ? base + kept : kDroppedRoute);
          ++(kept < limit ? kept : dropped);
        }
      }
      const auto at = static_cast<size_t>(j);
      ASSERT_EQ(layout.Base(owner * local + j), base);
      ASSERT_EQ(counts.tokens_per_expert[at], kept);
      ASSERT_EQ(counts.dropped_per_expert[at], dropped);
      ASSERT_EQ(counts.padded_per_expert[at],
                (kept + config.alignment - 1) / config.alignment * config.alignment);
      base += counts.padded_per_expert[at];
    }
    ASSERT_EQ(counts.total, base);
    ASSERT_EQ(layout.Total(owner), base);
  }
}

class Worlds : public testing::TestWithParam<int64_t> {};

TEST_P(Worlds, SlotsFollowSourceThenTokenWithoutDrops) {
  for (int64_t local : {1, 3, 8}) {
    for (int64_t alignment : {1, 8, 128}) {
      const Case c = RandomCase(GetParam(), local, 4, 9, static_cast<uint32_t>(local * alignment));
      const EpLayoutConfig config = {c.world, c.experts, alignment, 1 << 20,
                                     CapacityPolicy::kRefuse};
      auto layout = EpLayout::Create(config, CountAll(c));
      ASSERT_TRUE(layout.ok()) << layout.status();
      ExpectSlots(c, config, *layout);
    }
  }
}

TEST_P(Worlds, DropsLeaveTheFirstRowsOfEachExpert) {
  for (int64_t capacity : {0, 7, 24, 50, 1000}) {
    const Case c = RandomCase(GetParam(), 3, 2, 20, static_cast<uint32_t>(capacity));
    const EpLayoutConfig config = {c.world, c.experts, 4, capacity, CapacityPolicy::kDrop};
    auto layout = EpLayout::Create(config, CountAll(c));
    ASSERT_TRUE(layout.ok()) << layout.status();
    ExpectSlots(c, config, *layout);
    for (int64_t rank = 0; rank < c.world; ++rank) EXPECT_LE(layout->Total(rank), capacity);
  }
}

TEST_P(Worlds, RouteListsCarryEachTokenOncePerRank) {
  const Case c = RandomCase(GetParam(), 4, 6, 15, 77);
  auto layout = EpLayout::Create({c.world, c.experts, 4, 1 << 20}, CountAll(c));
  ASSERT_TRUE(layout.ok());
  for (int64_t source = 0; source < c.world; ++source) {
    const auto& ids = c.ids[static_cast<size_t>(source)];
    std::vector<int64_t> slots(ids.size());
    AssignSlots(c.View(source), *layout, source, slots);
    const std::vector<RouteList> lists = BuildRouteLists(c.View(source), *layout, slots);
    size_t routes = 0;
    for (int64_t target = 0; target < c.world; ++target) {
      const RouteList& list = lists[static_cast<size_t>(target)];
      ASSERT_EQ(static_cast<int64_t>(list.routes.size()), layout->KeptBetween(source, target));
      ASSERT_TRUE(std::is_sorted(list.tokens.begin(), list.tokens.end()));
      ASSERT_EQ(std::adjacent_find(list.tokens.begin(), list.tokens.end()), list.tokens.end());
      for (size_t i = 0; i < list.routes.size(); ++i) {
        const auto position = static_cast<size_t>(list.positions[i]);
        ASSERT_EQ(list.routes[i].slot, slots[position]);
        ASSERT_EQ(layout->OwnerOf(ids[position]), target);
        ASSERT_EQ(list.tokens[static_cast<size_t>(list.routes[i].row)],
                  list.positions[i] / c.top_k);
      }
      auto rows = CheckedRows(list.routes, layout->Total(target));
      ASSERT_TRUE(rows.ok());
      ASSERT_EQ(*rows, list.rows());
      routes += list.routes.size();
    }
    ASSERT_EQ(routes, ids.size() - static_cast<size_t>(std::count(ids.begin(), ids.end(), -1)));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Worlds, testing::Values(1, 2, 3, 8, 72));

TEST(EpLayout, RefusalNamesTheFullestRankRowsAndLimit) {
  // Two ranks, one expert each; rank 1 gets 3 + 6 rows, padded to 16.
  const std::vector<int64_t> counts = {1, 3, 0, 6};
  const absl::Status status =
      EpLayout::Create({2, 2, 8, 15, CapacityPolicy::kRefuse}, counts).status();
  EXPECT_TRUE(HasReason(status, Reason::kRecvCapacity));
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 would receive 16 rows"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("at most 15"));
  EXPECT_TRUE(EpLayout::Create({2, 2, 8, 16, CapacityPolicy::kRefuse}, counts).ok());
}

TEST(ValidateIds, AcceptsHolesAndBothWidths) {
  const std::vector<int64_t> wide = {0, -1, 3, 2, -1, -1};
  const std::vector<int32_t> narrow(wide.begin(), wide.end());
  EXPECT_TRUE(ValidateIds({wide.data(), DType::kI64, 3, 2}, 4).ok());
  EXPECT_TRUE(ValidateIds({narrow.data(), DType::kI32, 3, 2}, 4).ok());
  EXPECT_TRUE(ValidateIds({nullptr, DType::kI32, 0, 2}, 4).ok());
}

TEST(ValidateIds, NamesThePositionOfAnIdOutOfRange) {
  for (int64_t bad : {int64_t{4}, int64_t{-2}, std::numeric_limits<int64_t>::max(),
                      std::numeric_limits<int64_t>::min()}) {
    const std::vector<int64_t> ids = {0, 1, 2, bad};
    const absl::Status status = ValidateIds({ids.data(), DType::kI64, 2, 2}, 4);
    EXPECT_TRUE(HasReason(status, Reason::kExpertIdRange)) << status;
    const ErrorDetail detail = DetailOf(status);
    ASSERT_EQ(detail.violations.size(), 1u);
    EXPECT_EQ(detail.violations[0].path, "topk_ids[1,1]");
    EXPECT_THAT(std::string(status.message()), HasSubstr("topk_ids[1,1]"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("need -1 to 3"));
  }
}

TEST(ValidateIds, NamesThePositionOfARepeatedExpert) {
  const std::vector<int64_t> ids = {2, 1, 0, 3, 1, 3};
  const absl::Status status = ValidateIds({ids.data(), DType::kI64, 2, 3}, 4);
  EXPECT_TRUE(HasReason(status, Reason::kDuplicateExpert)) << status;
  EXPECT_EQ(DetailOf(status).violations[0].path, "topk_ids[1,2]");
}

TEST(ValidateIds, ReportsAtMostSixteenViolations) {
  const std::vector<int32_t> ids(1000, 99);
  const absl::Status status = ValidateIds({ids.data(), DType::kI32, 1000, 1}, 4);
  EXPECT_EQ(DetailOf(status).violations.size(), 16u);
}

TEST(ValidateIds, RefusesOtherDtypes) {
  const float ids[] = {0};
  EXPECT_TRUE(HasReason(ValidateIds({ids, DType::kF32, 1, 1}, 4), Reason::kDtypeUnsupported));
}

TEST(CheckedRows, RefusesListsThatCannotBeRight) {
  const auto check = [](std::vector<WireRoute> routes) { return CheckedRows(routes, 4); };
  EXPECT_EQ(*check({}), 0);
  EXPECT_EQ(*check({{0, 1}, {0, 3}, {1, 0}}), 2);
  EXPECT_FALSE(check({{1, 0}}).ok()) << "must start at row 0";
  EXPECT_FALSE(check({{0, 0}, {2, 1}}).ok()) << "no gap";
  EXPECT_FALSE(check({{0, 4}}).ok()) << "slot past the total";
  EXPECT_FALSE(check({{0, -1}}).ok());
  EXPECT_FALSE(check({{-1, 0}}).ok());
}

}  // namespace
}  // namespace expertd
