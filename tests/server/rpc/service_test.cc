// Tests of the services over real gRPC and a fake engine: what reaches the engine, what comes back.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "expertd/v1/control_service.grpc.pb.h"
#include "expertd/v1/layer_service.grpc.pb.h"
#include "expertd/v1/step_service.grpc.pb.h"
#include "expertd/v1/tensor_service.grpc.pb.h"
#include "grpcpp/create_channel.h"
#include "server/rpc/parameter_stream.h"
#include "server/rpc/server.h"
#include "server/rpc/status.h"
#include "tests/server/rpc/fake_engine.h"

namespace expertd::rpc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::system_clock;

class ServiceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ServerOptions options;
    options.listen = "127.0.0.1:0";
    options.identity.version = "1.2.3";
    options.identity.max_receive_message_bytes = 4 << 20;
    options.identity.default_backend = "loopback";
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Create(options, engine_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials());
  }

  template <typename Stub, typename Request, typename Response>
  absl::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response,
                    milliseconds timeout = seconds(20)) {
    grpc::ClientContext context;
    context.set_deadline(system_clock::now() + timeout);
    Stub stub(channel_);
    return FromGrpc((stub.*method)(&context, request, response));
  }

  static v1::ApplyGradientsRequest Apply() {
    v1::ApplyGradientsRequest request;
    request.mutable_header()->set_group_id("g");
    request.mutable_header()->set_epoch(1);
    request.mutable_header()->set_sequence(5);
    request.mutable_header()->set_request_id(6);
    request.set_layer_id("layer");
    return request;
  }

  FakeEngine engine_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

constexpr auto kApply = &v1::LayerService::Stub::ApplyGradients;

TEST_F(ServiceTest, GetServerInfoJoinsEngineAndProcessFacts) {
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(Call(&v1::ControlService::Stub::GetServerInfo, {}, &info).ok());
  EXPECT_EQ(info.version(), "1.2.3");
  EXPECT_EQ(info.slot(), 3);
  EXPECT_EQ(info.incarnation(), 42u);
  EXPECT_EQ(info.highest_epoch_seen(), 7u);
  EXPECT_EQ(info.address(), server_->bound_address());
  EXPECT_EQ(info.limits().max_receive_message_bytes(), 4 << 20);
  EXPECT_EQ(info.group_state(), v1::GROUP_STATE_IDLE);
  EXPECT_GT(info.process_id(), 0);
  std::vector<std::string> names;
  for (const v1::Support& method : info.methods()) {
    EXPECT_FALSE(method.supported());
    EXPECT_FALSE(method.reason().empty());
    names.push_back(method.name());
  }
  EXPECT_EQ(names.size(), 7u);
  EXPECT_NE(std::find(names.begin(), names.end(), "LayerService.SaveWeights"), names.end());
  EXPECT_NE(std::find(names.begin(), names.end(), "dp_size > 1"), names.end());
}

TEST_F(ServiceTest, UnsupportedMethodsSayWhy) {
  v1::LoadWeightsResponse loaded;
  absl::Status status = Call(&v1::LayerService::Stub::LoadWeights, {}, &loaded);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(ReasonOf(status), Reason::kNotImplemented);
  EXPECT_FALSE(status.message().empty());
  v1::RegisterSharedMemoryResponse shared;
  status = Call(&v1::TensorService::Stub::RegisterSharedMemory, {}, &shared);
  EXPECT_EQ(ReasonOf(status), Reason::kNotImplemented);
  v1::RegisterCudaMemoryResponse cuda;
  status = Call(&v1::TensorService::Stub::RegisterCudaMemory, {}, &cuda);
  EXPECT_EQ(ReasonOf(status), Reason::kNotImplemented);
  v1::UnregisterMemoryResponse unregistered;
  status = Call(&v1::TensorService::Stub::UnregisterMemory, {}, &unregistered);
  EXPECT_EQ(ReasonOf(status), Reason::kNotImplemented);
  grpc::ClientContext stream_context;
  auto stream = v1::StepService::Stub(channel_).StreamSteps(&stream_context);
  EXPECT_EQ(ReasonOf(FromGrpc(stream->Finish())), Reason::kNotImplemented);
}

