// Fuzzes SequenceBook: calls driven by bytes, as the engine may make them, against plain sets.
#include "server/engine/sequence.h"

#include <map>
#include <set>

#include "tests/fuzz/fuzz_input.h"

namespace {

using expertd::engine::Admission;
using expertd::engine::SequenceBook;
using expertd::fuzz::Input;

class Driver {
 public:
  explicit Driver(Input& input)
      : window_(1 + input.Byte() % 8),
        book_({.window = static_cast<int64_t>(window_), .kept_replies = input.Byte() % 4}) {}

  void Step(Input& input) {
    switch (input.Byte() % 4) {
      case 0:
        return Admit(input.Number(), input.Byte() % 3);
      case 1:
        return Run(input.Byte() % 2 == 0);
      case 2:
        return Close(input.Number());
      default:
        return Skip();
    }
  }

 private:
  void Admit(uint64_t sequence, uint64_t request_id) {
    const auto result = book_.Admit(sequence, request_id);
    switch (result.admission) {
      case Admission::kAccepted:
        FUZZ_CHECK(sequence >= book_.next() && sequence - book_.next() < window_);
        FUZZ_CHECK(admitted_.emplace(sequence, request_id).second);  // once only
        FUZZ_CHECK(closed_.count(sequence) == 0);
        break;
      case Admission::kDuplicate:
        FUZZ_CHECK(sequence >= book_.next() && admitted_.at(sequence) == request_id);
        break;
      case Admission::kReplay:
        FUZZ_CHECK(sequence < book_.next() && admitted_.at(sequence) == request_id);
        FUZZ_CHECK(book_.ReplyKept(sequence));
        break;
      case Admission::kClosed:
        FUZZ_CHECK(!result.status.ok() && closed_.count(sequence) == 1);
        break;
      case Admission::kRefused:
        FUZZ_CHECK(!result.status.ok());
    }
  }

  // A whole run of the next sequence, or its beginning.
  void Run(bool to_the_end) {
    if (!running_) {
      if (!book_.Runnable()) return;
      FUZZ_CHECK(admitted_.count(book_.next()) == 1);
      book_.Begin();
      running_ = true;
      FUZZ_CHECK(!book_.Runnable());
    }
    if (!to_the_end) return;
    const uint64_t next = book_.next();
    book_.End();
    running_ = false;
    FUZZ_CHECK(book_.next() == next + 1);
  }

  void Close(uint64_t sequence) {
    switch (book_.Close(sequence, absl::AbortedError("left"))) {
      case SequenceBook::CloseEffect::kIgnored:
        FUZZ_CHECK(sequence < book_.next() || sequence - book_.next() >= window_);
        break;
      case SequenceBook::CloseEffect::kCancelled:
        FUZZ_CHECK(sequence >= book_.next() && admitted_.count(sequence) == 1);
        break;
      case SequenceBook::CloseEffect::kRecorded:
        FUZZ_CHECK(sequence >= book_.next() && admitted_.count(sequence) == 0);
        closed_.insert(sequence);
    }
  }

  void Skip() {
    if (running_) return;
    const uint64_t next = book_.next();
    const bool skipped = book_.SkipClosed();
    FUZZ_CHECK(skipped == (closed_.count(next) == 1 && admitted_.count(next) == 0));
    FUZZ_CHECK(book_.next() == next + (skipped ? 1 : 0));
  }

  const uint64_t window_;
  SequenceBook book_;
  bool running_ = false;
  std::map<uint64_t, uint64_t> admitted_;  // every sequence ever accepted
  std::set<uint64_t> closed_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  Driver driver(input);
  while (!input.empty()) driver.Step(input);
  return 0;
}
