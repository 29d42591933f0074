// Sharding metadata: slices tile every tensor, every expert has one place, declared specs are
// checked.
#include "server/engine/sharding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "base/error.h"
#include "tests/server/engine/step_inputs.h"

namespace expertd::engine {
namespace {

using testing::HasSubstr;

// With every tensor that a layer can have; 24 experts divide by all worlds below.
LayerConfig FullLayer() {
  LayerConfig config = SmallLayer();
  config.expert_count = 24;
  config.gate_up_bias = true;
  config.down_bias = true;
  config.router.kind = RouterKind::kSigmoid;
  config.router.selection_bias = true;
  config.router_on_server = true;
  return WithDefaults(config);
}

ShardingMetadata Describe(int64_t world, const std::vector<int64_t>& tokens = {}) {
  std::vector<RankPlace> places;
  for (int64_t rank = 0; rank < world; ++rank) {
    places.push_back({rank + 10, "host" + std::to_string(rank), "cpu"});
  }
  auto metadata = DescribeSharding("layer", FullLayer(), SmallGroup(world), places, tokens);
  EXPECT_TRUE(metadata.ok()) << metadata.status();
  return *metadata;
}

std::vector<DeclaredSharding> DeclarationOf(const ShardingMetadata& metadata) {
  std::vector<DeclaredSharding> declared;
  for (const TensorSharding& tensor : metadata.tensors) {
    declared.push_back({tensor.name, tensor.global_shape, tensor.spec});
  }
  return declared;
}

class ShardingWorldTest : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ShardingWorldTest, testing::Values(1, 2, 3, 4, 8));

TEST_P(ShardingWorldTest, SlicesTileEveryGlobalShapeOnceOrCoverItEverywhere) {
  const int64_t world = GetParam();
  const ShardingMetadata metadata = Describe(world);
  std::set<std::string> names;
  for (const TensorSharding& tensor : metadata.tensors) {
    EXPECT_TRUE(names.insert(tensor.name).second);
    ASSERT_EQ(tensor.spec.size(), tensor.global_shape.size()) << tensor.name;
    ASSERT_EQ(tensor.shards.size(), static_cast<size_t>(world));
    int64_t next = 0;
    for (int64_t rank = 0; rank < world; ++rank) {
      const RankShard& shard = tensor.shards[static_cast<size_t>(rank)];
      EXPECT_EQ(shard.rank, rank);
      EXPECT_EQ(shard.slot, rank + 10);
      EXPECT_EQ(shard.host, "host" + std::to_string(rank));
      EXPECT_EQ(shard.device, "cpu");
      for (size_t d = 1; d < tensor.global_shape.size(); ++d) {
        EXPECT_EQ(shard.offsets[d], 0);
        EXPECT_EQ(shard.sizes[d], tensor.global_shape[d]);
        EXPECT_TRUE(tensor.spec[d].empty());
      }
      const bool split = !tensor.spec[0].empty();
      EXPECT_EQ(shard.offsets[0], split ? next : 0) << tensor.name;
      next = shard.offsets[0] + shard.sizes[0];
      if (!split) {
        EXPECT_EQ(shard.sizes, tensor.global_shape) << tensor.name;
      }
    }
    EXPECT_EQ(next, tensor.global_shape[0]) << tensor.name;
  }
  EXPECT_EQ(names, (std::set<std::string>{"gate_up", "down", "gate_up_bias", "down_bias", "router",
                                          "router_bias", "tokens", "output"}));
}

TEST_P(ShardingWorldTest, EveryExpertIsInExactlyOnePlace) {
  for (const TensorSharding& tensor : Describe(GetParam()).tensors) {
    std::vector<int64_t> ids;
    for (const RankShard& shard : tensor.shards) {
      ids.insert(ids.end(), shard.expert_ids.begin(), shard.expert_ids.end());
    }
    if (tensor.spec[0] != DimensionSpec{"ep"}) {
      EXPECT_TRUE(ids.empty()) << tensor.name;
      continue;
    }
    ASSERT_EQ(ids.size(), 24u) << tensor.name;
    for (int64_t e = 0; e < 24; ++e) EXPECT_EQ(ids[static_cast<size_t>(e)], e);
  }
}

TEST_P(ShardingWorldTest, WhatIsDescribedPassesTheCheck) {
  const ShardingMetadata metadata = Describe(GetParam());
  EXPECT_TRUE(CheckSharding(metadata, DeclarationOf(metadata)).ok());
}

TEST(ShardingTest, ShapesAndSpecsAreThePublicOnes) {
  const ShardingMetadata metadata = Describe(2);
  EXPECT_EQ(metadata.mesh.at(0).name, "dp");
  EXPECT_EQ(metadata.mesh.at(0).size, 1);
  EXPECT_EQ(metadata.mesh.at(1).name, "ep");
  EXPECT_EQ(metadata.mesh.at(1).size, 2);
  std::map<std::string, std::string> text;
  for (const TensorSharding& tensor : metadata.tensors) {
    std::string shape;
    for (int64_t size : tensor.global_shape) shape += std::to_string(size) + " ";
    text[tensor.name] = shape + SpecText(tensor.spec) + " " + std::string(DTypeName(tensor.dtype));
  }
  EXPECT_EQ(text["gate_up"], "24 8 8 [ep, -, -] DTYPE_F32");
  EXPECT_EQ(text["down"], "24 4 8 [ep, -, -] DTYPE_F32");
  EXPECT_EQ(text["gate_up_bias"], "24 8 [ep, -] DTYPE_F32");
  EXPECT_EQ(text["down_bias"], "24 8 [ep, -] DTYPE_F32");
  EXPECT_EQ(text["router"], "8 24 [-, -] DTYPE_F32");
  EXPECT_EQ(text["router_bias"], "24 [-] DTYPE_F32");
  EXPECT_EQ(text["tokens"], "32 8 [dp*ep, -] DTYPE_F32");
  EXPECT_EQ(text["output"], "32 8 [dp*ep, -] DTYPE_F32");
}

TEST(ShardingTest, TokensFollowTheCountsOfTheRanks) {
  const ShardingMetadata metadata = Describe(3, {5, 0, 16});
  const TensorSharding& tokens = metadata.tensors[metadata.tensors.size() - 2];
  EXPECT_EQ(tokens.global_shape[0], 21);
  EXPECT_EQ(tokens.shards[1].offsets[0], 5);
  EXPECT_EQ(tokens.shards[1].sizes[0], 0);
  EXPECT_EQ(tokens.shards[2].offsets[0], 5);
}

TEST(ShardingTest, WrongTokenCountsAreAllNamed) {
  const std::vector<RankPlace> places(2);
  const auto result =
      DescribeSharding("layer", FullLayer(), SmallGroup(2), places, {-1, 17, INT64_MAX});
  EXPECT_EQ(ReasonOf(result.status()), Reason::kConfigInvalid);
  std::vector<std::string> paths;
  for (const auto& violation : DetailOf(result.status()).violations)
    paths.push_back(violation.path);
  EXPECT_THAT(paths, testing::ElementsAre("tokens_per_rank", "tokens_per_rank[0]",
                                          "tokens_per_rank[1]", "tokens_per_rank[2]"));
}

class CheckShardingTest : public testing::Test {
 protected:
  // Expects a mismatch that names just this tensor and says `text`.
  void ExpectMismatch(const std::string& name, const std::string& text) {
    const absl::Status status = CheckSharding(metadata_, declared_);
    EXPECT_EQ(ReasonOf(status), Reason::kShardingMismatch) << status;
    const auto violations = DetailOf(status).violations;
    ASSERT_EQ(violations.size(), 1u) << status;
    EXPECT_EQ(violations[0].path, name);
    EXPECT_THAT(violations[0].description, HasSubstr(text));
  }