TEST_F(ServiceTest, RequestWithoutHeaderNeverReachesTheEngine) {
  engine_.on_submit = [](auto, auto) { FAIL() << "submitted"; };
  v1::ApplyGradientsRequest request = Apply();
  request.mutable_header()->set_request_id(0);
  v1::ApplyGradientsResponse response;
  const absl::Status status = Call(kApply, request, &response);
  EXPECT_EQ(ReasonOf(status), Reason::kConfigInvalid);
  EXPECT_EQ(DetailOf(status).violations.front().path, "header.request_id");
}

TEST_F(ServiceTest, InvalidRequestIsSubmittedAsRejected) {
  std::promise<absl::Status> rejected;
  engine_.on_submit = [&](std::shared_ptr<engine::Operation> op, const auto& done) {
    rejected.set_value(op->rejected);
    EXPECT_EQ(op->header.sequence, 5u);
    EXPECT_GT(op->request_bytes, 0);
    op->status = op->rejected;
    done(op);
  };
  v1::ApplyGradientsRequest request = Apply();
  request.clear_layer_id();
  v1::ApplyGradientsResponse response;
  const absl::Status status = Call(kApply, request, &response);
  EXPECT_EQ(DetailOf(status).violations.front().path, "layer_id");
  EXPECT_FALSE(rejected.get_future().get().ok());
}

TEST_F(ServiceTest, ResultsAreCopied) {
  engine_.on_submit = [](std::shared_ptr<engine::Operation> op, const auto& done) {
    auto& apply = static_cast<engine::ApplyGradientsOp&>(*op);
    EXPECT_EQ(apply.expected_version, 8u);
    apply.weights_version = 9;
    apply.applied = true;
    done(op);
  };
  v1::ApplyGradientsRequest request = Apply();
  request.set_expected_version(8);
  v1::ApplyGradientsResponse response;
  ASSERT_TRUE(Call(kApply, request, &response).ok());
  EXPECT_EQ(response.weights_version(), 9u);
  EXPECT_TRUE(response.applied());
}

TEST_F(ServiceTest, AnswerOfAnotherKindIsAConflict) {
  engine_.on_submit = [](auto, const auto& done) { done(std::make_shared<engine::ForwardOp>()); };
  v1::ApplyGradientsResponse response;
  const absl::Status status = Call(kApply, Apply(), &response);
  EXPECT_EQ(ReasonOf(status), Reason::kSequenceConflict);
  EXPECT_NE(status.message().find("Forward"), absl::string_view::npos);
}

TEST_F(ServiceTest, DeadlineReachesTheOperation) {
  std::promise<SteadyTime> deadline;
  engine_.on_submit = [&](std::shared_ptr<engine::Operation> op, const auto& done) {
    deadline.set_value(op->deadline);
    done(op);
  };
  v1::ApplyGradientsResponse response;
  const SteadyTime before = Clock::Real().Now();
  ASSERT_TRUE(Call(kApply, Apply(), &response, seconds(100)).ok());
  const SteadyTime got = deadline.get_future().get();
  EXPECT_GT(got, before + seconds(90));
  EXPECT_LT(got, before + seconds(110));
}

TEST_F(ServiceTest, CallerThatGoesAwayCancelsAndTheAnswerMayComeLate) {
  std::promise<std::pair<std::shared_ptr<engine::Operation>, engine::OperationCallback>> submitted;
  std::promise<engine::StepHeader> cancelled;
  engine_.on_submit = [&](std::shared_ptr<engine::Operation> op, engine::OperationCallback done) {
    submitted.set_value({std::move(op), std::move(done)});
  };
  engine_.on_cancel = [&](const engine::StepHeader& header) { cancelled.set_value(header); };
  grpc::ClientContext context;
  v1::ApplyGradientsResponse response;
  std::thread caller([&] {
    v1::LayerService::Stub stub(channel_);
    EXPECT_EQ(stub.ApplyGradients(&context, Apply(), &response).error_code(),
              grpc::StatusCode::CANCELLED);
  });
  auto [op, done] = submitted.get_future().get();
  context.TryCancel();
  EXPECT_EQ(cancelled.get_future().get().sequence, 5u);
  caller.join();
  op->status = Error(Reason::kCancelled).Text("gone");
  done(op);
}

