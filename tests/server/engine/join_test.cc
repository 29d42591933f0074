// Join records as bytes, what ranks conclude from them, and which layers must be restored.
#include "server/engine/join.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/server/engine/test_seed.h"

namespace expertd::engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;

// A layer of 4 experts as rank `rank` of two holds it.
JoinLayer LayerOf(int64_t rank) {
  return {.layer_id = "a/b.c",
          .fingerprint = UINT64_MAX,
          .weights_version = 3,
          .first_expert = rank * 2,
          .local_experts = 2,
          .expert_count = 4,
          .accumulated_backwards = 1};
}

JoinRecord RecordOf(int64_t rank) {
  JoinRecord record;
  record.version = "1.2.3";
  record.slot = rank;
  record.host = "host";
  record.boot_id = "boot";
  record.device = "cpu";
  record.device_uuid = "uuid-" + std::to_string(rank);
  record.bootstrap_fingerprint = "f00d";
  record.transport = {"host boot", record.device_uuid, "0:" + std::to_string(rank), {}};
  record.config = {{"ep_size", "2"}, {"backend", "loopback"}};
  record.layers = {LayerOf(rank)};
  return record;
}

std::vector<JoinRecord> Two() { return {RecordOf(0), RecordOf(1)}; }

absl::Status Common(const std::vector<JoinRecord>& records) {
  const absl::Status first = ConcludeJoin(records, 0);
  for (size_t rank = 1; rank < records.size(); ++rank) {
    EXPECT_EQ(ConcludeJoin(records, static_cast<int64_t>(rank)), first);
  }
  return first;
}

void ExpectMismatch(const absl::Status& status, const std::string& field, const std::string& a,
                    const std::string& b) {
  EXPECT_EQ(ReasonOf(status), Reason::kConfigMismatch) << status;
  EXPECT_THAT(DetailOf(status).metadata,
              ElementsAre(Pair("field", field), Pair("rank_a", "0"), Pair("value_a", a),
                          Pair("rank_b", "1"), Pair("value_b", HasSubstr(b))));
}

TEST(JoinEncodingTest, RoundTripsEveryMember) {
  JoinRecord record = RecordOf(1);
  record.status = Error(Reason::kConfigInvalid).At("x", "y");
  record.transport.nccl = {.p2p_nvlink_only = true, .shm_disabled = true};
  record.layers.push_back({.layer_id = "frozen", .gradients_valid = false, .frozen = true});
  const JoinRecord back = *DecodeJoin(EncodeJoin(record));
  EXPECT_EQ(back.status, record.status);
  EXPECT_EQ(back.version, record.version);
  EXPECT_EQ(back.slot, record.slot);
  EXPECT_EQ(back.host, record.host);
  EXPECT_EQ(back.boot_id, record.boot_id);
  EXPECT_EQ(back.device, record.device);
  EXPECT_EQ(back.device_uuid, record.device_uuid);
  EXPECT_EQ(back.bootstrap_fingerprint, record.bootstrap_fingerprint);
  EXPECT_EQ(back.transport.host_key, "host boot");
  EXPECT_EQ(back.transport.device_uuid, record.device_uuid);
  EXPECT_EQ(back.transport.pci_bus_id, "0:1");
  EXPECT_FALSE(back.transport.nccl.p2p_disabled);
  EXPECT_TRUE(back.transport.nccl.p2p_nvlink_only);
  EXPECT_TRUE(back.transport.nccl.shm_disabled);
  EXPECT_EQ(back.config, record.config);
  ASSERT_EQ(back.layers.size(), 2u);
  const JoinLayer& layer = back.layers[0];
  EXPECT_EQ(layer.layer_id, "a/b.c");
  EXPECT_EQ(layer.fingerprint, UINT64_MAX);
  EXPECT_EQ(layer.weights_version, 3u);
  EXPECT_EQ(layer.first_expert, 2);
  EXPECT_EQ(layer.local_experts, 2);
  EXPECT_EQ(layer.expert_count, 4);
  EXPECT_TRUE(layer.gradients_valid);
  EXPECT_EQ(layer.accumulated_backwards, 1);
  EXPECT_FALSE(layer.frozen);
  EXPECT_TRUE(back.layers[1].frozen);
  EXPECT_FALSE(back.layers[1].gradients_valid);
}

