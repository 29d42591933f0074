// Which operation may run next, and what a repeated, early, late or contradictory one is told.
//
// Pure bookkeeping over sequence numbers and request ids of one epoch; holds no operation itself.
// One entry per sequence that was seen and is not yet forgotten. Not thread-safe.
#ifndef SERVER_ENGINE_SEQUENCE_H_
#define SERVER_ENGINE_SEQUENCE_H_

#include <cstdint>
#include <map>
#include <optional>

#include "absl/status/status.h"

namespace expertd::engine {

struct SequenceOptions {
  int64_t window = 64;       // sequences that may wait ahead of the next one
  int64_t kept_replies = 2;  // finished sequences whose reply is kept
  int64_t kept_outcomes = 1024;
};

enum class Admission : uint8_t {
  kAccepted,   // first of its sequence: run it when its turn comes
  kDuplicate,  // the same request is waiting or running: give it the same outcome
  kReplay,     // the same request has finished: give it the stored reply
  kClosed,     // the other ranks have left this sequence: fail it with the recorded reason
  kRefused,    // see the status; the sequence is not consumed by it
};

struct AdmissionResult {
  Admission admission = Admission::kRefused;
  absl::Status status;  // for kClosed and kRefused
};

class SequenceBook {
 public:
  explicit SequenceBook(SequenceOptions options) : options_(options) {}

  // The sequence that runs next, or is running.
  uint64_t next() const { return next_; }
  // Waiting sequences, the running one included.
  int64_t waiting() const { return static_cast<int64_t>(waiting_.size()); }

  // A request asks for a sequence. Errors in the result: SEQUENCE_EXPIRED (past, reply not kept),
  // SEQUENCE_CONFLICT (other request id), SEQUENCE_GAP (further ahead than the window).
  AdmissionResult Admit(uint64_t sequence, uint64_t request_id);

  // Whether next() has been admitted and not begun.
  bool Runnable() const;
  void Begin();
  // The sequence next() has ended; forgets replies past their keep. A sequence never admitted
  // counts as ended when it was closed.
  void End();
  // Whether the reply of a sequence that Admit calls kReplay is still kept.
  bool ReplyKept(uint64_t sequence) const;

  enum class CloseEffect : uint8_t {
    kIgnored,    // already ended here
    kCancelled,  // admitted here: the caller cancels it with the reason
    kRecorded,   // not seen yet: its request will be told; next() moves past it when it is due
  };
  CloseEffect Close(uint64_t sequence, const absl::Status& reason);

  // Ends next() without a request when the others have closed it. Returns whether it did.
  bool SkipClosed();

 private:
  struct Entry {
    uint64_t request_id = 0;
    bool running = false;
  };

  SequenceOptions options_;
  uint64_t next_ = 1;
  std::map<uint64_t, Entry> waiting_;        // >= next_
  std::map<uint64_t, uint64_t> finished_;    // request ids of kept replies, < next_
  std::map<uint64_t, absl::Status> closed_;  // by the others; not admitted here
};

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_SEQUENCE_H_