TEST_F(ServiceTest, ParameterComesInChunks) {
  engine::ParameterShard shard;
  shard.tensor.dtype = DType::kF32;
  shard.tensor.shape = {3, static_cast<int64_t>(kParameterChunkBytes) / 4};
  for (size_t i = 0; i < 3 * kParameterChunkBytes; ++i) {
    shard.tensor.data.push_back(static_cast<char>(i * 31 + i / 4096));
  }
  shard.offsets = {4, 0};
  shard.weights_version = 12;
  engine_.on_parameter = [&] { return shard; };
  grpc::ClientContext context;
  context.set_deadline(system_clock::now() + seconds(20));
  auto reader = v1::LayerService::Stub(channel_).GetParameter(&context, {});
  v1::GetParameterResponse message;
  std::string data;
  int messages = 0;
  while (reader->Read(&message)) {
    EXPECT_EQ(message.has_tensor(), messages == 0);
    if (messages == 0) {
      EXPECT_EQ(message.tensor().shape(0), 3);
      EXPECT_EQ(message.slice().offsets(0), 4);
      EXPECT_EQ(message.slice().sizes(0), 3);
    }
    EXPECT_EQ(message.weights_version(), 12u);
    EXPECT_LE(message.chunk().size(), kParameterChunkBytes);
    data += message.chunk();
    ++messages;
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(messages, 3);
  EXPECT_EQ(data, shard.tensor.data);
}

TEST_F(ServiceTest, EmptyParameterIsOneMessageAndErrorsAreNone) {
  engine_.on_parameter = [] {
    engine::ParameterShard shard;
    shard.tensor.dtype = DType::kF32;
    shard.tensor.shape = {0, 4};
    shard.offsets = {0, 0};
    return shard;
  };
  v1::GetParameterResponse message;
  grpc::ClientContext context;
  auto reader = v1::LayerService::Stub(channel_).GetParameter(&context, {});
  EXPECT_TRUE(reader->Read(&message));
  EXPECT_EQ(message.tensor().shape(1), 4);
  EXPECT_FALSE(reader->Read(&message));
  EXPECT_TRUE(reader->Finish().ok());

  v1::GetParameterRequest request;
  request.set_kind(static_cast<v1::ParameterKind>(99));
  grpc::ClientContext bad_context;
  auto bad = v1::LayerService::Stub(channel_).GetParameter(&bad_context, request);
  EXPECT_FALSE(bad->Read(&message));
  EXPECT_EQ(ReasonOf(FromGrpc(bad->Finish())), Reason::kConfigInvalid);
}

TEST_F(ServiceTest, SlowReaderMayLeaveAParameterStream) {
  engine_.on_parameter = [] {
    engine::ParameterShard shard;
    shard.tensor.dtype = DType::kF8E5M2;
    shard.tensor.shape = {int64_t{64} << 20};
    shard.tensor.data.resize(size_t{64} << 20);
    shard.offsets = {0};
    return shard;
  };
  grpc::ClientContext context;
  auto reader = v1::LayerService::Stub(channel_).GetParameter(&context, {});
  v1::GetParameterResponse message;
  EXPECT_TRUE(reader->Read(&message));
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(ServiceTest, WatchAnswersOnChangeAndOutlivesItsCaller) {
  v1::WatchGroupRequest request;
  request.set_timeout_ms(60001);
  v1::WatchGroupResponse response;
  EXPECT_EQ(ReasonOf(Call(&v1::ControlService::Stub::WatchGroup, request, &response)),
            Reason::kConfigInvalid);
  request.set_timeout_ms(60000);
  // The caller leaves after 50 ms; the engine's answer comes later and finds nobody.
  EXPECT_EQ(
      Call(&v1::ControlService::Stub::WatchGroup, request, &response, milliseconds(50)).code(),
      absl::StatusCode::kDeadlineExceeded);
  engine_.SetState(engine::GroupState::kReady);
  ASSERT_TRUE(Call(&v1::ControlService::Stub::WatchGroup, request, &response).ok());
  EXPECT_EQ(response.group().state(), v1::GROUP_STATE_READY);
  EXPECT_EQ(response.group().version(), 1u);
}

TEST_F(ServiceTest, JoinReportsEveryMissingPart) {
  v1::JoinGroupResponse response;
  const absl::Status status =
      Call(&v1::ControlService::Stub::JoinGroup, v1::JoinGroupRequest(), &response);
  std::vector<std::string> paths;
  for (const auto& violation : DetailOf(status).violations) paths.push_back(violation.path);
  EXPECT_EQ(paths,
            (std::vector<std::string>{"group_id", "epoch", "bootstrap_id", "members", "config"}));
}

TEST_F(ServiceTest, JoinWithoutBackendGetsTheProcessDefault) {
  v1::JoinGroupRequest request;
  request.set_group_id("g");
  request.set_epoch(3);
  request.set_bootstrap_id("secret");
  request.add_members()->set_address("127.0.0.1:1");
  request.mutable_config();
  v1::JoinGroupResponse response;
  ASSERT_TRUE(Call(&v1::ControlService::Stub::JoinGroup, request, &response).ok());
  EXPECT_EQ(engine_.join().config.backend, "loopback");
  request.mutable_config()->set_backend("gloo");
  ASSERT_TRUE(Call(&v1::ControlService::Stub::JoinGroup, request, &response).ok());
  EXPECT_EQ(engine_.join().config.backend, "gloo");
}

TEST_F(ServiceTest, StepOutcomeNamesOperationAndReason) {
  v1::GetStepOutcomeResponse outcome;
  ASSERT_TRUE(Call(&v1::StepService::Stub::GetStepOutcome, {}, &outcome).ok());
  EXPECT_EQ(outcome.state(), v1::STEP_STATE_FAILED);
  EXPECT_EQ(outcome.operation(), "Forward");
  EXPECT_EQ(outcome.reason(), "STEP_TIMEOUT");
  EXPECT_EQ(outcome.code(), 4);
}

TEST_F(ServiceTest, OversizeRequestIsRefusedByTheTransport) {
  v1::ForwardRequest request;
  request.mutable_tokens()->set_data(std::string(5 << 20, 'x'));
  v1::ForwardResponse response;
  const absl::Status status = Call(&v1::StepService::Stub::Forward, request, &response);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("4194304"), absl::string_view::npos) << status;
}

TEST_F(ServiceTest, ShutdownWaitsForACollectiveAndItsAnswerArrives) {
  std::promise<std::pair<std::shared_ptr<engine::Operation>, engine::OperationCallback>> submitted;
  engine_.on_submit = [&](std::shared_ptr<engine::Operation> op, engine::OperationCallback done) {
    submitted.set_value({std::move(op), std::move(done)});
  };
  std::thread caller([&] {
    v1::ApplyGradientsResponse response;
    const absl::Status status = Call(kApply, Apply(), &response);
    EXPECT_TRUE(status.ok()) << status;
  });
  auto [op, done] = submitted.get_future().get();
  std::thread stopper([&] { server_->Shutdown(Clock::Real().Now() + seconds(30)); });
  done(op);
  stopper.join();
  caller.join();
}

TEST_F(ServiceTest, ShutdownCancelsACollectiveThatIsNotAnsweredInTime) {
  std::promise<std::pair<std::shared_ptr<engine::Operation>, engine::OperationCallback>> submitted;
  std::promise<void> cancelled;
  engine_.on_submit = [&](std::shared_ptr<engine::Operation> op, engine::OperationCallback done) {
    submitted.set_value({std::move(op), std::move(done)});
  };
  engine_.on_cancel = [&](const engine::StepHeader&) { cancelled.set_value(); };
  std::thread caller([&] {
    v1::ApplyGradientsResponse response;
    EXPECT_FALSE(Call(kApply, Apply(), &response).ok());
  });
  auto [op, done] = submitted.get_future().get();
  std::thread stopper([&] { server_->Shutdown(Clock::Real().Now() + milliseconds(50)); });
  cancelled.get_future().get();
  op->status = Error(Reason::kCancelled).Text("stopping");
  done(op);
  stopper.join();
  caller.join();
}

TEST_F(ServiceTest, ShutdownWithALongPollDoesNotWaitForIt) {
  std::thread caller([&] {
    v1::WatchGroupRequest request;
    request.set_timeout_ms(60000);
    v1::WatchGroupResponse response;
    EXPECT_FALSE(Call(&v1::ControlService::Stub::WatchGroup, request, &response).ok());
  });
  // One watcher is the health monitor's, the other the call's.
  std::vector<std::function<void(engine::GroupInfo)>> watchers;
  while (watchers.size() < 2) {
    for (auto& watcher : engine_.TakeWatchers()) watchers.push_back(std::move(watcher));
    std::this_thread::yield();
  }
  const SteadyTime start = Clock::Real().Now();
  server_->Shutdown(start + milliseconds(20));
  EXPECT_LT(Clock::Real().Now() - start, seconds(10));
  caller.join();
  for (const auto& watcher : watchers) watcher(engine::GroupInfo());  // late answers find nobody
}

}  // namespace
}  // namespace expertd::rpc