TEST(JoinTransportTest, EveryRankIsReachedSomehow) {
  std::vector<JoinRecord> records = {RecordOf(0), RecordOf(1), RecordOf(2)};
  records[2].transport.host_key = "elsewhere";
  const std::vector<DevicePeer> peers = {
      {.ordinal = 1, .uuid = "uuid-1", .access = true, .nvlink = true}};
  const auto ways = TransportsOf(records, 0, "nccl", peers);
  ASSERT_EQ(ways.size(), 3u);
  EXPECT_EQ(ways[0].name, "self");
  EXPECT_EQ(ways[1].name, "nvlink p2p");
  EXPECT_EQ(ways[2].name, "network");
}

TEST(JoinEncodingTest, UnknownFieldsOfANewerVersionAreIgnored) {
  const auto record = DecodeJoin(EncodeFields({{"slot", "3"}, {"new_thing", "x"}}));
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_EQ(record->slot, 3);
}

TEST(JoinEncodingTest, BadNumbersAreErrors) {
  EXPECT_FALSE(DecodeJoin(EncodeFields({{"slot", "x"}})).ok());
  EXPECT_FALSE(DecodeJoin(EncodeFields({{"layer.a", "1,2,3"}})).ok());
  EXPECT_FALSE(DecodeJoin(EncodeFields({{"layer.a", "1,2,3,4,1,6,0,x"}})).ok());
  EXPECT_FALSE(DecodeJoin("5:slot").ok());
  EXPECT_FALSE(DecodeJoin(EncodeFields({{"nccl_limits", "01"}})).ok());
  EXPECT_FALSE(DecodeJoin(EncodeFields({{"nccl_limits", "012"}})).ok());
}

TEST(JoinEncodingTest, IsTotalOnRandomBytes) {
  TestSeed seed;
  SCOPED_TRACE(seed.Trace());
  const std::string good = EncodeJoin(RecordOf(0));
  for (int i = 0; i < 20000; ++i) {
    const auto record = DecodeJoin(i % 2 == 0 ? seed.Bytes(seed.Below(60)) : seed.Mutate(good));
    if (record.ok()) ConcludeJoin({*record, RecordOf(1)}, 0).IgnoreError();
  }
}

TEST(ConcludeJoinTest, RecordsThatFitAreAccepted) {
  EXPECT_TRUE(Common(Two()).ok());
  EXPECT_TRUE(Common({RecordOf(0)}).ok());
}

TEST(ConcludeJoinTest, ARefusalIsItsRanksOwnAndPeerRejectedElsewhere) {
  std::vector<JoinRecord> records = Two();
  records[1].status = Error(Reason::kConfigInvalid).Text("bad");
  EXPECT_EQ(ConcludeJoin(records, 1), records[1].status);
  const absl::Status other = ConcludeJoin(records, 0);
  EXPECT_EQ(ReasonOf(other), Reason::kPeerRejected);
  EXPECT_THAT(std::string(other.message()), HasSubstr("rank 1 refused to join: CONFIG_INVALID"));
}

TEST(ConcludeJoinTest, EveryMismatchNamesFieldValuesAndRanks) {
  std::vector<JoinRecord> records = Two();
  records[1].config[0].value = "3";
  ExpectMismatch(Common(records), "ep_size", "2", "3");

  records = Two();
  records[1].config.pop_back();
  ExpectMismatch(Common(records), "backend", "loopback", "(absent)");

  records = Two();
  records[1].version = "1.4.0";
  ExpectMismatch(Common(records), "version", "1.2.3", "1.4.0");

  records = Two();
  records[1].bootstrap_fingerprint = "beef";
  ExpectMismatch(Common(records), "bootstrap_id", "f00d", "beef");

  records = Two();
  records[1].slot = 0;
  ExpectMismatch(Common(records), "slot", "0", "0");

  records = Two();
  records[1].device_uuid = records[0].device_uuid;
  ExpectMismatch(Common(records), "device_uuid", "uuid-0", "uuid-0");
  EXPECT_THAT(std::string(Common(records).message()), HasSubstr("slots 0 and 1"));
}

TEST(ConcludeJoinTest, HostFactsNeverMismatch) {
  std::vector<JoinRecord> records = Two();
  records[1].host = "another";
  records[1].boot_id = "another";
  records[1].device = "another";
  EXPECT_TRUE(Common(records).ok());
}

