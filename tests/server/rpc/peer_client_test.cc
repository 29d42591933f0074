// Tests of deliveries between daemons: answers, patience, failing fast, cancelling.
#include "server/rpc/peer_client.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>

#include "server/observe/listen_address.h"
#include "server/rpc/server.h"
#include "tests/server/rpc/fake_engine.h"

namespace expertd::rpc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A port that nobody listens on, as far as one can know.
int FreePort() {
  const absl::StatusOr<int> socket = observe::Listen({"127.0.0.1", 0});
  const int port = observe::BoundPort(*socket);
  close(*socket);
  return port;
}

std::unique_ptr<Server> StartServer(engine::Engine& engine, int port) {
  ServerOptions options;
  options.listen = observe::JoinHostPort("127.0.0.1", port);
  options.identity.max_receive_message_bytes = 4 << 20;
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Create(options, engine);
  EXPECT_TRUE(server.ok()) << server.status();
  return server.ok() ? *std::move(server) : nullptr;
}

const std::shared_ptr<Gate>& TestGate() {
  static const auto* const gate = new auto(std::make_shared<Gate>());
  return *gate;
}

// The client of rank 0 in a group of two whose rank 1 is at `port`.
std::unique_ptr<PeerClient> MakeClient(int port) {
  const std::vector<engine::Member> members = {{0, "127.0.0.1:1", 1},
                                               {1, observe::JoinHostPort("127.0.0.1", port), 2}};
  return std::make_unique<PeerClient>(members, 0, grpc::InsecureChannelCredentials(), TestGate());
}

engine::PeerRecord Record() {
  engine::PeerRecord record;
  record.group_id = "g";
  record.epoch = 3;
  record.proof = 99;
  record.stage = "arrive";
  record.sequence = 4;
  record.bytes = std::string("a\0b", 3);
  return record;
}

// Delivers and waits for the answer.
absl::Status Deliver(PeerClient& client, milliseconds timeout, bool patient) {
  auto answer = std::make_shared<std::promise<absl::Status>>();
  client.Deliver(1, Record(), Clock::Real().Now() + timeout, patient,
                 [answer](const absl::Status& status) { answer->set_value(status); });
  std::future<absl::Status> future = answer->get_future();
  if (future.wait_for(seconds(30)) != std::future_status::ready) {
    return absl::InternalError("no answer");
  }
  return future.get();
}

TEST(PeerClientTest, RecordArrivesWhole) {
  FakeEngine engine;
  std::promise<engine::PeerRecord> got;
  engine.on_record = [&](const engine::PeerRecord& record) {
    got.set_value(record);
    return absl::OkStatus();
  };
  const std::unique_ptr<Server> server = StartServer(engine, FreePort());
  auto client = MakeClient(observe::ParseHostPort(server->bound_address())->port);
  EXPECT_TRUE(Deliver(*client, seconds(20), false).ok());
  const engine::PeerRecord record = got.get_future().get();
  EXPECT_EQ(record.group_id, "g");
  EXPECT_EQ(record.epoch, 3u);
  EXPECT_EQ(record.proof, 99u);
  EXPECT_EQ(record.stage, "arrive");
  EXPECT_EQ(record.sequence, 4u);
  EXPECT_EQ(record.bytes, std::string("a\0b", 3));
}

TEST(PeerClientTest, ClosesCarryTheStageThatTheirProofCovers) {
  FakeEngine engine;
  std::promise<engine::PeerRecord> got;
  engine.on_record = [&](const engine::PeerRecord& record) {
    got.set_value(record);
    return absl::OkStatus();
  };
  const std::unique_ptr<Server> server = StartServer(engine, FreePort());
  auto client = MakeClient(observe::ParseHostPort(server->bound_address())->port);
  engine::PeerRecord record = Record();
  record.stage = "close";
  client->Close(1, record, Clock::Real().Now() + seconds(20));
  const engine::PeerRecord closed = got.get_future().get();
  EXPECT_EQ(closed.stage, "close");
  EXPECT_EQ(closed.bytes, record.bytes);
}

