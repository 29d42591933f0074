// Measures the stages of one step on the device's own timeline, for StepStats.
//
// Stages follow each other without a gap, so that they never add up to more than the step took.
// A GPU runs behind the host: only marks that travel with the work say how long a stage took.
#ifndef SERVER_ENGINE_STAGE_CLOCK_H_
#define SERVER_ENGINE_STAGE_CLOCK_H_

#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "kernels/device.h"
#include "server/engine/operations.h"

namespace expertd::engine {

using Stage = int64_t StepStats::*;

// Device thread only; one step at a time per device.
class StageClock {
 public:
  // What is queued from now on belongs to `stage`. Queues a mark and does not wait.
  absl::Status Enter(Device& device, Stage stage);

  // The last stage ends: adds all durations to `stats`. After stage_out, whose copies the host has
  // waited for, this waits for nothing more; after any other stage it waits for the device.
  absl::Status Finish(Device& device, StepStats& stats);

 private:
  struct Entry {
    Stage stage = nullptr;
    int64_t mark = 0;
  };

  SteadyTime start_;  // the host's, at the first Enter
  absl::InlinedVector<Entry, 12> entries_;
};

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_STAGE_CLOCK_H_
