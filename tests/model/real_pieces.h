// The engine's own SequenceBook, GroupStateMachine and Conclude, as the models call them.
#ifndef TESTS_MODEL_REAL_PIECES_H_
#define TESTS_MODEL_REAL_PIECES_H_

#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "base/strings.h"
#include "server/engine/arrival.h"
#include "server/engine/group_state.h"
#include "server/engine/sequence.h"
#include "tests/model/interned.h"

namespace expertd::model {

using engine::Admission;
using engine::GroupState;
using engine::OpKind;

inline constexpr char kGroup[] = "g";
inline constexpr int kMaxRequestId = 3;

class Books {
 public:
  using Result = Interned<engine::SequenceBook>::Result;
  static constexpr int kHighestSequence = 8;

  Books() : pool_([](const engine::SequenceBook& book) { return Fingerprint(book); }) {}

  uint16_t New(int64_t window, int64_t kept_replies) {
    return pool_.Add(engine::SequenceBook({.window = window, .kept_replies = kept_replies}));
  }
  uint8_t NextOf(uint16_t id) const { return static_cast<uint8_t>(pool_[id].next()); }
  bool Runnable(uint16_t id) const { return pool_[id].Runnable(); }

  Admission Admit(uint16_t& id, int sequence, int request_id) {
    return static_cast<Admission>(
        Call(id, 1, sequence, request_id, [&](engine::SequenceBook& book) {
          return static_cast<int>(book.Admit(sequence, request_id).admission);
        }));
  }
  engine::SequenceBook::CloseEffect Close(uint16_t& id, int sequence) {
    return static_cast<engine::SequenceBook::CloseEffect>(
        Call(id, 2, sequence, 0, [&](engine::SequenceBook& book) {
          return static_cast<int>(book.Close(sequence, Error(Reason::kStepTimeout).Text("left")));
        }));
  }
  void Begin(uint16_t& id) {
    Call(id, 3, 0, 0, [](engine::SequenceBook& book) { return book.Begin(), 0; });
  }
  void End(uint16_t& id) {
    Call(id, 4, 0, 0, [](engine::SequenceBook& book) { return book.End(), 0; });
  }
  bool SkipClosed(uint16_t& id) {
    return Call(id, 5, 0, 0, [](engine::SequenceBook& book) { return book.SkipClosed() ? 1 : 0; });
  }

 private:
  template <typename Function>
  uint8_t Call(uint16_t& id, int method, int sequence, int request_id, const Function& function) {
    const auto name = static_cast<uint32_t>((method << 16) | (sequence << 8) | request_id);
    const Result result = pool_.Apply(id, name, function);
    id = result.id;
    return result.said;
  }

  // All that later calls within a model's scope can depend on.
  static std::string Fingerprint(const engine::SequenceBook& book) {
    std::string text = StrCat(book.next(), ";", book.waiting(), ";", book.Runnable() ? 1 : 0, ";");
    for (int sequence = 1; sequence <= kHighestSequence; ++sequence) {
      for (int request_id = 1; request_id <= kMaxRequestId; ++request_id) {
        engine::SequenceBook copy = book;
        StrAppend(&text, static_cast<int>(copy.Admit(sequence, request_id).admission));
      }
      engine::SequenceBook copy = book;
      StrAppend(&text, "/", static_cast<int>(copy.Close(sequence, absl::UnknownError(""))),
                book.ReplyKept(sequence) ? "k " : " ");
    }
    return text;
  }

  Interned<engine::SequenceBook> pool_;
};

class Machines {
 public:
  using Machine = engine::GroupStateMachine;

  Machines() : pool_([](const Machine& machine) { return Fingerprint(machine); }) {}

  uint16_t New() { return pool_.Add(Machine()); }
  const Machine& operator[](uint16_t id) const { return pool_[id]; }