TEST(ConcludeJoinTest, DevicesWithoutUuidAreNotTheSame) {
  std::vector<JoinRecord> records = Two();
  records[0].device_uuid = records[1].device_uuid = "";
  EXPECT_TRUE(Common(records).ok());
}

TEST(LayersToRestoreTest, LayersThatFitNeedNothing) {
  EXPECT_THAT(LayersToRestore(Two(), 0), IsEmpty());
  EXPECT_THAT(LayersToRestore(Two(), 1), IsEmpty());
}

TEST(LayersToRestoreTest, EveryDifferenceIsNamed) {
  std::vector<JoinRecord> records = Two();
  records[1].layers.clear();
  EXPECT_THAT(LayersToRestore(records, 0),
              ElementsAre(Pair("a/b.c", HasSubstr("rank 1 does not have it"))));
  EXPECT_THAT(LayersToRestore(records, 1), IsEmpty());

  records = Two();
  records[1].layers[0].fingerprint = 1;
  EXPECT_THAT(LayersToRestore(records, 0), ElementsAre(Pair("a/b.c", HasSubstr("another config"))));

  records = Two();
  records[1].layers[0].weights_version = 4;
  EXPECT_THAT(LayersToRestore(records, 0),
              ElementsAre(Pair("a/b.c", HasSubstr("is 3 here and 4 on rank 1"))));
  EXPECT_THAT(LayersToRestore(records, 1),
              ElementsAre(Pair("a/b.c", HasSubstr("is 4 here and 3 on rank 0"))));

  records = Two();
  records[1].layers[0].first_expert = 0;  // it was rank 0 before
  EXPECT_THAT(LayersToRestore(records, 1), ElementsAre(Pair("a/b.c", HasSubstr("from 0"))));
}

TEST(LayersToRestoreTest, AShardOfALargerOrSmallerMeshDoesNotFit) {
  // Two survivors of a mesh of four: each holds one expert of four.
  std::vector<JoinRecord> records = Two();
  for (int64_t rank : {0, 1}) {
    records[static_cast<size_t>(rank)].layers[0].local_experts = 1;
    records[static_cast<size_t>(rank)].layers[0].first_expert = rank;
  }
  EXPECT_THAT(LayersToRestore(records, 0),
              ElementsAre(Pair("a/b.c", HasSubstr("holds 1 of 4 experts"))));
  EXPECT_EQ(LayersToRestore(records, 1).size(), 1u);
  // A group of one whose layer was whole before fits; one of three can never hold four experts.
  std::vector<JoinRecord> three = {RecordOf(0), RecordOf(1), RecordOf(2)};
  EXPECT_EQ(LayersToRestore(three, 0).size(), 1u);
}

TEST(LayersWithInvalidGradientsTest, AccumulatorsMustHoldTheSameBackwards) {
  EXPECT_THAT(LayersWithInvalidGradients(Two(), 0), IsEmpty());
  std::vector<JoinRecord> records = Two();
  records[1].layers[0].accumulated_backwards = 2;
  EXPECT_THAT(LayersWithInvalidGradients(records, 0), ElementsAre("a/b.c"));
  EXPECT_THAT(LayersWithInvalidGradients(records, 1), ElementsAre("a/b.c"));
  records = Two();
  records[1].layers[0].gradients_valid = false;
  EXPECT_THAT(LayersWithInvalidGradients(records, 0), ElementsAre("a/b.c"));
  EXPECT_THAT(LayersWithInvalidGradients(records, 1), ElementsAre("a/b.c"));
}

TEST(VersionsFitTest, OneMinorVersionApartIsClose) {
  EXPECT_TRUE(VersionsFit("1.4.2", "1.4.2"));
  EXPECT_TRUE(VersionsFit("1.4.2", "1.5.0"));
  EXPECT_TRUE(VersionsFit("1.5.0", "1.4.9"));
  EXPECT_FALSE(VersionsFit("1.4.2", "1.6.0"));
  EXPECT_FALSE(VersionsFit("1.4.2", "2.4.2"));
  EXPECT_TRUE(VersionsFit("odd", "odd"));
  for (const char* bad : {"", "1", "a.b.c", "1.x", "1.2147483648", "99999999999.1"}) {
    EXPECT_FALSE(VersionsFit("1.4.2", bad)) << bad;
  }
  EXPECT_FALSE(VersionsFit("1.-9223372036854775808", "1.9223372036854775807"));
}

}  // namespace
}  // namespace expertd::engine