  const ShardingMetadata metadata_ = Describe(2);
  std::vector<DeclaredSharding> declared_ = DeclarationOf(metadata_);
};

TEST_F(CheckShardingTest, AMissingTensorIsNamedWithWhatItNeeds) {
  declared_.erase(declared_.begin());
  ExpectMismatch("gate_up", "got no spec, need shape [24,8,8] spec [ep, -, -]");
}

TEST_F(CheckShardingTest, AnUnknownTensorIsNamed) {
  declared_.push_back({"gate_upp", {1}, {{}}});
  ExpectMismatch("gate_upp", "need no such tensor");
  declared_.back().name.clear();
  ExpectMismatch("(unnamed)", "need no such tensor");
}

TEST_F(CheckShardingTest, AWrongSpecShowsBoth) {
  declared_[0].spec = {{"dp", "ep"}, {}, {}};
  ExpectMismatch("gate_up", "spec [dp*ep, -, -], need shape [24,8,8] spec [ep, -, -]");
}

TEST_F(CheckShardingTest, AxisOrderAndMissingDimensionsMatter) {
  declared_[6].spec = {{"ep", "dp"}, {}};
  ExpectMismatch("tokens", "spec [ep*dp, -]");
  declared_[6].spec = {{"dp", "ep"}};
  ExpectMismatch("tokens", "spec [dp*ep]");
}

TEST_F(CheckShardingTest, APerShardShapeWhereTheGlobalOneIsMeantIsRefused) {
  declared_[0].global_shape = {12, 8, 8};
  ExpectMismatch("gate_up", "got shape [12,8,8]");
}

TEST_F(CheckShardingTest, ATensorDeclaredTwiceIsRefusedEvenIfBothAreRight) {
  declared_.push_back(declared_[1]);
  ExpectMismatch("down", "more than one spec");
}

TEST_F(CheckShardingTest, AnEmptyDeclarationNamesEveryTensor) {
  const absl::Status status = CheckSharding(metadata_, {});
  EXPECT_EQ(DetailOf(status).violations.size(), metadata_.tensors.size());
}

}  // namespace
}  // namespace expertd::engine
