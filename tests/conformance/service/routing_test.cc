// All five operations under every kind of routing and shape, through the service.
#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tests/conformance/service/primitives.h"

namespace expertd::conformance {
namespace {

using reference::Routing;
using reference::TestRandom;

class Routes {
 public:
  explicit Routes(int64_t world) : world_(world) {}

  std::vector<int64_t> Same(int64_t tokens) const {
    return std::vector<int64_t>(static_cast<size_t>(world_), tokens);
  }
  // Keeps each id for which `keep` says so and makes the others -1.
  template <typename Keep>
  static Routing Filter(Routing ids, const Keep& keep) {
    for (auto& rank : ids) {
      for (int64_t& id : rank) id = keep(id) ? id : -1;
    }
    return ids;
  }

 private:
  const int64_t world_;
};

// One layer, one Prepare, every operation against the reference.
#define CHECK_ROUTING(c, ids, salt)                                          \
  do {                                                                       \
    const std::string checked_layer = MakeLayer(LayerOf(c));                 \
    Primitives checked(service(), checked_layer, c, ids);                    \
    if (checked.Prepare()) checked.CheckAll(salt);                           \
    ASSERT_FALSE(HasFailure()) << "the first routing that failed is enough"; \
  } while (false)

TEST_P(ServiceTest, TwoLayersInFlightDoNotTouchEachOther) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const PrimitiveCase first = {.experts = 2 * world(), .top_k = 2, .hidden = 8, .alignment = 4};
  const PrimitiveCase second = Fitted(
      *this,
      {.experts = 3 * world(), .top_k = 3, .hidden = 12, .alignment = 1, .dtype = v1::DTYPE_BF16});
  const std::vector<int64_t> tokens = Routes(world()).Same(6);
  Primitives a(service(), MakeLayer(LayerOf(first)), first,
               random.Ids(tokens, first.top_k, first.experts));
  Primitives b(service(), MakeLayer(LayerOf(second)), second,
               random.Ids(tokens, second.top_k, second.experts));
  ASSERT_TRUE(a.Prepare());
  ASSERT_TRUE(b.Prepare());
  b.CheckAll(10);
  a.CheckAll(20);
  b.CheckAll(30);
}

TEST_P(ServiceTest, TwoHandlesOfOneLayerAreIndependent) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const PrimitiveCase c = {.experts = 2 * world(), .top_k = 2};
  const std::string layer_id = MakeLayer(LayerOf(c));
  Primitives a(service(), layer_id, c, random.Ids(Routes(world()).Same(7), c.top_k, c.experts));
  Primitives b(service(), layer_id, c, random.Ids(Routes(world()).Same(3), c.top_k, c.experts));
  ASSERT_TRUE(a.Prepare());
  ASSERT_TRUE(b.Prepare());
  b.CheckAll(40);
  a.CheckAll(50);
}

TEST_P(ServiceTest, FewerTokensAfterMoreLeaveNothingBehind) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const PrimitiveCase c = {.experts = 3 * world(), .top_k = 2};
  const std::string layer_id = MakeLayer(LayerOf(c));
  for (const int64_t tokens : {32, 5, 1, 17}) {
    Primitives p(service(), layer_id, c,
                 random.Ids(Routes(world()).Same(tokens), c.top_k, c.experts));
    ASSERT_TRUE(p.Prepare());
    p.CheckAll(tokens);
    ASSERT_FALSE(HasFailure()) << tokens << " tokens";
  }
}

TEST_P(ServiceTest, RankWithoutTokensTakesPart) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const PrimitiveCase c = {.experts = 2 * world(), .top_k = 2};
  for (const int64_t empty : {int64_t{0}, world() - 1}) {
    std::vector<int64_t> tokens = Routes(world()).Same(4);
    tokens[static_cast<size_t>(empty)] = 0;
    CHECK_ROUTING(c, random.Ids(tokens, c.top_k, c.experts), 60 + empty);
  }
}

TEST_P(ServiceTest, NoTokensOnAnyRankIsAStep) {
  const PrimitiveCase c = {.experts = 2 * world(), .top_k = 2};
  CHECK_ROUTING(c, Routing(static_cast<size_t>(world())), 70);
}

TEST_P(ServiceTest, RankThatReceivesNothingTakesPart) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const PrimitiveCase c = {.experts = 3 * world(), .top_k = 3};
  for (const int64_t rank : {int64_t{0}, world() - 1}) {
    const auto elsewhere = [rank](int64_t id) { return id / 3 != rank; };
    CHECK_ROUTING(
        c, Routes::Filter(random.Ids(Routes(world()).Same(5), c.top_k, c.experts), elsewhere),
        80 + rank);
  }
}

