// Tests of the pure parts of expertctl: flags, doctor, sharding of batches, layouts, progress.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "client/cpp/tensor.h"
#include "client/expertctl/config_flags.h"
#include "client/expertctl/conformance.h"
#include "client/expertctl/conformance_layout.h"
#include "client/expertctl/doctor.h"
#include "client/expertctl/flags.h"
#include "client/expertctl/fleet.h"
#include "client/expertctl/progress.h"
#include "client/expertctl/served_moe.h"
#include "client/expertctl/verbs.h"
#include "client/expertctl/workload.h"

namespace expertd::expertctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(FlagSetTest, TakesEveryForm) {
  std::string text;
  int64_t number = 0;
  double real = 0;
  bool on = false;
  bool off = true;
  FlagSet flags("v", "s");
  flags.Add("text", "", &text);
  flags.Add("number", "", &number);
  flags.Add("real", "", &real);
  flags.Add("on", "", &on);
  flags.Add("off", "", &off);
  ASSERT_TRUE(flags.Parse({"--text=a=b", "--number", "-3", "--real=0.5", "--on", "--nooff"}).ok());
  EXPECT_EQ(text, "a=b");
  EXPECT_EQ(number, -3);
  EXPECT_EQ(real, 0.5);
  EXPECT_TRUE(on);
  EXPECT_FALSE(off);
  EXPECT_TRUE(flags.Given("number"));
}

