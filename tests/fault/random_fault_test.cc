// Callers that send garbage, duplicate, reorder, cancel, time out and disconnect, beside one that
// trains: its weights end as those of a quiet run, bit for bit, and no call outlives its deadline.
//
// EXPERTD_FAULT_SECONDS is how long (default 10), EXPERTD_FAULT_SEED what is drawn. Prints how
// often each reason was answered.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "tests/integration/process_test.h"
#include "tests/testing/spoil.h"

namespace expertd::fault {
namespace {

using integration::AsStatus;
using integration::kLayer;
using integration::ProcessTest;
using integration::Soon;

constexpr int64_t kRanks = 4;
constexpr int kCallers = 3;
constexpr int kSteps = 6;                           // of one training, between two comparisons
constexpr char kNoise[] = "noise";                  // the layer of all others
constexpr int64_t kTimeoutMs = 3000;                // how long ranks wait for each other
constexpr absl::Duration kLate = absl::Seconds(1);  // after a deadline
constexpr absl::Duration kStepPatience =
    absl::Seconds(90);  // for one training step, retries and all

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoll(text) : otherwise;
}

// How often each reason was answered, and the latest answer after a deadline. Thread-safe.
class Tally {
 public:
  void Count(const absl::Status& status, absl::Time deadline) {
    const absl::Duration late = absl::Now() - deadline;
    std::lock_guard lock(mutex_);
    ++counts_[status.ok() ? "OK"
                          : StrCat(absl::StatusCodeToString(status.code()), " ",
                                   ReasonName(ReasonOf(status)))];
    latest_ = std::max(latest_, late);
  }
  absl::Duration latest() {
    std::lock_guard lock(mutex_);
    return latest_;
  }
  void Print() {
    std::lock_guard lock(mutex_);
    for (const auto& [reason, count] : counts_) std::printf("%9lld  %s\n", count, reason.c_str());
  }

 private:
  std::mutex mutex_;
  std::map<std::string, long long> counts_;
  absl::Duration latest_ = -absl::InfiniteDuration();
};

// One misbehaving caller with connections of its own.
class Caller {
 public:
  Caller(std::vector<std::string> hosts, uint64_t seed, Tally& tally,
         std::vector<v1::ForwardRequest> forwards)
      : hosts_(std::move(hosts)), random_(seed), tally_(tally), forwards_(std::move(forwards)) {
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      clients_.push_back(std::make_unique<client::RankClient>(
          client::Origin{.rank = rank, .address = hosts_[static_cast<size_t>(rank)]}));
    }
  }

  void Act() {
    switch (Below(9)) {
      case 0:
        return Collective(Below(4) == 0 ? AllRanks() : SomeRanks(), /*ahead=*/0);
      case 1: {  // a duplicate beside the first
        const std::vector<int64_t> ranks = AllRanks();
        const v1::StepHeader header = Header(0);
        std::thread again([&] { CallForward(ranks, header, Deadline()); });
        CallForward(ranks, header, Deadline());
        again.join();
        return;
      }
      case 2: {  // the later one first
        const std::vector<int64_t> ranks = AllRanks();
        const v1::StepHeader now = Header(0);
        v1::StepHeader next = now;
        next.set_sequence(now.sequence() + 1);
        next.set_request_id(now.request_id() + 1);
        std::thread later([&] { CallForward(ranks, next, Deadline()); });
        absl::SleepFor(absl::Milliseconds(Below(10)));
        CallForward(ranks, now, Deadline());
        later.join();
        return;
      }
      case 3:
        return Cancelled();
      case 4:
        return Spoilt();
      case 5:
        return Disconnect();
      case 6:
        return Garbage();
      case 7:
        return Control();
      default:
        return OtherOperation();
    }
  }

