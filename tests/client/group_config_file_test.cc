// Tests of the group file, of sizes from configs, and of JSON reports.
#include "client/cpp/group_config_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "client/cpp/channel.h"
#include "client/cpp/json.h"
#include "client/cpp/report.h"
#include "expertd/v1/control_service.pb.h"

namespace expertd::client {
namespace {

using ::testing::HasSubstr;

constexpr char kGood[] = R"(
hosts: "10.0.0.1:7070"
hosts: "10.0.0.2:7070"
group_id: "demo"
config { max_tokens_per_rank: 256 max_hidden: 128 max_top_k: 2 max_experts: 8
         max_token_dtype: DTYPE_BF16 }
layers { layer_id: "a" config { expert_count: 8 hidden: 128 intermediate: 256 top_k: 2
                                optimizer { kind: OPTIMIZER_KIND_SGD momentum: 0.9 } } seed: 4 }
)";

TEST(GroupFileTest, Reads) {
  const auto file = ParseGroupFile(kGood, "x");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->hosts_size(), 2);
  EXPECT_EQ(file->config().max_token_dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(file->layers(0).seed(), 4u);
}

TEST(GroupFileTest, EveryProblemIsReportedWithItsPlace) {
  const absl::Status status =
      ParseGroupFile("hosts: \"nowhere\"\nlayers { }\nlayers { }\ngroup: 3\n", "g.textproto")
          .status();
  EXPECT_EQ(ReasonOf(status), Reason::kConfigInvalid);
  const std::string text(status.message());
  EXPECT_THAT(text, HasSubstr("g.textproto:4:"));
  EXPECT_THAT(text, HasSubstr("hosts[0]"));
  EXPECT_THAT(text, HasSubstr("layers[0].layer_id"));
  EXPECT_THAT(text, HasSubstr("layers[1].layer_id"));
}

TEST(GroupFileTest, AMissingFileIsNamed) {
  const absl::Status status = ReadGroupFile("/no/such/file").status();
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("/no/such/file"));
}

TEST(SizesTest, AnEpSizeOfZeroMeansTheHosts) {
  const auto file = ParseGroupFile(kGood, "x");
  const GroupSizes sizes = SizesOf(file->config(), 2);
  EXPECT_EQ(sizes.ranks, 2);
  EXPECT_EQ(sizes.token_bytes, 2);
  const LayerSizes layer = SizesOf(file->layers(0).config());
  EXPECT_EQ(layer.optimizer_states, 1);
  EXPECT_EQ(layer.alignment, 1);
}

TEST(CheckAddressTest, WantsHostAndPort) {
  EXPECT_TRUE(CheckAddress("a:1").ok());
  EXPECT_TRUE(CheckAddress("[::1]:65535").ok());
  for (const char* bad : {"", "a", ":1", "a:", "a:0", "a:65536", "a:x"}) {
    EXPECT_FALSE(CheckAddress(bad).ok()) << bad;
  }
}

TEST(MessageLimitTest, TwiceTheGroupsMaximumWithoutOverflow) {
  EXPECT_EQ(MessageLimit(64 << 20), 128 << 20);
  EXPECT_EQ(MessageLimit(0), kControlMessageBytes);
  EXPECT_EQ(MessageLimit(int64_t{1} << 40), 2147483647);
}

TEST(JsonTest, KeepsOrderAndEscapes) {
  JsonObject json;
  json.Add("b", "x\"\n\x01").Add("a", 0.1).Add("c", true).Add("d", int64_t{-3});
  EXPECT_EQ(json.Text(), R"({"b":"x\"\n\u0001","a":0.1,"c":true,"d":-3})");
}

TEST(JsonTest, NumbersThatAreNotFiniteAreNull) { EXPECT_EQ(JsonNumber(1.0 / 0.0), "null"); }

TEST(JsonTest, MessagesAreTheSameTextEveryTime) {
  v1::GroupInfo info;
  for (int i = 0; i < 20; ++i) (*info.mutable_memory_bytes())["key" + std::to_string(i)] = i;
  const std::string once = ToJson(info);
  v1::GroupInfo again;
  for (int i = 19; i >= 0; --i) (*again.mutable_memory_bytes())["key" + std::to_string(i)] = i;
  EXPECT_EQ(once, ToJson(again));
  EXPECT_THAT(once, HasSubstr("\"group_id\":\"\""));
}

TEST(ReportTest, SpecsAreWrittenAsCallersWriteThem) {
  v1::TensorSharding tensor;
  v1::DimensionSpec& first = *tensor.add_spec();
  first.add_axes("dp");
  first.add_axes("ep");
  tensor.add_spec();
  tensor.add_spec()->add_axes("ep");
  EXPECT_EQ(SpecJson(tensor), R"([["dp","ep"],null,"ep"])");
}

TEST(ReportTest, Sharding) {
  v1::GetShardingMetadataResponse sharding;
  sharding.set_layer_id("a");
  v1::MeshAxis& axis = *sharding.add_mesh();
  axis.set_name("ep");
  axis.set_size(2);
  v1::TensorSharding& tensor = *sharding.add_tensors();
  tensor.set_name("down");
  tensor.add_global_shape(8);
  tensor.set_dtype(v1::DTYPE_F32);
  v1::RankShard& shard = *tensor.add_shards();
  shard.add_expert_ids(0);
  shard.mutable_slice()->add_offsets(0);
  shard.mutable_slice()->add_sizes(4);
  EXPECT_EQ(ShardingJson(sharding),
            R"({"layer_id":"a","group_id":"","epoch":0,"mesh":{"ep":2},"tensors":[)"
            R"({"name":"down","global_shape":[8],"dtype":"f32","spec":[],"shards":[)"
            R"({"rank":0,"slot":0,"host":"","device":"","offsets":[0],"sizes":[4],)"
            R"("expert_ids":[0]}]}]})");
}

}  // namespace
}  // namespace expertd::client
