// nccl_lsa between two processes: one is stopped for two seconds, then killed; the other goes on.
//
// The test runs this binary twice more, one process a rank; they meet through files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
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

using std::chrono::milliseconds;

constexpr int64_t kWorld = 2;
constexpr char kRankVariable[] = "EXPERTD_TEST_RANK";
constexpr char kFolderVariable[] = "EXPERTD_TEST_FOLDER";

SteadyTime In(milliseconds delay) { return Clock::Real().Now() + delay; }

class Rank {
 public:
  Rank(EpBackend& ep, int64_t rank) : ep_(ep), rank_(rank) {}

  // Dispatched rows and their sums, bit for bit.
  void GoodStep(uint32_t seed) {
    const Problem problem = MakeProblem({.name = "good",
                                         .experts_per_rank = 8,
                                         .top_k = 4,
                                         .alignment = 16,
                                         .hidden = 264,
                                         .tokens = {300, 257},
                                         .seed = seed},
                                        kWorld);
    const Layout layout = BuildLayout(problem);
    const auto index = static_cast<size_t>(rank_);
    const RankInput& input = problem.ranks[index];
    const std::vector<SlotSource>& slots = layout.slots[index];
    auto handle = ep_.Prepare(
        Next(),
        {{input.ids.data(), DType::kI64, input.tokens, problem.top_k}, problem.experts, 16});
    ASSERT_TRUE(handle.ok()) << handle.status();
    TestMatrix x = TokenRows(problem, rank_, DType::kBF16, seed);
    TestMatrix recv(DType::kBF16, static_cast<int64_t>(slots.size()), 264);
    absl::Status status = ep_.Dispatch(Next(), **handle, x.view(), nullptr, recv.view(), nullptr);
    ASSERT_TRUE(status.ok()) << status;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      const auto row = static_cast<int64_t>(slot);
      if (slots[slot].source < 0) {
        ASSERT_TRUE(recv.RowIs(row, std::byte{0}));
        continue;
      }
      for (int64_t h = 0; h < 264; ++h) {
        ASSERT_EQ(recv.Get(row, h), RowValue(slots[slot].source, slots[slot].token, h, seed));
      }
    }
    TestMatrix y(DType::kBF16, input.tokens, 264);
    status = ep_.Combine(Next(), **handle, recv.view(), nullptr, y.view());
    ASSERT_TRUE(status.ok()) << status;
    for (int64_t t = 0; t < input.tokens; ++t) {
      for (int64_t h = 0; h < 264; ++h) ASSERT_EQ(y.Get(t, h), 4 * x.Get(t, h));
    }
  }

  absl::Status Reduce(milliseconds bound) {
    std::vector<float> data(1000, 1.0f);
    return ep_.AllReduceSum({.sequence = ++sequence_, .deadline = In(bound)}, data.data(), 1000);
  }
  // Sequences that the ranks did not use alike are over.
  void ContinueAfter(uint64_t sequence) { sequence_ = sequence; }

 private:
  OpContext Next() { return {.sequence = ++sequence_, .deadline = In(std::chrono::seconds(20))}; }

  EpBackend& ep_;
  const int64_t rank_;
  uint64_t sequence_ = 0;
};

// Rank 0 stops rank 1 and waits for it in vain.
void OutwaitStoppedPeer(Rank& self, pid_t peer) {
  ASSERT_EQ(kill(peer, SIGSTOP), 0);
  const SteadyTime start = Clock::Real().Now();
  const absl::Status status = self.Reduce(milliseconds(300));
  EXPECT_TRUE(HasReason(status, Reason::kStepTimeout)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("waiting for rank 1"));
  EXPECT_LT(ToSeconds(Clock::Real().Now() - start), 1);
  std::this_thread::sleep_until(start + std::chrono::seconds(2));
  ASSERT_EQ(kill(peer, SIGCONT), 0);
}

// Not a test of its own: what the two processes run.
TEST(LsaProcesses, DISABLED_Rank) {
  const char* rank_text = std::getenv(kRankVariable);
  const char* folder = std::getenv(kFolderVariable);
  ASSERT_TRUE(rank_text != nullptr && folder != nullptr);
  const int64_t rank = std::atoi(rank_text);
  auto device = CreateDevice(StrCat("cuda:", rank));
  ASSERT_TRUE(device.ok()) << device.status();
  FileExchange exchange(folder, rank, kWorld);
  const EpGroupConfig config = {.rank = rank,
                                .world = kWorld,
                                .max_tokens_per_rank = 300,
                                .max_recv_rows = 1 << 16,
                                .max_hidden = 264,
                                .max_top_k = 4,
                                .max_experts = 16};
  auto made =
      CreateEpBackend("nccl_lsa", **device, config,
                      {.epoch = 7, .exchange = &exchange, .deadline = In(milliseconds(40000))});
  ASSERT_TRUE(made.ok()) << made.status();
  StagedEp ep(**device, *std::move(made));
  Rank self(ep, rank);
  self.GoodStep(1);
  // From now on a sum's window part holds something that a stopped rank may still read.
  EXPECT_TRUE(self.Reduce(milliseconds(5000)).ok());
  const auto pids = exchange.AllGather("pids", StrCat(getpid()), In(milliseconds(20000)));
  ASSERT_TRUE(pids.ok()) << pids.status();
  const pid_t peer = std::atoi((*pids)[1].c_str());
  if (rank == 0) OutwaitStoppedPeer(self, peer);
  ASSERT_TRUE(exchange.AllGather("resumed", "", In(milliseconds(20000))).ok());
  if (rank == 1) {
    const absl::Status late = self.Reduce(milliseconds(5000));
    EXPECT_TRUE(HasReason(late, Reason::kPeerLost)) << late;
  }
  for (uint32_t seed = 2; seed < 6; ++seed) {
    self.ContinueAfter(100 * seed);
    self.GoodStep(seed);
  }
  ASSERT_TRUE(exchange.AllGather("last", "", In(milliseconds(20000))).ok());
  // A rank that has found something wrong must say so, and not end as if killed.
  if (rank == 1 && HasFailure()) return;
  if (rank == 1) raise(SIGKILL);
  const SteadyTime start = Clock::Real().Now();
  EXPECT_TRUE(HasReason(self.Reduce(milliseconds(500)), Reason::kStepTimeout));
  ep.Abort();
  EXPECT_LT(ToSeconds(Clock::Real().Now() - start), 8);
}

TEST(LsaProcesses, AStoppedRankIsOutwaitedAndTheNextSequenceWorks) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / StrCat("expertd_lsa_", getpid());
  std::filesystem::create_directories(folder);
  std::vector<pid_t> children;
  for (int64_t rank = 0; rank < kWorld; ++rank) {
    const std::string rank_text = StrCat(rank);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      setenv(kRankVariable, rank_text.c_str(), 1);
      setenv(kFolderVariable, folder.c_str(), 1);
      execl("/proc/self/exe", "rank", "--gtest_filter=LsaProcesses.DISABLED_Rank",
            "--gtest_also_run_disabled_tests", static_cast<char*>(nullptr));
      _exit(127);
    }
    children.push_back(child);
  }
  for (int64_t rank = 0; rank < kWorld; ++rank) {
    int state = 0;
    ASSERT_EQ(waitpid(children[static_cast<size_t>(rank)], &state, 0),
              children[static_cast<size_t>(rank)]);
    if (rank == 0) {
      EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << "state " << state;
    } else {
      EXPECT_TRUE(WIFSIGNALED(state) && WTERMSIG(state) == SIGKILL) << "state " << state;
    }
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace expertd::conformance