TEST(PeerClientTest, PeersAnswerComesBackWithItsReason) {
  FakeEngine engine;
  engine.on_record = [](const engine::PeerRecord&) {
    return Error(Reason::kEpochStale).Text("got 3, need 5").With("epoch", 5).ToStatus();
  };
  const std::unique_ptr<Server> server = StartServer(engine, FreePort());
  auto client = MakeClient(observe::ParseHostPort(server->bound_address())->port);
  const absl::Status status = Deliver(*client, seconds(20), true);
  EXPECT_EQ(ReasonOf(status), Reason::kEpochStale);
  EXPECT_EQ(DetailOf(status).metadata.front().second, "5");
}

TEST(PeerClientTest, RefusedConnectionIsPeerLostAtOnce) {
  auto client = MakeClient(FreePort());
  const SteadyTime start = Clock::Real().Now();
  const absl::Status status = Deliver(*client, seconds(30), /*patient=*/false);
  EXPECT_EQ(ReasonOf(status), Reason::kPeerLost);
  EXPECT_NE(status.message().find("rank 1"), absl::string_view::npos) << status;
  EXPECT_LT(Clock::Real().Now() - start, seconds(10));
}

TEST(PeerClientTest, PatientDeliveryEndsAtItsDeadline) {
  auto client = MakeClient(FreePort());
  const SteadyTime start = Clock::Real().Now();
  EXPECT_EQ(ReasonOf(Deliver(*client, milliseconds(700), /*patient=*/true)), Reason::kPeerLost);
  EXPECT_GT(Clock::Real().Now() - start, milliseconds(100));
  EXPECT_LT(Clock::Real().Now() - start, seconds(10));
}

TEST(PeerClientTest, PatientDeliveryReachesAPeerThatStartsLater) {
  const int port = FreePort();
  auto client = MakeClient(port);
  auto answer = std::make_shared<std::promise<absl::Status>>();
  client->Deliver(1, Record(), Clock::Real().Now() + seconds(30), /*patient=*/true,
                  [answer](const absl::Status& status) { answer->set_value(status); });
  std::future<absl::Status> future = answer->get_future();
  EXPECT_EQ(future.wait_for(milliseconds(300)), std::future_status::timeout);
  FakeEngine engine;
  const std::unique_ptr<Server> server = StartServer(engine, port);
  ASSERT_EQ(future.wait_for(seconds(30)), std::future_status::ready);
  EXPECT_TRUE(future.get().ok());
}

TEST(PeerClientTest, BrokenConnectionIsPeerLost) {
  FakeEngine engine;
  std::unique_ptr<Server> server = StartServer(engine, FreePort());
  auto client = MakeClient(observe::ParseHostPort(server->bound_address())->port);
  ASSERT_TRUE(Deliver(*client, seconds(20), false).ok());
  server = nullptr;
  EXPECT_EQ(ReasonOf(Deliver(*client, seconds(20), false)), Reason::kPeerLost);
}

TEST(PeerClientTest, DestructionAnswersWhatIsInFlight) {
  for (const bool patient : {false, true}) {
    auto answer = std::make_shared<std::promise<absl::Status>>();
    std::future<absl::Status> future = answer->get_future();
    const absl::StatusOr<int> silent = observe::Listen({"127.0.0.1", 0});  // never answers
    auto client = patient ? MakeClient(FreePort()) : MakeClient(observe::BoundPort(*silent));
    client->Deliver(1, Record(), SteadyTime::max(), patient,
                    [answer](const absl::Status& status) { answer->set_value(status); });
    EXPECT_EQ(future.wait_for(milliseconds(60)), std::future_status::timeout);
    client = nullptr;
    ASSERT_EQ(future.wait_for(seconds(30)), std::future_status::ready);
    EXPECT_EQ(ReasonOf(future.get()), Reason::kCancelled);
    EXPECT_TRUE(TestGate()->WaitUntilEmpty(Clock::Real().Now() + seconds(30)));
    close(*silent);
  }
}

TEST(PeerClientTest, SilentPeerIsATimeout) {
  const absl::StatusOr<int> silent = observe::Listen({"127.0.0.1", 0});
  auto client = MakeClient(observe::BoundPort(*silent));
  EXPECT_EQ(ReasonOf(Deliver(*client, milliseconds(300), false)), Reason::kStepTimeout);
  close(*silent);
}

}  // namespace
}  // namespace expertd::rpc
