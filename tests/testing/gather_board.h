// A bootstrap exchange between ranks that are threads of one process: tests and benchmarks.
#ifndef TESTS_TESTING_GATHER_BOARD_H_
#define TESTS_TESTING_GATHER_BOARD_H_

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/mutex.h"
#include "kernels/ep_backend.h"

namespace expertd::testing {

// The meeting point of the exchanges of one world. Thread-safe.
class GatherBoard {
 public:
  explicit GatherBoard(size_t world) : world_(world) {}

  absl::StatusOr<std::vector<std::string>> Gather(size_t rank, std::string_view stage,
                                                  std::string_view blob, SteadyTime deadline) {
    MutexLock lock(mutex_);
    Stage& entry = stages_[std::string(stage)];
    entry.blobs.resize(world_);
    entry.blobs[rank] = std::string(blob);
    ++entry.arrived;
    changed_.NotifyAll();
    while (entry.arrived < world_) {
      if (Clock::Real().Now() >= deadline) {
        return Error(Reason::kStepTimeout).Text("gather ", stage, ": ", entry.arrived, " came");
      }
      changed_.WaitUntil(mutex_, deadline);
    }
    return entry.blobs;
  }

 private:
  struct Stage {
    std::vector<std::string> blobs;
    size_t arrived = 0;
  };
  const size_t world_;
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, Stage> stages_ ABSL_GUARDED_BY(mutex_);
};

// One rank's end of a board.
class BoardExchange final : public BootstrapExchange {
 public:
  BoardExchange(GatherBoard& board, size_t rank) : board_(board), rank_(rank) {}
  absl::StatusOr<std::vector<std::string>> AllGather(std::string_view stage, std::string_view blob,
                                                     SteadyTime deadline) override {
    return board_.Gather(rank_, stage, blob, deadline);
  }

 private:
  GatherBoard& board_;
  const size_t rank_;
};

}  // namespace expertd::testing

#endif  // TESTS_TESTING_GATHER_BOARD_H_