 private:
  uint64_t Below(uint64_t bound) { return random_() % bound; }
  absl::Time Deadline() { return absl::Now() + absl::Milliseconds(20 + Below(500)); }
  client::RankClient& Client(int64_t rank) { return *clients_[static_cast<size_t>(rank)]; }
  static std::vector<int64_t> AllRanks() { return {0, 1, 2, 3}; }
  std::vector<int64_t> SomeRanks() {
    std::vector<int64_t> ranks;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      if (Below(3) != 0) ranks.push_back(rank);
    }
    return ranks;
  }

  // What a caller sees of the group; an old epoch once in a while.
  v1::StepHeader Header(uint64_t ahead) {
    v1::StepHeader header;
    const absl::Time deadline = absl::Now() + absl::Seconds(2);
    const auto described =
        Client(static_cast<int64_t>(Below(kRanks)))
            .Call(v1::DescribeGroupRequest(), {.deadline = deadline, .retry_window = {}});
    tally_.Count(described.status(), deadline);
    if (!described.ok()) return header;
    header.set_group_id(described->group().group_id());
    header.set_epoch(described->group().epoch() - (Below(20) == 0 ? 1 : 0));
    header.set_sequence(described->group().next_sequence() + ahead);
    header.set_request_id(1 + random_() / 2);
    return header;
  }

  void CallForward(const std::vector<int64_t>& ranks, const v1::StepHeader& header,
                   absl::Time deadline) {
    std::vector<client::RankClient*> clients;
    std::vector<v1::ForwardRequest> requests;
    for (int64_t rank : ranks) {
      clients.push_back(&Client(rank));
      requests.push_back(forwards_[static_cast<size_t>(rank)]);
      *requests.back().mutable_header() = header;
    }
    if (clients.empty()) return;
    const auto replies =
        client::CallAll(absl::MakeConstSpan(clients), requests,
                        client::CallOptions{.deadline = deadline, .retry_window = {}});
    for (const absl::Status& status : replies.statuses) tally_.Count(status, deadline);
  }
  void Collective(const std::vector<int64_t>& ranks, uint64_t ahead) {
    CallForward(ranks, Header(ahead), Deadline());
  }

  // Given up by the caller long before its deadline.
  void Cancelled() {
    std::atomic<bool> stop = false;
    const absl::Time deadline = absl::Now() + absl::Seconds(5);
    v1::ForwardRequest request = forwards_[0];
    *request.mutable_header() = Header(0);
    std::thread canceller([&, after = Below(30)] {
      absl::SleepFor(absl::Milliseconds(after));
      stop = true;
    });
    const auto answer =
        Client(0).Call(request, {.deadline = deadline, .retry_window = {}, .stop = &stop});
    tally_.Count(answer.status(), deadline);
    canceller.join();
  }

  // One field wrong on one rank; the others' requests are right.
  void Spoilt() {
    const v1::StepHeader header = Header(0);
    v1::ForwardRequest valid = forwards_[1];
    *valid.mutable_header() = header;
    const std::vector<testing::Spoilt> spoilt = testing::SpoilEveryField(valid);
    const auto& wrong =
        static_cast<const v1::ForwardRequest&>(*spoilt[Below(spoilt.size())].request);
    const absl::Time deadline = Deadline();
    std::thread others([&] { CallForward({0, 2, 3}, header, deadline); });
    const auto answer = Client(1).Call(wrong, {.deadline = deadline, .retry_window = {}});
    tally_.Count(answer.status(), deadline);
    others.join();
  }

  // A connection that goes away with a call in flight.
  void Disconnect() {
    const v1::StepHeader header = Header(0);
    v1::ForwardRequest request = forwards_[2];
    *request.mutable_header() = header;
    auto channel = grpc::CreateCustomChannel(hosts_[2], grpc::InsecureChannelCredentials(), [] {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      return arguments;
    }());
    auto stub = v1::StepService::NewStub(channel);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(5)));
    v1::ForwardResponse response;
    std::atomic<bool> done = false;
    stub->async()->Forward(&context, &request, &response, [&](grpc::Status) { done = true; });
    absl::SleepFor(absl::Milliseconds(Below(20)));
    context.TryCancel();
    stub.reset();
    channel.reset();
    while (!done) absl::SleepFor(absl::Milliseconds(1));
  }

  // Bytes that are no message.
  void Garbage() {
    static constexpr std::array<const char*, 5> kMethods = {
        "/expertd.v1.StepService/Forward", "/expertd.v1.StepService/Backward",
        "/expertd.v1.ControlService/JoinGroup", "/expertd.v1.LayerService/CreateLayer",
        "/expertd.v1.PeerService/Deliver"};
    std::string bytes(Below(200), '\0');
    for (char& c : bytes) c = static_cast<char>(random_());
    grpc::GenericStub stub(
        grpc::CreateChannel(hosts_[Below(kRanks)], grpc::InsecureChannelCredentials()));
    grpc::Slice slice(bytes);
    grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    grpc::ClientContext context;
    const absl::Time deadline = absl::Now() + absl::Seconds(2);
    context.set_deadline(absl::ToChronoTime(deadline));
    std::atomic<bool> done = false;
    grpc::Status status;
    stub.UnaryCall(&context, kMethods[Below(kMethods.size())], {}, &request, &response,
                   [&](grpc::Status answer) {
                     status = std::move(answer);
                     done = true;
                   });
    while (!done) absl::SleepFor(absl::Milliseconds(1));
    tally_.Count(
        absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message()),
        deadline);
  }

  // Control calls that must change nothing.
  void Control() {
    const v1::StepHeader header = Header(0);
    const auto rank = static_cast<int64_t>(Below(kRanks));
    const absl::Time deadline = absl::Now() + absl::Seconds(2);
    const client::CallOptions options = {.deadline = deadline, .retry_window = {}};
    v1::LeaveGroupRequest leave;
    leave.set_group_id(header.group_id());
    leave.set_epoch(header.epoch() - 1);
    v1::CreateBootstrapIdRequest claim;
    claim.set_group_id(header.group_id());
    claim.set_epoch(header.epoch() - Below(3));
    claim.set_claimant("fault");
    v1::WatchGroupRequest watch;
    watch.set_timeout_ms(static_cast<int64_t>(Below(50)));
    v1::JoinGroupRequest join;
    join.set_group_id(header.group_id());
    join.set_epoch(header.epoch() - 1);
    switch (Below(5)) {
      case 0:
        return tally_.Count(Client(rank).Call(leave, options).status(), deadline);
      case 1:
        return tally_.Count(Client(rank).Call(claim, options).status(), deadline);
      case 2:
        return tally_.Count(Client(rank).Call(watch, options).status(), deadline);
      case 3:
        return tally_.Count(Client(rank).Call(join, options).status(), deadline);
      default:
        return tally_.Count(Client(rank).Call(v1::GetServerInfoRequest(), options).status(),
                            deadline);
    }
  }

  // Other collectives on the layer of noise, from all ranks or some.
  void OtherOperation() {
    const v1::StepHeader header = Header(0);
    const absl::Time deadline = Deadline();
    const client::CallOptions options = {.deadline = deadline, .retry_window = {}};
    v1::ClearGradientsRequest clear;
    clear.set_layer_id(kNoise);
    *clear.mutable_header() = header;
    v1::ApplyGradientsRequest apply;
    apply.set_layer_id(kNoise);
    apply.set_expected_version(Below(3));
    *apply.mutable_header() = header;
    std::vector<std::thread> threads;
    const bool first = Below(2) == 0;
    for (int64_t rank : Below(2) == 0 ? AllRanks() : SomeRanks()) {
      threads.emplace_back([&, rank] {
        tally_.Count(first ? Client(rank).Call(clear, options).status()
                           : Client(rank).Call(apply, options).status(),
                     deadline);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  const std::vector<std::string> hosts_;
  std::mt19937_64 random_;
  Tally& tally_;
  const std::vector<v1::ForwardRequest> forwards_;
  std::vector<std::unique_ptr<client::RankClient>> clients_;
};

class RandomFaultTest : public ProcessTest {
 protected:
  void SetUp() override {
    StartAndForm(kRanks, kTimeoutMs);
    ASSERT_FALSE(HasFailure());
    MakeLayer(kLayer);
    MakeLayer(kNoise);
  }

  bool InTime() const { return absl::Now() < step_deadline_; }

  // Forms a new epoch if the group is not ready any more.
  void Mend() {
    while (InTime()) {
      const auto group = client::Attach(processes().hosts(), Soon());
      if (group.ok() && group->epoch() == this->group().epoch()) return;
      const auto formed =
          client::Up(UpRequestOf(processes().hosts(), Config(kRanks, kTimeoutMs)), Soon());
      if (!formed.ok()) continue;
      Form(processes().hosts(), Config(kRanks, kTimeoutMs));
      return;
    }
  }

  // Until all ranks have done it.
  template <typename Request>
  void Insist(const Request& request) {
    while (InTime()) {
      driver().Distrust();
      const auto responses = driver().RunSame(request);
      if (responses.ok()) return;
      Mend();
    }
    FAIL() << client::Method<Request>::kName << " never came through";
  }

  uint64_t VersionOf(int64_t rank) {
    const auto layers = this->rank(rank).Call(v1::ListLayersRequest(), Soon());
    EXPECT_TRUE(layers.ok()) << layers.status();
    if (!layers.ok()) return 0;
    for (const v1::LayerInfo& layer : layers->layers()) {
      if (layer.layer_id() == kLayer) return layer.weights_version();
    }
    return 0;
  }

  // One update from `version`, however often it must be tried; exactly once all the same.
  void TrainStep(uint64_t version) {
    step_deadline_ = absl::Now() + kStepPatience;
    for (;; ++tries_) {
      ASSERT_TRUE(InTime()) << "step from version " << version << " makes no progress";
      uint64_t lowest = UINT64_MAX;
      uint64_t highest = 0;
      for (int64_t rank = 0; rank < kRanks; ++rank) {
        lowest = std::min(lowest, VersionOf(rank));
        highest = std::max(highest, VersionOf(rank));
      }
      ASSERT_EQ(lowest, highest) << "an apply ended on some ranks only";
      if (lowest == version + 1) return;
      ASSERT_EQ(lowest, version);
      v1::ClearGradientsRequest clear;
      clear.set_layer_id(kLayer);
      Insist(clear);
      if (HasFatalFailure()) return;
      if (!TryStep(version)) Mend();
    }
  }

  bool TryStep(uint64_t version) {
    std::vector<v1::ForwardRequest> forwards;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      forwards.push_back(Forward(rank, 2 + static_cast<int64_t>(version % 3), kLayer));
      forwards.back().set_keep_for_backward(true);
    }
    const auto outputs = driver().Run(forwards);
    if (!outputs.ok()) return false;
    std::vector<v1::BackwardRequest> backwards(kRanks);
    for (size_t rank = 0; rank < backwards.size(); ++rank) {
      backwards[rank].set_ticket((*outputs)[rank].ticket());
      *backwards[rank].mutable_output_gradient() = (*outputs)[rank].output();
    }
    if (!driver().Run(backwards).ok()) return false;
    v1::ApplyGradientsRequest apply;
    apply.set_layer_id(kLayer);
    apply.set_expected_version(version);
    apply.set_learning_rate(0.05);
    return driver().RunSame(apply).ok();
  }

  // Trains kSteps steps from the same start; returns the weights of all ranks as bytes.
  std::string Train() {
    step_deadline_ = absl::Now() + kStepPatience;
    v1::InitializeWeightsRequest initialize;
    initialize.set_layer_id(kLayer);
    initialize.set_seed(11);
    Insist(initialize);
    for (uint64_t step = 1; step <= kSteps && !HasFatalFailure(); ++step) TrainStep(step);
    std::string weights;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      for (const char* parameter : {"gate_up", "down"}) {
        v1::GetParameterRequest request;
        request.set_layer_id(kLayer);
        request.set_parameter(parameter);
        request.set_kind(v1::PARAMETER_KIND_MASTER);
        const auto shard = this->rank(rank).GetParameter(request, absl::Now() + absl::Seconds(40));
        EXPECT_TRUE(shard.ok()) << shard.status();
        if (shard.ok()) weights += shard->tensor.data();
      }
    }
    return weights;
  }

  int64_t tries_ = 0;
  absl::Time step_deadline_ = absl::InfiniteFuture();
};

TEST_F(RandomFaultTest, ATrainerAmongMisbehavingCallersEndsAtTheWeightsOfAQuietRun) {
  const std::string quiet = Train();
  ASSERT_FALSE(HasFailure());
  const int64_t seed = FromEnvironment("EXPERTD_FAULT_SEED", 1);
  const absl::Time end = absl::Now() + absl::Seconds(FromEnvironment("EXPERTD_FAULT_SECONDS", 10));
  std::printf("seed %lld\n", static_cast<long long>(seed));
  Tally tally;
  std::atomic<bool> stop = false;
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) {
    callers.emplace_back([&, i, forwards = Forwards(kNoise), hosts = processes().hosts()] {
      Caller caller(hosts, static_cast<uint64_t>(seed * 100 + i), tally, forwards);
      while (!stop) {
        caller.Act();
        absl::SleepFor(absl::Milliseconds(20));
      }
    });
  }
  int trainings = 0;
  do {
    const std::string weights = Train();
    EXPECT_EQ(weights == quiet, true) << "training " << trainings << " ended at other weights";
    ++trainings;
  } while (!HasFailure() && absl::Now() < end);
  stop = true;
  for (std::thread& caller : callers) caller.join();
  tally.Print();
  std::printf("%d trainings of %d steps equal to the quiet one, %lld steps tried again\n",
              trainings, kSteps, static_cast<long long>(tries_));
  std::printf("latest answer %s after its deadline\n",
              absl::FormatDuration(tally.latest()).c_str());
  EXPECT_LE(tally.latest(), kLate);
  step_deadline_ = absl::Now() + kStepPatience;
  Mend();
  driver().Distrust();
  EXPECT_EQ(Outputs(kLayer).size(), static_cast<size_t>(kRanks));
}

}  // namespace
}  // namespace expertd::fault
