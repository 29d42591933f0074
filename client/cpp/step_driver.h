// Drives collective calls: one call per rank under one deadline, and the counting of sequences.
//
//   StepDriver driver(group, {.timeout = absl::Seconds(60), .stop = &stop});
//   auto responses = driver.Run(std::vector<v1::ForwardRequest>{...});  // one per rank
// The driver fills in each request's header. One thread at a time; one driver per group.
#ifndef CLIENT_CPP_STEP_DRIVER_H_
#define CLIENT_CPP_STEP_DRIVER_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/group_controller.h"
#include "client/cpp/rank_client.h"

namespace expertd::client {

struct StepOptions {
  // Of one step, with everything; 0: from the group's base time limit.
  absl::Duration timeout = absl::ZeroDuration();
  // How long a daemon that answers UNAVAILABLE is asked again.
  absl::Duration retry_window = absl::Seconds(2);
  // Cancels the running step on every rank when it turns true; may be null.
  const std::atomic<bool>* stop = nullptr;
};

// The timeout for a group whose ranks may wait `base_timeout_ms` for each other.
absl::Duration DefaultStepTimeout(int64_t base_timeout_ms);

class StepDriver {
 public:
  // The ranks of `group` must outlive the driver.
  StepDriver(const Group& group, const StepOptions& options);
  // For some of the ranks only; `info` is how one of them sees the group.
  StepDriver(std::vector<RankClient*> ranks, const v1::GroupInfo& info, const StepOptions& options);

  int64_t world() const { return static_cast<int64_t>(ranks_.size()); }
  // The sequence the next call carries, as far as is known.
  uint64_t next_sequence() const { return next_sequence_; }
  // Another caller may have used sequences since: the next Run asks the ranks first.
  void Distrust() { certain_ = false; }
  // A header for the next call, as Run would fill it in; consumes nothing.
  v1::StepHeader NextHeader() const;

  // Sends requests[r] to rank r. Returns all responses in rank order, or the most telling error
  // with operation, sequence and rank in its text. After an error the next Run goes on with the
  // sequence that the ranks agree on; GROUP_BROKEN when there is none. REQUIRES: requests.size() ==
  // world().
  template <typename Request>
  absl::StatusOr<std::vector<ResponseOf<Request>>> Run(std::vector<Request> requests) {
    Replies<Request> replies = RunEach(std::move(requests));
    absl::Status status = Explain(Method<Request>::kName, replies.statuses);
    if (!status.ok()) return status;
    return std::move(replies.responses);
  }

  // The same request, but for its header, to every rank.
  template <typename Request>
  absl::StatusOr<std::vector<ResponseOf<Request>>> RunSame(const Request& request) {
    return Run(std::vector<Request>(ranks_.size(), request));
  }

  // Run with every rank's own answer.
  template <typename Request>
  Replies<Request> RunEach(std::vector<Request> requests) {
    CallOptions options;
    if (absl::Status status = Begin(&options); !status.ok()) {
      return {std::vector<ResponseOf<Request>>(ranks_.size()),
              std::vector<absl::Status>(ranks_.size(), status)};
    }
    for (Request& request : requests) *request.mutable_header() = NextHeader();
    Replies<Request> replies = CallAll(absl::MakeConstSpan(ranks_), requests, options);
    End(replies.statuses);
    return replies;
  }

 private:
  // Agrees on the sequence when it is not certain, and sets the options of one step.
  absl::Status Begin(CallOptions* options);
  void End(const std::vector<absl::Status>& statuses);
  absl::Status Agree(const CallOptions& options);
  absl::Status Explain(const char* operation, const std::vector<absl::Status>& statuses) const;

  std::vector<RankClient*> ranks_;
  std::string group_id_;
  uint64_t epoch_;
  StepOptions options_;
  uint64_t next_sequence_;
  uint64_t last_sequence_ = 0;
  bool certain_ = true;  // Of next_sequence_.
};

// One caller of an SPMD program, driving only its own rank and counting by itself.
class RankStepper {
 public:
  RankStepper(RankClient* rank, const v1::GroupInfo& info, const StepOptions& options)
      : driver_({rank}, info, options) {}

  uint64_t next_sequence() const { return driver_.next_sequence(); }

  template <typename Request>
  absl::StatusOr<ResponseOf<Request>> Run(Request request) {
    auto responses = driver_.Run(std::vector<Request>{std::move(request)});
    if (!responses.ok()) return responses.status();
    return std::move(responses->front());
  }

 private:
  StepDriver driver_;
};

// Sequence agreement as a pure function of how the ranks see the group.
struct Agreement {
  enum class State { kAgreed, kWait, kBroken } state = State::kWait;
  uint64_t next_sequence = 0;
  std::string reason;  // Why it is broken, or what is waited for.
};
Agreement AgreeOn(const std::vector<v1::GroupInfo>& infos, const std::string& group_id,
                  uint64_t epoch);

}  // namespace expertd::client

#endif  // CLIENT_CPP_STEP_DRIVER_H_