TEST_P(ServiceTest, AllTokensMayGoToOneExpert) {
  const PrimitiveCase c = {.experts = 3 * world(), .top_k = 2, .alignment = 16};
  for (const int64_t expert : {int64_t{0}, c.experts - 1, c.experts / 2}) {
    Routing ids(static_cast<size_t>(world()), std::vector<int64_t>(2 * 9, -1));
    for (auto& rank : ids) {
      for (size_t t = 0; t < 9; ++t) rank[2 * t + t % 2] = expert;
    }
    CHECK_ROUTING(c, ids, 90 + expert);
  }
}

TEST_P(ServiceTest, TokensWithoutRoutesGiveZeros) {
  const PrimitiveCase c = {.experts = 2 * world(), .top_k = 2};
  Routing ids(static_cast<size_t>(world()), std::vector<int64_t>(2 * 5, -1));
  CHECK_ROUTING(c, ids, 100);
  ids.front()[3] = c.experts - 1;  // One route in the whole group.
  CHECK_ROUTING(c, ids, 110);
}

TEST_P(ServiceTest, TopKFromOneToSixteen) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const int64_t top_k : {1, 2, 3, 5, 8, 13, 16}) {
    SCOPED_TRACE(top_k);
    const PrimitiveCase c = {.experts = 16 * world(), .top_k = top_k, .dtype = v1::DTYPE_BF16};
    CHECK_ROUTING(c, random.Ids(Routes(world()).Same(4), top_k, c.experts), top_k);
  }
}

TEST_P(ServiceTest, TopKMayBeAllExperts) {
  const int64_t experts = 2 * world();
  const PrimitiveCase c = {.experts = experts, .top_k = experts, .dtype = v1::DTYPE_F16};
  Routing ids(static_cast<size_t>(world()));
  for (size_t rank = 0; rank < ids.size(); ++rank) {
    for (size_t t = 0; t < 5; ++t) {
      std::vector<int64_t> row(static_cast<size_t>(experts));
      std::iota(row.begin(), row.end(), 0);
      std::rotate(row.begin(), row.begin() + static_cast<int64_t>((rank + t) % row.size()),
                  row.end());
      ids[rank].insert(ids[rank].end(), row.begin(), row.end());
    }
  }
  CHECK_ROUTING(c, ids, 120);
}

TEST_P(ServiceTest, OddHiddenAndTokenCounts) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const int64_t hidden : {1, 3, 7, 33, 95}) {
    SCOPED_TRACE(hidden);
    std::vector<int64_t> tokens;
    for (int64_t rank = 0; rank < world(); ++rank) tokens.push_back(1 + 2 * ((rank * 5) % 7));
    const v1::DType dtype = hidden % 2 == 1 && hidden > 3 ? v1::DTYPE_BF16 : v1::DTYPE_F32;
    const PrimitiveCase c = Fitted(
        *this,
        {.experts = 3 * world(), .top_k = 2, .hidden = hidden, .alignment = 2, .dtype = dtype});
    CHECK_ROUTING(c, random.Ids(tokens, c.top_k, c.experts), hidden);
  }
}

TEST_P(ServiceTest, ExpertsPerRankOneThreeAndSixtyFour) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const int64_t local : {1, 3, 64}) {
    SCOPED_TRACE(local);
    const PrimitiveCase c = {.experts = local * world(),
                             .top_k = std::min<int64_t>(4, local * world())};
    CHECK_ROUTING(c, random.Ids(Routes(world()).Same(11), c.top_k, c.experts), local);
  }
}

TEST_P(ServiceTest, MostTokensThatTheGroupAllows) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const PrimitiveCase c = {
      .experts = 2 * world(), .top_k = 2, .hidden = 96, .alignment = 1, .dtype = v1::DTYPE_F32};
  CHECK_ROUTING(
      c, random.Ids(Routes(world()).Same(DefaultGroup().max_tokens_per_rank()), c.top_k, c.experts),
      130);
}

TEST_P(ServiceTest, NarrowIdsMeanTheSameAsWideOnes) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  const PrimitiveCase c = {.experts = 3 * world(), .top_k = 2};
  const std::string layer_id = MakeLayer(LayerOf(c));
  const Routing ids = random.Ids(Routes(world()).Same(6), c.top_k, c.experts);
  Primitives p(service(), layer_id, c, ids);
  ASSERT_TRUE(p.Prepare());
  std::vector<v1::PrepareRequest> requests;
  for (const auto& rank : ids) {
    const std::vector<int32_t> narrow(rank.begin(), rank.end());
    requests.emplace_back().set_layer_id(layer_id);
    *requests.back().mutable_topk_ids() = client::Int32Tensor({6, c.top_k}, narrow);
  }
  const auto responses = Run(std::move(requests));
  ASSERT_EQ(responses.size(), ids.size());
  for (size_t rank = 0; rank < responses.size(); ++rank) {
    const auto& counts = responses[rank].tokens_per_expert();
    EXPECT_EQ(std::vector<int64_t>(counts.begin(), counts.end()),
              p.layout().ranks[rank].tokens_per_expert);
  }
}

}  // namespace
}  // namespace expertd::conformance