  void SawEpoch(uint16_t& id, int epoch) {
    Call(id, 1, epoch, [&](Machine& machine) { return machine.SawEpoch(epoch), 0; });
  }
  // 0: refused; otherwise 1 + the decision.
  int OnJoinRequest(uint16_t& id, int epoch) {
    return Call(id, 2, epoch, [&](Machine& machine) {
      const auto decision = machine.OnJoinRequest(kGroup, epoch);
      return decision.ok() ? 1 + static_cast<int>(*decision) : 0;
    });
  }
  void OnJoined(uint16_t& id, int epoch) {
    Call(id, 3, epoch, [&](Machine& machine) { return machine.OnJoined(epoch), 0; });
  }
  void OnJoinFailed(uint16_t& id, int epoch) {
    Call(id, 4, epoch, [&](Machine& machine) { return machine.OnJoinFailed(epoch), 0; });
  }
  void OnLeft(uint16_t& id) {
    Call(id, 5, 0, [](Machine& machine) { return machine.OnLeft(), 0; });
  }
  void OnBroken(uint16_t& id, int epoch) {
    Call(id, 6, epoch, [&](Machine& machine) { return machine.OnBroken(epoch, "lost"), 0; });
  }
  // 0: refused; 1: not here; 2: is here.
  int OnLeaveRequest(uint16_t& id, int epoch) {
    return Call(id, 7, epoch, [&](Machine& machine) {
      const auto here = machine.OnLeaveRequest(kGroup, epoch);
      return here.ok() ? 1 + static_cast<int>(*here) : 0;
    });
  }
  bool AcceptsSteps(uint16_t& id, int epoch) {
    return Call(id, 8, epoch,
                [&](Machine& machine) { return machine.CheckStep(kGroup, epoch).ok() ? 1 : 0; });
  }

 private:
  template <typename Function>
  uint8_t Call(uint16_t& id, int method, int epoch, const Function& function) {
    const auto result = pool_.Apply(id, static_cast<uint32_t>((method << 8) | epoch), function);
    id = result.id;
    return result.said;
  }

  // Without the version, which only grows: what it counts is checked in group_machine_test.cc.
  static std::string Fingerprint(const Machine& machine) {
    return StrCat(static_cast<int>(machine.state()), ";", machine.group_id(), ";", machine.epoch(),
                  ";", machine.highest_epoch_seen(), ";", machine.draining() ? 1 : 0);
  }

  Interned<Machine> pool_;
};

// What one rank brings to an arrival, as far as the models vary it.
struct Arrival {
  uint8_t op = 0;
  uint8_t reason = 0;  // 0: accepted; otherwise 1 + the Reason of its refusal
  uint8_t version = 0;
  uint8_t gradients_valid = 1;
  uint8_t accumulated = 0;  // backwards in the accumulators

  uint32_t Key() const {
    return (uint32_t{op} << 20) | (uint32_t{reason} << 12) | (uint32_t{version} << 8) |
           (uint32_t{gradients_valid} << 7) | accumulated;
  }
};

class Conclusions {
 public:
  // 0: go on; otherwise 1 + the Reason that ends the sequence for `rank`.
  // `key` stands for these arrivals and this rank.
  uint8_t Conclude(uint64_t key, const std::vector<Arrival>& arrivals, int rank) {
    if (const auto found = said_.find(key); found != said_.end()) return found->second;
    std::vector<engine::ArrivalRecord> records;
    for (const Arrival& arrival : arrivals) records.push_back(RecordOf(arrival));
    const absl::Status status = engine::Conclude(records, rank);
    const uint8_t said =
        status.ok() ? 0 : static_cast<uint8_t>(1 + static_cast<int>(ReasonOf(status)));
    said_.emplace(key, said);
    return said;
  }

 private:
  // Through the wire form, as between daemons.
  static engine::ArrivalRecord RecordOf(const Arrival& arrival) {
    engine::ArrivalRecord record;
    record.epoch = 1;
    record.sequence = 1;
    record.op = static_cast<OpKind>(arrival.op);
    record.gradients_valid = arrival.gradients_valid != 0;
    record.weights_version = arrival.version;
    record.accumulated_backwards = arrival.accumulated;
    if (arrival.reason != 0)
      record.status = Error(static_cast<Reason>(arrival.reason - 1)).Text("no");
    return engine::DecodeArrival(engine::EncodeArrival(record)).value();
  }

  std::unordered_map<uint64_t, uint8_t> said_;
};

}  // namespace expertd::model

#endif  // TESTS_MODEL_REAL_PIECES_H_
