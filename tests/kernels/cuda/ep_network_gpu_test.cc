// Two ranks that look like two hosts to NCCL: the network path, on one GPU, one process a rank.
//
// The test runs this binary twice more, with another NCCL_HOSTID and rank each; both do the same
// steps and exchange blobs through files. NCCL takes two ranks on one GPU only because it believes
// in two hosts.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "base/error.h"
#include "base/strings.h"
#include "kernels/backends.h"
#include "tests/conformance/ep/ep_model.h"
#include "tests/conformance/ep/staged_ep.h"
#include "tests/kernels/cuda/file_exchange.h"

namespace expertd::conformance {
namespace {

constexpr int64_t kWorld = 2;
constexpr char kRankVariable[] = "EXPERTD_TEST_RANK";
constexpr char kFolderVariable[] = "EXPERTD_TEST_FOLDER";

SteadyTime Soon(int seconds) { return Clock::Real().Now() + std::chrono::seconds(seconds); }

// One rank's side of one scenario.
class Rank {
 public:
  Rank(EpBackend& ep, int64_t rank) : ep_(ep), rank_(rank) {}

  void RunScenario(const Scenario& scenario, DType dtype) {
    SCOPED_TRACE(scenario.name);
    const Problem problem = MakeProblem(scenario, kWorld);
    const Layout layout = BuildLayout(problem);
    const auto index = static_cast<size_t>(rank_);
    const RankInput& input = problem.ranks[index];
    const std::vector<SlotSource>& slots = layout.slots[index];
    auto handle = ep_.Prepare(Next(), {{input.ids.data(), DType::kI64, input.tokens, problem.top_k},
                                       problem.experts,
                                       scenario.alignment});
    ASSERT_TRUE(handle.ok()) << handle.status();
    EXPECT_EQ((*handle)->counts().padded_per_expert, layout.counts[index].padded_per_expert);
    ASSERT_EQ((*handle)->counts().total, static_cast<int64_t>(slots.size()));

    TestMatrix x = TokenRows(problem, rank_, dtype, 7);
    TestMatrix recv(dtype, static_cast<int64_t>(slots.size()) + 4, scenario.hidden);
    std::vector<float> recv_w(slots.size() + 4, -77.0f);
    absl::Status status =
        ep_.Dispatch(Next(), **handle, x.view(), input.weights.data(), recv.view(), recv_w.data());
    ASSERT_TRUE(status.ok()) << status;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      const auto row = static_cast<int64_t>(slot);
      const SlotSource& from = slots[slot];
      if (from.source < 0) {
        ASSERT_TRUE(recv.RowIs(row, std::byte{0}));
        ASSERT_EQ(recv_w[slot], 0.0f);
        continue;
      }
      for (int64_t h = 0; h < scenario.hidden; ++h) {
        ASSERT_EQ(recv.Get(row, h), RowValue(from.source, from.token, h, 7)) << "slot " << slot;
      }
      ASSERT_EQ(recv_w[slot],
                problem.ranks[static_cast<size_t>(from.source)]
                    .weights[static_cast<size_t>(from.token * problem.top_k + from.k)]);
    }
    TestMatrix y(dtype, input.tokens, scenario.hidden);
    std::vector<float> routes(input.ids.size(), -77.0f);
    status =
        ep_.DispatchBackward(Next(), **handle, recv.view(), recv_w.data(), y.view(), routes.data());
    ASSERT_TRUE(status.ok()) << status;
    for (size_t i = 0; i < routes.size(); ++i) {
      ASSERT_EQ(routes[i], input.ids[i] < 0 ? 0.0f : input.weights[i]);
    }
    for (int64_t t = 0; t < input.tokens; ++t) {
      const auto begin = input.ids.begin() + t * problem.top_k;
      const auto valid = static_cast<double>(
          std::count_if(begin, begin + problem.top_k, [](int64_t id) { return id >= 0; }));
      for (int64_t h = 0; h < scenario.hidden; ++h) {
        ASSERT_EQ(y.Get(t, h), valid * RowValue(rank_, t, h, 7));
      }
    }
  }

  void ReduceInRankOrder(int64_t count) {
    std::vector<float> own;
    std::vector<float> expected;
    for (int64_t i = 0; i < count; ++i) {
      const auto of = [&](int64_t rank) { return static_cast<float>(RowValue(rank, i, 5, 1)) / 7; };
      own.push_back(of(rank_));
      expected.push_back(of(0) + of(1));
    }
    const absl::Status status = ep_.AllReduceSum(Next(), own.data(), count);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(own, expected);
  }

