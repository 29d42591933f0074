// Tests of whole daemons: what one port serves, and a group through real gRPC.
#include "server/daemon.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/string_view.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/impl/codegen/client_unary_call.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/engine_metrics.h"
#include "tests/testing/daemon_group.h"

namespace expertd::server {
namespace {

using std::chrono::seconds;
using testing::DaemonGroup;
using testing::F32Tensor;
using testing::F32Values;
using testing::FirstError;
using testing::I64Tensor;

Config LocalConfig() {
  Config config = DefaultConfig();
  config.listen = "127.0.0.1:0";
  config.default_backend = "loopback";
  return config;
}

// A call with hand-made bytes, for services whose generated headers are not installed.
absl::StatusOr<std::string> RawCall(const std::string& address, const char* method,
                                    const std::string& request) {
  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + seconds(20));
  const grpc::Slice slice(request);
  const grpc::ByteBuffer input(&slice, 1);
  grpc::ByteBuffer output;
  const grpc::Status status = grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(
      channel.get(), grpc::internal::RpcMethod(method, grpc::internal::RpcMethod::NORMAL_RPC),
      &context, input, &output);
  if (!status.ok()) return rpc::FromGrpc(status);
  grpc::Slice whole;
  output.DumpToSingleSlice(&whole);
  return std::string(reinterpret_cast<const char*>(whole.begin()), whole.size());
}

// A protobuf string field with a number below 16 and fewer than 128 bytes.
std::string StringField(int number, const std::string& text) {
  return std::string{static_cast<char>(number << 3 | 2), static_cast<char>(text.size())} + text;
}

// 1 is SERVING, 2 is NOT_SERVING; -1 when the call failed.
int Health(const std::string& address, const std::string& service) {
  const absl::StatusOr<std::string> answer =
      RawCall(address, "/grpc.health.v1.Health/Check", StringField(1, service));
  return answer.ok() && answer->size() == 2 ? (*answer)[1] : -1;
}

// Waits until the health of `service` is `want`.
bool HealthBecomes(const std::string& address, const std::string& service, int want) {
  const SteadyTime deadline = Clock::Real().Now() + seconds(20);
  while (Health(address, service) != want) {
    if (Clock::Real().Now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

v1::CreateLayerRequest SmallLayer(int64_t ranks) {
  v1::CreateLayerRequest request;
  request.set_layer_id("layer");
  v1::LayerConfig* config = request.mutable_config();
  config->set_expert_count(2 * ranks);
  config->set_hidden(16);
  config->set_intermediate(8);
  config->set_top_k(2);
  config->set_token_dtype(v1::DTYPE_F32);
  config->set_weight_dtype(v1::DTYPE_F32);
  return request;
}

v1::ForwardRequest SmallForward(int64_t tokens) {
  v1::ForwardRequest request;
  request.set_layer_id("layer");
  std::vector<float> values(16 * tokens);
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i));
  std::vector<int64_t> ids;
  std::vector<float> weights;
  for (int64_t t = 0; t < tokens; ++t) {
    ids.insert(ids.end(), {t % 2, 2});
    weights.insert(weights.end(), {0.75f, 0.25f});
  }
  *request.mutable_tokens() = F32Tensor({tokens, 16}, values);
  *request.mutable_topk()->mutable_topk_ids() = I64Tensor({tokens, 2}, ids);
  *request.mutable_topk()->mutable_topk_weights() = F32Tensor({tokens, 2}, weights);
  return request;
}

// A group of two with a layer that has weights.
std::unique_ptr<DaemonGroup> GroupWithLayer() {
  absl::StatusOr<std::unique_ptr<DaemonGroup>> started = DaemonGroup::Start({});
  EXPECT_TRUE(started.ok()) << started.status();
  if (!started.ok()) return nullptr;
  std::unique_ptr<DaemonGroup> group = *std::move(started);
  const absl::Status created = FirstError(group->Collective(
      &v1::LayerService::Stub::CreateLayer,
      std::vector<v1::CreateLayerRequest>(group->ranks(), SmallLayer(group->ranks()))));
  EXPECT_TRUE(created.ok()) << created;
  v1::InitializeWeightsRequest initialize;
  initialize.set_layer_id("layer");
  initialize.set_seed(1);
  const absl::Status initialized = FirstError(
      group->Collective(&v1::LayerService::Stub::InitializeWeights,
                        std::vector<v1::InitializeWeightsRequest>(group->ranks(), initialize)));
  EXPECT_TRUE(initialized.ok()) << initialized;
  return group;
}

TEST(DaemonTest, ReflectionListsAllServices) {
  const auto daemon = Daemon::Create(LocalConfig());
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const absl::StatusOr<std::string> services = RawCall(
      (*daemon)->address(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
      StringField(7, "*"));
  ASSERT_TRUE(services.ok()) << services.status();
  for (const char* name :
       {"expertd.v1.ControlService", "expertd.v1.LayerService", "expertd.v1.StepService",
        "expertd.v1.TensorService", "expertd.v1.PeerService", "grpc.health.v1.Health",
        "grpc.channelz.v1.Channelz"}) {
    EXPECT_NE(services->find(name), std::string::npos) << name;
  }
}

TEST(DaemonTest, ReflectionKnowsTheErrorDetails) {
  const auto daemon = Daemon::Create(LocalConfig());
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const absl::StatusOr<std::string> file = RawCall(
      (*daemon)->address(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
      StringField(4, "google.rpc.ErrorInfo"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_NE(file->find("google/rpc/error_details.proto"), std::string::npos);
}

TEST(DaemonTest, ChannelzAnswers) {
  const auto daemon = Daemon::Create(LocalConfig());
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const absl::StatusOr<std::string> servers =
      RawCall((*daemon)->address(), "/grpc.channelz.v1.Channelz/GetServers", "");
  ASSERT_TRUE(servers.ok()) << servers.status();
  EXPECT_FALSE(servers->empty());
}

TEST(DaemonTest, HealthIsAboutTheDaemonAndTheGroupHasItsOwnName) {
  const auto daemon = Daemon::Create(LocalConfig());
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const std::string address = (*daemon)->address();
  EXPECT_EQ(Health(address, ""), 1);
  EXPECT_EQ(Health(address, "expertd.v1.ControlService"), 1);
  EXPECT_EQ(Health(address, "expertd.group"), 2);
  EXPECT_EQ(Health(address, "no.such.name"), -1);
}

TEST(DaemonTest, HealthFollowsDrainAndResume) {
  auto daemons = DaemonGroup::StartDaemons({.ranks = 1});
  ASSERT_TRUE(daemons.ok()) << daemons.status();
  const std::string address = (*daemons)->daemon(0).address();
  v1::DrainRequest drain;
  ASSERT_TRUE((*daemons)->Call(0, &v1::ControlService::Stub::Drain, drain).status.ok());
  EXPECT_TRUE(HealthBecomes(address, "", 2));
  drain.set_resume(true);
  ASSERT_TRUE((*daemons)->Call(0, &v1::ControlService::Stub::Drain, drain).status.ok());
  EXPECT_TRUE(HealthBecomes(address, "", 1));
}

TEST(DaemonTest, TakenPortIsAnErrorThatNamesIt) {
  const auto first = Daemon::Create(LocalConfig());
  ASSERT_TRUE(first.ok()) << first.status();
  Config config = LocalConfig();
  config.listen = (*first)->address();
  const auto second = Daemon::Create(config);
  EXPECT_TRUE(absl::IsAlreadyExists(second.status())) << second.status();
  EXPECT_NE(second.status().message().find((*first)->address()), absl::string_view::npos)
      << second.status();
}

TEST(DaemonTest, UnknownDeviceIsAnError) {
  Config config = LocalConfig();
  config.device = "cuda:63";
  const auto daemon = Daemon::Create(config);
  EXPECT_EQ(ReasonOf(daemon.status()), Reason::kBackendUnsupported) << daemon.status();
}

TEST(DaemonTest, AdvertisesWhatItIsTold) {
  Config config = LocalConfig();
  config.advertise = "rank-0.example";
  const auto daemon = Daemon::Create(config);
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const std::string port = (*daemon)->address().substr((*daemon)->address().rfind(':'));
  EXPECT_EQ((*daemon)->advertised_address(), "rank-0.example" + port);
}

TEST(DaemonTest, GroupFormsAndComputesThroughRealGrpc) {
  const auto group = GroupWithLayer();
  ASSERT_NE(group, nullptr);
  EXPECT_TRUE(HealthBecomes(group->daemon(0).address(), "expertd.group", 1));
  const auto replies = group->Collective(&v1::StepService::Stub::Forward,
                                         std::vector{SmallForward(5), SmallForward(0)});
  ASSERT_TRUE(FirstError(replies).ok()) << FirstError(replies);
  EXPECT_EQ(F32Values(replies[0].response.output()).size(), 5u * 16u);
  EXPECT_EQ(replies[1].response.output().shape(0), 0);
  EXPECT_FALSE(replies[0].response.routing().has_topk_ids());
}

TEST(DaemonTest, RejectedRequestConsumesItsSequenceAndTheGroupGoesOn) {
  const auto group = GroupWithLayer();
  ASSERT_NE(group, nullptr);
  std::vector<v1::ForwardRequest> requests = {SmallForward(3), SmallForward(3)};
  requests[1].mutable_tokens()->mutable_data()->pop_back();
  const auto replies = group->Collective(&v1::StepService::Stub::Forward, requests);
  EXPECT_EQ(ReasonOf(replies[0].status), Reason::kPeerRejected) << replies[0].status;
  EXPECT_EQ(ReasonOf(replies[1].status), Reason::kPayloadSizeMismatch) << replies[1].status;
  const auto next = group->Collective(&v1::StepService::Stub::Forward,
                                      std::vector{SmallForward(3), SmallForward(3)});
  EXPECT_TRUE(FirstError(next).ok()) << FirstError(next);
}

TEST(DaemonTest, SameRequestAgainGivesTheStoredReply) {
  const auto group = GroupWithLayer();
  ASSERT_NE(group, nullptr);
  std::vector<v1::ForwardRequest> requests = {SmallForward(3), SmallForward(2)};
  for (auto& request : requests) *request.mutable_header() = group->Header();
  const auto first = group->CallAll(&v1::StepService::Stub::Forward, requests);
  const auto again = group->CallAll(&v1::StepService::Stub::Forward, requests);
  ASSERT_TRUE(FirstError(first).ok()) << FirstError(first);
  ASSERT_TRUE(FirstError(again).ok()) << FirstError(again);
  EXPECT_EQ(first[0].response.output().data(), again[0].response.output().data());
}

TEST(DaemonTest, MetricsAndProbesFollowTheEngine) {
  const auto group = GroupWithLayer();
  ASSERT_NE(group, nullptr);
  const std::string metrics = MetricsOf(ReadMetrics(group->daemon(1).engine()));
  for (const char* line : {"expertd_group_state{state=\"READY\"} 1\n", "expertd_group_rank 1\n",
                           "expertd_operations_total{operation=\"CreateLayer\"} 1\n",
                           "expertd_layer_ready{layer=\"layer\"} 1\n", "expertd_draining 0\n"}) {
    EXPECT_NE(metrics.find(line), std::string::npos) << line << " is missing in\n" << metrics;
  }
}

TEST(DaemonTest, ShutdownOfAGroupEndsInTime) {
  const auto group = GroupWithLayer();
  ASSERT_NE(group, nullptr);
  const SteadyTime start = Clock::Real().Now();
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < group->ranks(); ++rank) {
    threads.emplace_back(
        [&group, rank, start] { group->daemon(rank).Shutdown(start + seconds(5)); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(Clock::Real().Now() - start, seconds(20));
}

}  // namespace
}  // namespace expertd::server
