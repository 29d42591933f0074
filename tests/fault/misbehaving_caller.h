// Callers that misbehave at random, each with connections of its own, and the count of their
// answers.
#ifndef TESTS_FAULT_MISBEHAVING_CALLER_H_
#define TESTS_FAULT_MISBEHAVING_CALLER_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <map>
#include <memory>
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

inline constexpr int64_t kRanks = 4;
inline constexpr char kNoise[] = "noise";  // the layer of all who misbehave

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

}  // namespace expertd::fault

#endif  // TESTS_FAULT_MISBEHAVING_CALLER_H_
