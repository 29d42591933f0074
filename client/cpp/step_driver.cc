// Sequence counting and what to do after a step that failed.
#include "client/cpp/step_driver.h"

#include <algorithm>

#include "absl/time/clock.h"
#include "base/error.h"
#include "base/ids.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd::client {
namespace {

constexpr int64_t kDefaultBaseTimeoutMs = 30000;
// Beyond the waiting of ranks for each other: transfers and arithmetic of a large step.
constexpr absl::Duration kWorkTime = absl::Seconds(30);
constexpr absl::Duration kAgreePoll = absl::Milliseconds(50);

}  // namespace

absl::Duration DefaultStepTimeout(int64_t base_timeout_ms) {
  const int64_t base = base_timeout_ms > 0 ? base_timeout_ms : kDefaultBaseTimeoutMs;
  return 2 * absl::Milliseconds(base) + kWorkTime;
}

StepDriver::StepDriver(const Group& group, const StepOptions& options)
    : StepDriver(group.clients(), group.infos.front(), options) {
  for (const v1::GroupInfo& info : group.infos) {
    if (info.next_sequence() != next_sequence_) certain_ = false;
  }
}

StepDriver::StepDriver(std::vector<RankClient*> ranks, const v1::GroupInfo& info,
                       const StepOptions& options)
    : ranks_(std::move(ranks)),
      group_id_(info.group_id()),
      epoch_(info.epoch()),
      options_(options),
      next_sequence_(std::max<uint64_t>(1, info.next_sequence())) {
  if (options_.timeout <= absl::ZeroDuration()) {
    options_.timeout = DefaultStepTimeout(info.config().base_timeout_ms());
  }
}

v1::StepHeader StepDriver::NextHeader() const {
  v1::StepHeader header;
  header.set_group_id(group_id_);
  header.set_epoch(epoch_);
  header.set_sequence(next_sequence_);
  header.set_request_id(RandomId());
  return header;
}

absl::Status StepDriver::Begin(CallOptions* options) {
  options->deadline = absl::Now() + options_.timeout;
  options->retry_window = options_.retry_window;
  options->stop = options_.stop;
  if (options_.stop != nullptr && options_.stop->load()) {
    return absl::CancelledError("stopped before the step was sent");
  }
  if (!certain_) RETURN_IF_ERROR(Agree(*options));
  return absl::OkStatus();
}

void StepDriver::End(const std::vector<absl::Status>& statuses) {
  last_sequence_ = next_sequence_++;
  certain_ = std::all_of(statuses.begin(), statuses.end(), [](const absl::Status& status) {
    return FateOf(status) == SequenceFate::kConsumed;
  });
}

absl::Status StepDriver::Agree(const CallOptions& options) {
  for (;;) {
    absl::StatusOr<std::vector<v1::DescribeGroupResponse>> described =
        AskAll(absl::MakeConstSpan(ranks_), v1::DescribeGroupRequest(), options);
    if (!described.ok()) return AddContext(described.status(), "reading the next sequence");
    std::vector<v1::GroupInfo> infos;
    for (auto& response : *described) infos.push_back(std::move(*response.mutable_group()));
    const Agreement agreement = AgreeOn(infos, group_id_, epoch_);
    if (agreement.state == Agreement::State::kAgreed) {
      next_sequence_ = agreement.next_sequence;
      certain_ = true;
      return absl::OkStatus();
    }
    if (agreement.state == Agreement::State::kBroken) {
      return Error(Reason::kGroupBroken)
          .Text("group ", group_id_, " epoch ", epoch_, ": ", agreement.reason,
                "; form the group again");
    }
    if (options.stop != nullptr && options.stop->load()) return absl::CancelledError("stopped");
    if (absl::Now() + kAgreePoll >= options.deadline) {
      return Error(Reason::kStepTimeout)
          .Text("the ranks do not agree on a next sequence: ", agreement.reason,
                "; form the group again");
    }
    absl::SleepFor(kAgreePoll);
  }
}

absl::Status StepDriver::Explain(const char* operation,
                                 const std::vector<absl::Status>& statuses) const {
  const size_t telling = MostTelling(statuses);
  if (telling == kAllOk) return absl::OkStatus();
  return AddContext(statuses[telling], StrCat(operation, " at sequence ", last_sequence_));
}

Agreement AgreeOn(const std::vector<v1::GroupInfo>& infos, const std::string& group_id,
                  uint64_t epoch) {
  Agreement agreement;
  bool equal = true;
  for (const v1::GroupInfo& info : infos) {
    if (info.group_id() != group_id || info.epoch() != epoch) {
      return {
          Agreement::State::kBroken, 0,
          StrCat("a daemon is now in epoch ", info.epoch(), " of group \"", info.group_id(), "\"")};
    }
    if (info.state() != v1::GROUP_STATE_READY) {
      return {Agreement::State::kBroken, 0,
              StrCat("rank ", info.rank(), " is in ", v1::GroupState_Name(info.state()),
                     info.reason().empty() ? "" : ": ", info.reason())};
    }
    equal = equal && info.next_sequence() == infos.front().next_sequence();
    agreement.next_sequence = std::max(agreement.next_sequence, info.next_sequence());
    StrAppend(&agreement.reason, agreement.reason.empty() ? "" : ", ", "rank ", info.rank(),
              " is at ", info.next_sequence());
  }
  if (equal) agreement.state = Agreement::State::kAgreed;
  return agreement;
}

}  // namespace expertd::client
