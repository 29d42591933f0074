// N ranks in one process, each with its own thread, device and EP backend, over a fake bootstrap.
#ifndef TESTS_CONFORMANCE_EP_EP_WORLD_H_
#define TESTS_CONFORMANCE_EP_EP_WORLD_H_

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/strings.h"
#include "kernels/backends.h"
#include "tests/conformance/ep/ep_model.h"
#include "tests/conformance/ep/staged_ep.h"

namespace expertd::conformance {

inline SteadyTime Soon(std::chrono::milliseconds delay) { return Clock::Real().Now() + delay; }

// The meeting point of the fake exchanges of one world.
class GatherBoard {
 public:
  explicit GatherBoard(size_t world) : world_(world) {}

  absl::StatusOr<std::vector<std::string>> Gather(size_t rank, const std::string& stage,
                                                  std::string blob, SteadyTime deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    Stage& entry = stages_[stage];
    entry.blobs.resize(world_);
    entry.blobs[rank] = std::move(blob);
    ++entry.arrived;
    changed_.notify_all();
    if (!changed_.wait_until(lock, deadline, [&] { return entry.arrived == world_; })) {
      return Error(Reason::kStepTimeout).Text("gather ", stage, ": ", entry.arrived, " came");
    }
    return entry.blobs;
  }

 private:
  struct Stage {
    std::vector<std::string> blobs;
    size_t arrived = 0;
  };
  const size_t world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Stage> stages_;
};

class FakeExchange final : public BootstrapExchange {
 public:
  FakeExchange(GatherBoard* board, size_t rank) : board_(board), rank_(rank) {}
  absl::StatusOr<std::vector<std::string>> AllGather(std::string_view stage, std::string_view blob,
                                                     SteadyTime deadline) override {
    return board_->Gather(rank_, std::string(stage), std::string(blob), deadline);
  }

 private:
  GatherBoard* board_;
  size_t rank_;
};

class EpWorld {
 public:
  EpWorld(std::string backend, int64_t world, const EpGroupConfig& base = DefaultConfig())
      : backend_(std::move(backend)), world_(world), board_(static_cast<size_t>(world)) {
    static std::atomic<uint64_t> next_epoch{1};
    const uint64_t epoch = next_epoch++;
    devices_.resize(static_cast<size_t>(world));
    ranks_.resize(static_cast<size_t>(world));
    Run([&](int64_t rank) {
      const auto index = static_cast<size_t>(rank);
      auto device = CreateDevice(backend_.starts_with("nccl") ? StrCat("cuda:", rank) : "cpu");
      ASSERT_TRUE(device.ok()) << device.status();
      devices_[index] = *std::move(device);
      EpGroupConfig config = base;
      config.rank = rank;
      config.world = world_;
      FakeExchange exchange(&board_, index);
      const EpBootstrap bootstrap = {.group_id = "conformance",
                                     .epoch = epoch,
                                     .bootstrap_id = "secret",
                                     .listen_host = "127.0.0.1",
                                     .exchange = &exchange,
                                     .deadline = Soon(std::chrono::seconds(30))};
      auto made = CreateEpBackend(backend_, *devices_[index], config, bootstrap);
      ASSERT_TRUE(made.ok()) << made.status();
      ranks_[index] = *std::move(made);
      if (devices_[index]->facts().kind == "cpu") return;
      ranks_[index] = std::make_unique<StagedEp>(*devices_[index], std::move(ranks_[index]));
    });
  }

  static EpGroupConfig DefaultConfig() {
    return {.max_tokens_per_rank = 4096,
            .max_recv_rows = 1 << 20,
            .max_hidden = 4096,
            .max_top_k = 64,
            .max_experts = 1024,
            .max_token_dtype = DType::kF32};
  }
  // For a scenario that limits capacity.
  static EpGroupConfig ConfigFor(const Scenario& scenario) {
    EpGroupConfig config = DefaultConfig();
    config.capacity_policy = scenario.policy;
    if (scenario.capacity > 0) config.max_recv_rows = scenario.capacity;
    return config;
  }

  int64_t size() const { return world_; }
  EpBackend& rank(int64_t rank) { return *ranks_[static_cast<size_t>(rank)]; }
  // The rank's process is gone.
  void Kill(int64_t rank) { ranks_[static_cast<size_t>(rank)].reset(); }

  // Calls `body` for every rank at once and returns when all have returned.
  void Run(const std::function<void(int64_t rank)>& body) {
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < world_; ++rank) threads.emplace_back([&, rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  }

  // The context of the next collective; the same for all ranks.
  OpContext Next(std::chrono::milliseconds bound = std::chrono::seconds(20)) {
    return {.sequence = ++sequence_, .deadline = Soon(bound)};
  }

 private:
  const std::string backend_;
  const int64_t world_;
  GatherBoard board_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<EpBackend>> ranks_;
  uint64_t sequence_ = 0;
};

inline PrepareArgs ArgsOf(const Problem& problem, int64_t rank) {
  const RankInput& input = problem.ranks[static_cast<size_t>(rank)];
  return {.routing = {input.ids.data(), DType::kI64, input.tokens, problem.top_k},
          .expert_count = problem.experts,
          .alignment = problem.scenario.alignment};
}

using Handles = std::vector<std::unique_ptr<EpHandle>>;

// Prepares on all ranks, expecting success.
inline Handles PrepareAll(EpWorld& world, const Problem& problem) {
  Handles handles(static_cast<size_t>(world.size()));
  const OpContext context = world.Next();
  world.Run([&](int64_t rank) {
    auto handle = world.rank(rank).Prepare(context, ArgsOf(problem, rank));
    ASSERT_TRUE(handle.ok()) << "rank " << rank << ": " << handle.status();
    handles[static_cast<size_t>(rank)] = *std::move(handle);
  });
  return handles;
}

// Slot rows of rank `rank`: what Dispatch of TokenRows(salt) must give; pads and four rows past the
// total are poison.
inline TestMatrix SlotRows(const Problem& problem, const Layout& layout, int64_t rank, DType dtype,
                           uint32_t salt) {
  const std::vector<SlotSource>& slots = layout.slots[static_cast<size_t>(rank)];
  TestMatrix rows(dtype, static_cast<int64_t>(slots.size()) + 4, problem.scenario.hidden);
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    if (slots[slot].source < 0) continue;
    for (int64_t h = 0; h < rows.cols(); ++h) {
      rows.Set(static_cast<int64_t>(slot), h,
               RowValue(slots[slot].source, slots[slot].token, h, salt));
    }
  }
  return rows;
}

// The route weights of the slots of a rank; pads and the tail are poison.
inline std::vector<float> SlotWeights(const Problem& problem, const Layout& layout, int64_t rank) {
  const std::vector<SlotSource>& slots = layout.slots[static_cast<size_t>(rank)];
  std::vector<float> weights(slots.size() + 4, std::bit_cast<float>(0xFFFFFFFFu));
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    const SlotSource& from = slots[slot];
    if (from.source < 0) continue;
    weights[slot] = problem.ranks[static_cast<size_t>(from.source)]
                        .weights[static_cast<size_t>(from.token * problem.top_k + from.k)];
  }
  return weights;
}

}  // namespace expertd::conformance

#endif  // TESTS_CONFORMANCE_EP_EP_WORLD_H_
