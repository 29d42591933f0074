// Marks become durations; see stage_clock.h.
#include "server/engine/stage_clock.h"

#include <algorithm>

#include "base/status_macros.h"

namespace expertd::engine {

absl::Status StageClock::Enter(Device& device, Stage stage) {
  if (entries_.empty()) {
    start_ = Clock::Real().Now();
    device.ForgetMarks();
  }
  ASSIGN_OR_RETURN(const int64_t mark, device.Mark());
  entries_.push_back({stage, mark});
  return absl::OkStatus();
}

absl::Status StageClock::Finish(Device& device, StepStats& stats) {
  if (entries_.empty()) return absl::OkStatus();
  // stage_out ends on the host, in the request's result: what the step took less what came before.
  const bool ends_on_host = entries_.back().stage == &StepStats::stage_out_us;
  if (!ends_on_host) {
    ASSIGN_OR_RETURN(const int64_t end, device.Mark());
    entries_.push_back({nullptr, end});
  }
  double before = 0;
  for (size_t i = 0; i + 1 < entries_.size(); ++i) {
    ASSIGN_OR_RETURN(const double micros,
                     device.MicrosBetween(entries_[i].mark, entries_[i + 1].mark));
    stats.*entries_[i].stage += static_cast<int64_t>(micros);
    before += micros;
  }
  if (ends_on_host) {
    const double all = ToMicros(Clock::Real().Now() - start_);
    stats.stage_out_us += static_cast<int64_t>(std::max(0.0, all - before));
  }
  entries_.clear();
  return absl::OkStatus();
}

}  // namespace expertd::engine