  // The peer does not come: Cancel ends the wait, the communicator is given up, the device works
  // on.
  void WaitAloneUntilCancelled() {
    const OpContext context = Next();
    SteadyTime start;
    std::thread canceller([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      start = Clock::Real().Now();
      ep_.Cancel(context.sequence);
    });
    std::vector<float> data(1000, 1.0f);
    const absl::Status status = ep_.AllReduceSum(context, data.data(), 1000);
    const SteadyTime ended = Clock::Real().Now();
    canceller.join();
    EXPECT_TRUE(HasReason(status, Reason::kCancelled)) << status;
    EXPECT_LT(ToMicros(ended - start), 2000);
    EXPECT_TRUE(HasReason(ep_.AllReduceSum(Next(), data.data(), 1000), Reason::kGroupBroken));
    const SteadyTime abort = Clock::Real().Now();
    ep_.Abort();
    EXPECT_LT(ToSeconds(Clock::Real().Now() - abort), 5);
    EXPECT_TRUE(HasReason(ep_.AllReduceSum(Next(), data.data(), 1000), Reason::kGroupBroken));
  }

 private:
  OpContext Next() { return {.sequence = ++sequence_, .deadline = Soon(20)}; }

  EpBackend& ep_;
  const int64_t rank_;
  uint64_t sequence_ = 0;
};

// Not a test of its own: what the two processes run.
TEST(NcclNetwork, DISABLED_Rank) {
  const char* rank_text = std::getenv(kRankVariable);
  const char* folder = std::getenv(kFolderVariable);
  ASSERT_TRUE(rank_text != nullptr && folder != nullptr);
  const int64_t rank = std::atoi(rank_text);
  auto device = CreateDevice("cuda:0");
  ASSERT_TRUE(device.ok()) << device.status();
  FileExchange exchange(folder, rank, kWorld);
  const EpGroupConfig config = {.rank = rank,
                                .world = kWorld,
                                .max_tokens_per_rank = 4096,
                                .max_recv_rows = 1 << 20,
                                .max_hidden = 4096,
                                .max_top_k = 64,
                                .max_experts = 1024};
  auto made =
      CreateEpBackend("nccl", **device, config, {.exchange = &exchange, .deadline = Soon(40)});
  ASSERT_TRUE(made.ok()) << made.status();
  StagedEp ep(**device, *std::move(made));
  Rank self(ep, rank);
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    self.RunScenario({.name = "plain", .hidden = 7, .tokens = {9, 4}}, dtype);
    self.RunScenario(
        {.name = "holes", .top_k = 3, .alignment = 8, .tokens = {21, 30}, .routes = Routes::kHoles},
        dtype);
    self.RunScenario({.name = "many",
                      .experts_per_rank = 64,
                      .top_k = 8,
                      .alignment = 128,
                      .hidden = 256,
                      .tokens = {300, 257}},
                     dtype);
    self.RunScenario({.name = "one_side", .tokens = {8}, .routes = Routes::kNotToLastRank}, dtype);
    self.RunScenario({.name = "no_tokens", .alignment = 4, .tokens = {0, 9}}, dtype);
    self.RunScenario({.name = "nobody", .tokens = {0}}, dtype);
    if (HasFatalFailure()) break;
  }
  for (int64_t count : {1, 1000, 100003}) self.ReduceInRankOrder(count);
  // Nobody leaves while the other still talks.
  ASSERT_TRUE(exchange.AllGather("done", "", Soon(20)).ok());
  if (rank == 0) self.WaitAloneUntilCancelled();
  ASSERT_TRUE(exchange.AllGather("left", "", Soon(20)).ok());
}

TEST(NcclNetwork, TwoHostsAgreeBitForBit) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / StrCat("expertd_network_", getpid());
  std::filesystem::create_directories(folder);
  std::vector<pid_t> children;
  for (int64_t rank = 0; rank < kWorld; ++rank) {
    const std::string rank_text = StrCat(rank);
    const std::string host = StrCat("host", rank);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      setenv(kRankVariable, rank_text.c_str(), 1);
      setenv(kFolderVariable, folder.c_str(), 1);
      setenv("NCCL_HOSTID", host.c_str(), 1);
      setenv("NCCL_P2P_DISABLE", "1", 1);
      setenv("NCCL_SHM_DISABLE", "1", 1);
      execl("/proc/self/exe", "rank", "--gtest_filter=NcclNetwork.DISABLED_Rank",
            "--gtest_also_run_disabled_tests", static_cast<char*>(nullptr));
      _exit(127);
    }
    children.push_back(child);
  }
  for (pid_t child : children) {
    int state = 0;
    ASSERT_EQ(waitpid(child, &state, 0), child);
    EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << "state " << state;
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace expertd::conformance
