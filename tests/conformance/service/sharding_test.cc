// Where shards live, as GetShardingMetadata tells it, and what CheckSharding refuses.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "base/error.h"
#include "tests/conformance/service/service_test.h"

namespace expertd::conformance {
namespace {

v1::LayerConfig LayerWithEverything() {
  v1::LayerConfig config = SmallLayer(24, 2, 8, 4);
  config.set_gate_up_bias(true);
  config.set_down_bias(true);
  config.mutable_router()->set_kind(v1::ROUTER_KIND_SIGMOID);
  config.mutable_router()->set_on_server(true);
  config.mutable_router()->set_selection_bias(true);
  return config;
}

// 3, 4, 5, 3, ... tokens, so that slices differ.
std::vector<int64_t> Tokens(int64_t world) {
  std::vector<int64_t> tokens;
  for (int64_t rank = 0; rank < world; ++rank) tokens.push_back(3 + rank % 3);
  return tokens;
}

v1::GetShardingMetadataResponse Describe(ServiceTest& test, int64_t rank,
                                         const std::string& layer_id) {
  v1::GetShardingMetadataRequest request;
  request.set_layer_id(layer_id);
  for (const int64_t tokens : Tokens(test.world())) request.add_tokens_per_rank(tokens);
  const auto response = test.service().rank(rank).Call(request, testing::Soon());
  EXPECT_TRUE(response.ok()) << response.status();
  return response.ok() ? *response : v1::GetShardingMetadataResponse();
}

v1::CheckShardingRequest Declare(const v1::GetShardingMetadataResponse& sharding, int64_t world) {
  v1::CheckShardingRequest request;
  request.set_layer_id(sharding.layer_id());
  for (const int64_t tokens : Tokens(world)) request.add_tokens_per_rank(tokens);
  for (const v1::TensorSharding& tensor : sharding.tensors()) {
    v1::DeclaredSharding& declared = *request.add_tensors();
    declared.set_name(tensor.name());
    *declared.mutable_global_shape() = tensor.global_shape();
    *declared.mutable_spec() = tensor.spec();
  }
  return request;
}

bool IsSplit(const v1::TensorSharding& tensor) {
  return std::ranges::any_of(tensor.spec(), [](const auto& d) { return d.axes_size() > 0; });
}

// How often the slices cover each element of the global shape. REQUIRES: slices inside it.
std::vector<int> Coverage(const v1::TensorSharding& tensor) {
  int64_t size = 1;
  for (const int64_t extent : tensor.global_shape()) size *= extent;
  std::vector<int> covered(static_cast<size_t>(size), 0);
  for (const v1::RankShard& shard : tensor.shards()) {
    for (int64_t flat = 0; flat < size; ++flat) {
      int64_t rest = flat;
      bool inside = true;
      for (int d = tensor.global_shape_size() - 1; d >= 0; --d) {
        const int64_t index = rest % tensor.global_shape(d);
        rest /= tensor.global_shape(d);
        inside = inside && index >= shard.slice().offsets(d) &&
                 index < shard.slice().offsets(d) + shard.slice().sizes(d);
      }
      covered[static_cast<size_t>(flat)] += inside ? 1 : 0;
    }
  }
  return covered;
}

TEST_P(ServiceTest, SlicesTileEachGlobalShape) {
  const std::string layer_id = MakeLayer(LayerWithEverything(), 1);
  const v1::GetShardingMetadataResponse sharding = Describe(*this, 0, layer_id);
  ASSERT_EQ(sharding.mesh_size(), 2);
  EXPECT_EQ(sharding.mesh(0).name(), "dp");
  EXPECT_EQ(sharding.mesh(0).size(), 1);
  EXPECT_EQ(sharding.mesh(1).name(), "ep");
  EXPECT_EQ(sharding.mesh(1).size(), world());
  ASSERT_EQ(sharding.tensors_size(), 8) << sharding.DebugString();
  for (const v1::TensorSharding& tensor : sharding.tensors()) {
    SCOPED_TRACE(tensor.name());
    ASSERT_EQ(tensor.spec_size(), tensor.global_shape_size());
    ASSERT_EQ(tensor.shards_size(), world());
    for (int64_t rank = 0; rank < world(); ++rank) {
      const v1::RankShard& shard = tensor.shards(static_cast<int>(rank));
      EXPECT_EQ(shard.rank(), rank);
      EXPECT_EQ(shard.slot(), rank);
      EXPECT_FALSE(shard.host().empty());
      EXPECT_FALSE(shard.device().empty());
      ASSERT_EQ(shard.slice().offsets_size(), tensor.global_shape_size());
      for (int d = 0; d < tensor.global_shape_size(); ++d) {
        EXPECT_GE(shard.slice().offsets(d), 0);
        EXPECT_LE(shard.slice().offsets(d) + shard.slice().sizes(d), tensor.global_shape(d));
      }
    }
    // Split tensors are covered once, replicated ones by every rank.
    const int copies = IsSplit(tensor) ? 1 : static_cast<int>(world());
    const std::vector<int> coverage = Coverage(tensor);
    EXPECT_TRUE(std::ranges::all_of(coverage, [&](int n) { return n == copies; }));
  }
}

TEST_P(ServiceTest, EveryExpertLivesInExactlyOnePlace) {
  const std::string layer_id = MakeLayer(LayerWithEverything(), 1);
  const v1::GetShardingMetadataResponse sharding = Describe(*this, 0, layer_id);
  ASSERT_GT(sharding.tensors_size(), 0);
  for (const v1::TensorSharding& tensor : sharding.tensors()) {
    if (tensor.shards_size() == 0 || tensor.shards(0).expert_ids_size() == 0) continue;
    SCOPED_TRACE(tensor.name());
    std::vector<int> places(24, 0);
    for (const v1::RankShard& shard : tensor.shards()) {
      for (int i = 0; i < shard.expert_ids_size(); ++i) {
        EXPECT_EQ(shard.expert_ids(i), shard.slice().offsets(0) + i);
        ++places.at(static_cast<size_t>(shard.expert_ids(i)));
      }
      EXPECT_EQ(shard.expert_ids_size(), shard.slice().sizes(0));
    }
    EXPECT_TRUE(std::ranges::all_of(places, [](int n) { return n == 1; }));
  }
}

TEST_P(ServiceTest, ParameterShardsAreWhereTheMetadataSays) {
  const std::string layer_id = MakeLayer(LayerWithEverything(), 1);
  const v1::GetShardingMetadataResponse sharding = Describe(*this, 0, layer_id);
  for (const v1::TensorSharding& tensor : sharding.tensors()) {
    if (tensor.name() == "tokens" || tensor.name() == "output") continue;
    SCOPED_TRACE(tensor.name());
    for (int64_t rank = 0; rank < world(); ++rank) {
      const auto shard = service().Shard(rank, layer_id, tensor.name(), v1::PARAMETER_KIND_COMPUTE);
      ASSERT_OK(shard);
      const v1::Slice& want = tensor.shards(static_cast<int>(rank)).slice();
      EXPECT_EQ(shard->slice.ShortDebugString(), want.ShortDebugString());
      EXPECT_TRUE(std::ranges::equal(shard->tensor.shape(), want.sizes()));
      EXPECT_EQ(shard->tensor.dtype(), tensor.dtype());
    }
  }
}

TEST_P(ServiceTest, EveryRankDescribesTheSameSharding) {
  const std::string layer_id = MakeLayer(LayerWithEverything(), 1);
  const std::string first = Describe(*this, 0, layer_id).DebugString();
  for (int64_t rank = 1; rank < world(); ++rank) {
    EXPECT_EQ(Describe(*this, rank, layer_id).DebugString(), first) << "rank " << rank;
  }
}

TEST_P(ServiceTest, DeclaredShardingThatMatchesIsAccepted) {
  const std::string layer_id = MakeLayer(LayerWithEverything(), 1);
  const auto sharding = Describe(*this, world() - 1, layer_id);
  ASSERT_OK(service().rank(0).Call(Declare(sharding, world()), testing::Soon()));
}

// Each way to declare a tensor wrongly is refused, and the error names the tensor.
TEST_P(ServiceTest, DeclaredShardingThatDiffersIsRefusedByName) {
  const std::string layer_id = MakeLayer(LayerWithEverything(), 1);
  const auto sharding = Describe(*this, 0, layer_id);
  ASSERT_GT(sharding.tensors_size(), 0);
  using Spoil = void (*)(v1::CheckShardingRequest&, int);
  const Spoil spoils[] = {
      [](v1::CheckShardingRequest& r, int i) { r.mutable_tensors()->DeleteSubrange(i, 1); },
      [](v1::CheckShardingRequest& r, int i) { r.mutable_tensors(i)->clear_spec(); },
      [](v1::CheckShardingRequest& r, int i) {
        r.mutable_tensors(i)->mutable_spec(0)->add_axes("dp");
      },
      [](v1::CheckShardingRequest& r, int i) {
        // A shard's size where the global one was meant, or the reverse.
        r.mutable_tensors(i)->set_global_shape(0, r.tensors(i).global_shape(0) * 2);
      },
  };
  for (const Spoil spoil : spoils) {
    for (int i = 0; i < sharding.tensors_size(); ++i) {
      v1::CheckShardingRequest request = Declare(sharding, world());
      spoil(request, i);
      const absl::Status status = service().rank(0).Call(request, testing::Soon()).status();
      const std::string& name = sharding.tensors(i).name();
      EXPECT_TRUE(HasReason(status, Reason::kShardingMismatch)) << name << ": " << status;
      const auto violations = DetailOf(status).violations;
      ASSERT_EQ(violations.size(), 1u) << name << ": " << status;
      EXPECT_EQ(violations[0].path, name);
      EXPECT_TRUE(absl::StrContains(violations[0].description, "need"))
          << violations[0].description;
    }
  }
  v1::CheckShardingRequest request = Declare(sharding, world());
  request.add_tensors()->set_name("no such tensor");
  EXPECT_TRUE(HasReason(service().rank(0).Call(request, testing::Soon()).status(),
                        Reason::kShardingMismatch));
}

}  // namespace
}  // namespace expertd::conformance