TEST(FlagSetTest, ReportsAllProblemsAtOnce) {
  int64_t number = 0;
  FlagSet flags("v", "s");
  flags.Add("number", "", &number);
  const absl::Status status = flags.Parse({"--number=x", "--nope", "word", "--number"});
  EXPECT_TRUE(IsUsageError(status));
  for (const char* part : {"got \"x\"", "--nope", "\"word\"", "got no value"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

TEST(FlagSetTest, HelpIsNoUsageError) {
  const absl::Status status = FlagSet("v", "s").Parse({"--help"});
  EXPECT_TRUE(IsHelp(status));
  EXPECT_FALSE(IsUsageError(status));
}

TEST(GroupFlagsTest, FlagsBeatTheFileWhichBeatsDefaults) {
  v1::GroupConfig file;
  file.set_max_hidden(512);
  file.set_max_experts(16);
  GroupFlags flags;
  flags.max_experts = 32;
  const auto config = flags.Merge(file);
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->max_hidden(), 512);
  EXPECT_EQ(config->max_experts(), 32);
  EXPECT_EQ(config->max_tokens_per_rank(), 256);
  EXPECT_EQ(config->max_token_dtype(), v1::DTYPE_F32);
  flags.max_token_dtype = "f99";
  EXPECT_TRUE(IsUsageError(flags.Merge(file).status()));
}

TEST(PlanTest, NeedsNoDaemon) {
  testing::internal::CaptureStdout();
  const auto code = RunPlan({"--world=4", "--max_hidden=128", "--hidden=128", "--json"});
  const std::string out = testing::internal::GetCapturedStdout();
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_EQ(*code, kExitOk);
  EXPECT_THAT(out, HasSubstr("\"ranks\":4"));
  EXPECT_THAT(out, HasSubstr("\"master_weights\""));
}

client::HostReport Host(const std::string& host, int64_t slot) {
  client::HostReport report;
  report.host = host;
  report.info.set_slot(slot);
  report.info.set_incarnation(static_cast<uint64_t>(slot) + 1);
  report.info.set_version("1.0.0");
  report.info.set_boot_id("boot");
  report.info.set_address("10.0.0.1:" + std::to_string(7000 + slot));
  v1::Support& gloo = *report.info.add_backends();
  gloo.set_name("gloo");
  gloo.set_supported(true);
  return report;
}

bool Mentions(const std::vector<Finding>& findings, Severity severity, const std::string& text) {
  return std::any_of(findings.begin(), findings.end(), [&](const Finding& finding) {
    return finding.severity == severity && finding.text.find(text) != std::string::npos;
  });
}

TEST(DoctorTest, HealthyHostsHaveNoProblem) {
  const auto findings = Diagnose({{Host("a", 0), Host("b", 1)}, "gloo"});
  EXPECT_FALSE(HasProblem(findings));
}

TEST(DoctorTest, EveryProblemHasARemedy) {
  client::HostReport down = Host("c", 2);
  down.status = absl::UnavailableError("refused");
  client::HostReport loopback = Host("d", 0);
  loopback.info.set_incarnation(99);
  loopback.info.set_boot_id("another machine");
  loopback.info.set_address("127.0.0.1:7000");
  loopback.info.mutable_backends(0)->set_supported(false);
  loopback.info.mutable_backends(0)->set_reason("no library");
  const auto findings = Diagnose({{Host("a", 0), down, loopback}, "gloo"});
  EXPECT_TRUE(Mentions(findings, Severity::kProblem, "refused"));
  EXPECT_TRUE(Mentions(findings, Severity::kProblem, "loopback address"));
  EXPECT_TRUE(Mentions(findings, Severity::kProblem, "no library"));
  EXPECT_TRUE(Mentions(findings, Severity::kProblem, "slot 0 at a and d"));
  for (const Finding& finding : findings) {
    EXPECT_EQ(finding.remedy.empty(), finding.severity == Severity::kGood) << finding.text;
  }
}

TEST(DoctorTest, LoopbackAddressesAreFineOnOneMachine) {
  client::HostReport a = Host("a", 0);
  client::HostReport b = Host("b", 1);
  a.info.set_address("127.0.0.1:1");
  b.info.set_address("127.0.0.1:2");
  EXPECT_FALSE(HasProblem(Diagnose({{a, b}, ""})));
}

// A daemon on GPU `slot` of a machine with two, which reach each other over NVLink.
client::HostReport GpuHost(const std::string& host, int64_t slot) {
  client::HostReport report = Host(host, slot);
  report.info.mutable_backends(0)->set_name("nccl");
  report.info.set_shared_memory_bytes(int64_t{1} << 30);
  v1::DeviceInfo& device = *report.info.mutable_device();
  device.set_kind("cuda");
  device.set_name("H");
  device.set_uuid("GPU-" + std::to_string(slot));
  device.set_pci_bus_id("0000:" + std::to_string(slot));
  device.set_ordinal(slot);
  device.set_driver_version("580.1");
  device.set_cuda_driver("13.0");
  device.set_cuda_runtime("13.0");
  device.set_nccl_version("2.28.9");
  v1::DevicePeer& peer = *device.add_peers();
  peer.set_ordinal(1 - slot);
  peer.set_uuid("GPU-" + std::to_string(1 - slot));
  peer.set_pci_bus_id("0000:" + std::to_string(1 - slot));
  peer.set_access(true);
  peer.set_nvlink(true);
  return report;
}

// Puts two daemons into one group; rank 0 reaches rank 1 that way.
void Connect(client::HostReport& a, client::HostReport& b, const std::string& transport) {
  for (client::HostReport* host : {&a, &b}) {
    host->group.set_rank(host == &a ? 0 : 1);
    for (int64_t rank : {0, 1}) {
      v1::PeerTransport& way = *host->group.add_transports();
      way.set_rank(rank);
      way.set_transport(rank == host->group.rank() ? "self" : transport);
      way.set_reason("why");
    }
  }
}

TEST(DoctorGpuTest, TwoGpusOverNvlinkAreGood) {
  client::HostReport a = GpuHost("a", 0);
  client::HostReport b = GpuHost("b", 1);
  Connect(a, b, "nvlink p2p");
  const auto findings = Diagnose({{a, b}, "nccl"});
  for (const Finding& finding : findings) {
    EXPECT_EQ(finding.severity, Severity::kGood) << finding.text;
  }
  EXPECT_TRUE(Mentions(findings, Severity::kGood,
                       "GPU 0 (0000:0) to GPU 1 (0000:1): peer access over NVLink"));
  EXPECT_TRUE(Mentions(findings, Severity::kGood,
                       "driver 580.1 for CUDA up to 13.0, runtime 13.0, NCCL 2.28.9"));
  EXPECT_TRUE(Mentions(findings, Severity::kGood, "/dev/shm has 1073741824 bytes"));
  EXPECT_TRUE(Mentions(findings, Severity::kGood, "rank 1 reaches rank 0: nvlink p2p (why)"));
  EXPECT_FALSE(Mentions(findings, Severity::kGood, "self"));
}

TEST(DoctorGpuTest, NamesWhatIsWrongAndWhatToDo) {
  client::HostReport a = GpuHost("a", 0);
  client::HostReport b = GpuHost("b", 1);
  Connect(a, b, "network");
  a.info.set_shared_memory_bytes(64 << 20);
  a.info.mutable_device()->set_cuda_driver("12.8");
  a.info.mutable_device()->mutable_peers(0)->set_access(false);
  b.info.mutable_device()->set_cuda_runtime("13.1");
  b.info.mutable_device()->set_nccl_version("2.27.3");
  b.info.mutable_device()->set_driver_version("590.2");
  b.info.mutable_device()->set_uuid("GPU-0");
  const auto findings = Diagnose({{a, b}, "nccl"});
  EXPECT_TRUE(
      Mentions(findings, Severity::kWarning, "/dev/shm: got 67108864 bytes, need 1073741824"));
  EXPECT_TRUE(Mentions(findings, Severity::kProblem, "the driver is older than the runtime"));
  EXPECT_TRUE(Mentions(findings, Severity::kWarning, "a minor version behind"));
  EXPECT_TRUE(
      Mentions(findings, Severity::kWarning, "GPU 0 (0000:0) to GPU 1 (0000:1): no peer access"));
  EXPECT_TRUE(Mentions(findings, Severity::kProblem, "NCCL: got 2.28.9 at a and 2.27.3 at b"));
  EXPECT_TRUE(Mentions(findings, Severity::kWarning, "driver: got 580.1 at a and 590.2 at b"));
  EXPECT_TRUE(Mentions(findings, Severity::kProblem, "got device GPU-0 at slots 0 and 1"));
  EXPECT_TRUE(Mentions(findings, Severity::kWarning,
                       "rank 0 reaches rank 1: network (why), on one machine"));
  for (const Finding& finding : findings) {
    EXPECT_EQ(finding.remedy.empty(), finding.severity == Severity::kGood) << finding.text;
  }
}

TEST(DoctorGpuTest, TheNetworkIsFineBetweenMachines) {
  client::HostReport a = GpuHost("a", 0);
  client::HostReport b = GpuHost("b", 1);
  b.info.set_boot_id("another machine");
  Connect(a, b, "network");
  EXPECT_TRUE(
      Mentions(Diagnose({{a, b}, "nccl"}), Severity::kGood, "rank 0 reaches rank 1: network"));
}

TEST(ShardOfTest, CoversAllRowsInOrder) {
  for (int64_t rows : {0, 1, 7, 8, 2048}) {
    for (int64_t world : {1, 3, 4}) {
      int64_t next = 0;
      for (int64_t rank = 0; rank < world; ++rank) {
        const RowRange range = ShardOf(rows, world, rank);
        EXPECT_EQ(range.begin, next);
        EXPECT_LE(range.count, ShardOf(rows, world, 0).count);
        next += range.count;
      }
      EXPECT_EQ(next, rows);
    }
  }
}

TEST(LayoutTest, WorkedByHand) {
  // Two ranks, two experts, one each; rank 1's token 0 has no second route.
  const Scenario scenario{2, 2, 4, {{0, 1, 1, 0}, {1, -1}}};
  const auto layouts = LayOut(scenario);
  EXPECT_THAT(layouts[0].tokens_per_expert, ElementsAre(2));
  EXPECT_THAT(layouts[0].padded_per_expert, ElementsAre(4));
  EXPECT_THAT(layouts[1].tokens_per_expert, ElementsAre(3));
  ASSERT_EQ(layouts[1].slots.size(), 4u);
  EXPECT_EQ(layouts[1].slots[0].token, 0);
  EXPECT_EQ(layouts[1].slots[0].k, 1);
  EXPECT_EQ(layouts[1].slots[1].token, 1);
  EXPECT_EQ(layouts[1].slots[1].k, 0);
  EXPECT_EQ(layouts[1].slots[2].rank, 1);
  EXPECT_EQ(layouts[1].slots[3].rank, -1);
  EXPECT_EQ(ValidRoutes(scenario, 1, 0), 1);
}

TEST(LayoutTest, ScenariosAreValidRoutings) {
  for (int64_t ranks : {1, 3}) {
    for (const NamedScenario& named : MakeScenarios({ranks, 4 * ranks, 3, 4, 13})) {
      const Scenario& scenario = named.scenario;
      for (int64_t r = 0; r < ranks; ++r) {
        for (int64_t t = 0; t < scenario.tokens(r); ++t) {
          std::vector<int32_t> ids(scenario.ids[r].begin() + t * 3,
                                   scenario.ids[r].begin() + t * 3 + 3);
          std::sort(ids.begin(), ids.end());
          for (size_t k = 0; k < 3; ++k) {
            EXPECT_GE(ids[k], -1);
            EXPECT_LT(ids[k], scenario.experts);
            const bool repeated = k > 0 && ids[k] >= 0 && ids[k] == ids[k - 1];
            EXPECT_FALSE(repeated) << named.name;
          }
        }
      }
    }
  }
}

TEST(ConformanceTest, RowsDifferAndAreExactInBf16) {
  EXPECT_NE(RowValue(0, 3, 0, 0), RowValue(0, 4, 0, 0));
  EXPECT_NE(RowValue(0, 3, 1, 0), RowValue(1, 3, 1, 0));
  for (int64_t c = 0; c < 64; ++c) {
    const float value = 3 * RowValue(2, 5, c, 1);
    EXPECT_EQ(client::FromBf16(client::ToBf16(value)), value);
  }
}

TEST(ConformanceTest, BitsAreCompared) {
  EXPECT_TRUE(ExpectBits("x", {1.0f}, {1.0f}).ok());
  EXPECT_FALSE(ExpectBits("x", {0.0f}, {-0.0f}).ok());
  EXPECT_FALSE(ExpectBits("x", {1.0f}, {1.0f, 2.0f}).ok());
}

TEST(WorkloadTest, IdsDifferWithinATokenAndWeightsSumToOne) {
  Workload workload;
  workload.config.set_expert_count(8);
  workload.config.set_top_k(8);
  workload.config.set_hidden(4);
  workload.config.set_token_dtype(v1::DTYPE_F32);
  workload.tokens = 5;
  workload.seed = 3;
  auto ids = *client::ReadInts(RandomIds(workload));
  const auto weights = *client::ReadFloats(RandomWeights(workload));
  for (int64_t t = 0; t < 5; ++t) {
    std::sort(ids.begin() + 8 * t, ids.begin() + 8 * (t + 1));
    float sum = 0;
    for (int64_t k = 0; k < 8; ++k) {
      EXPECT_EQ(ids[8 * t + k], k);
      sum += weights[8 * t + k];
    }
    EXPECT_NEAR(sum, 1.0f, 1e-6f);
  }
}

TEST(FleetTest, FindsTheAddressInTheDaemonsLine) {
  EXPECT_EQ(ParseListening("listening address=127.0.0.1:4711 probe_address=127.0.0.1:4712"),
            "127.0.0.1:4711");
  EXPECT_EQ(ParseListening("config listen=127.0.0.1:0"), "");
  EXPECT_EQ(ParseListening(""), "");
}

TEST(FleetTest, AMissingProgramIsNamed) {
  const auto fleet = Fleet::Start("/no/such/expertd", "cpu", 1, absl::Now() + absl::Seconds(1));
  EXPECT_TRUE(absl::IsNotFound(fleet.status()));
}

TEST(FleetTest, AProgramThatEndsAtOnceIsReported) {
  const auto fleet = Fleet::Start("/bin/false", "cpu", 2, absl::Now() + absl::Seconds(20));
  EXPECT_TRUE(absl::IsUnavailable(fleet.status()));
  EXPECT_THAT(std::string(fleet.status().message()), HasSubstr("exited with code 1"));
}

TEST(ProgressTest, BarsAreRelativeToTheFullestExpert) {
  EXPECT_EQ(LoadBar({0, 4, 8}), " ▄█");
  EXPECT_EQ(LoadBar({0, 0}), "  ");
}

TEST(ProgressTest, LinesAreCutBetweenCharacters) {
  EXPECT_EQ(FirstColumns("a▄█b", 2), "a▄");
  EXPECT_EQ(FirstColumns("a▄█b", 4), "a▄█b");
  EXPECT_EQ(FirstColumns("ab", 9), "ab");
}

TEST(ProgressTest, OneLine) {
  train::Progress progress;
  progress.step = 12;
  progress.fraction = 0.5;
  progress.tokens_per_expert = {{1, 1}, {2, 0}};
  const std::string line = ProgressLine(progress);
  EXPECT_THAT(line, HasSubstr("[##########          ]  50%  step 12"));
  EXPECT_EQ(line.find('\n'), std::string::npos);
}

}  // namespace
}  // namespace expertd::expertctl
