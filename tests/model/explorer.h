// Visits every state a model can reach, breadth first, and tells the shortest way to a bad one.
//
// A Model has:
//   State            bytes without padding; equal states are equal bytes
//   Action           at most 4 bytes; what happened
//   State Initial() const
//   Enabled Next(const State&, Emit emit)   calls emit(action, next) for everything that can happen
//   uint32_t Measure(const State&)          every action makes it smaller, so no run is endless
//   std::string Check(const State&, Enabled)   what is wrong with the state, or ""
//   std::string Text(Action), Text(const State&)   for people
#ifndef TESTS_MODEL_EXPLORER_H_
#define TESTS_MODEL_EXPLORER_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/strings.h"

namespace expertd::model {

// What can happen next besides what callers and faults may do at will.
struct Enabled {
  bool progress = false;  // something that happens by itself, without a time limit passing
  bool timeout = false;   // a time limit that may pass
  bool quiet() const { return !progress; }
  bool terminal() const { return !progress && !timeout; }
};

struct Exploration {
  uint64_t states = 0;
  uint64_t transitions = 0;
  uint64_t terminals = 0;
  int depth = 0;
  bool complete = false;  // every reachable state was seen
  bool limited = false;   // not, because StateLimit() stopped it
  std::string problem;    // of the first bad state; empty: none
  std::string trace;      // the shortest way there

  std::string Summary() const {
    return StrCat(states, " states, ", transitions, " transitions, ", terminals,
                  " terminal states, depth ", depth, complete ? "" : ", NOT complete");
  }
};

template <typename Model>
class Explorer {
 public:
  using State = typename Model::State;
  using Action = typename Model::Action;
  static_assert(std::has_unique_object_representations_v<State>);
  static_assert(sizeof(Action) <= 4);

  Explorer(Model& model, uint64_t max_states)
      : model_(model), max_states_(max_states), table_(size_t{1} << 16) {}

  Exploration Run() {
    Exploration result;
    Add(model_.Initial(), kNone, Action{});
    size_t level_end = states_.size();
    for (uint32_t at = 0; at < states_.size(); ++at) {
      if (at == level_end) {
        ++result.depth;
        level_end = states_.size();
      }
      if (states_.size() > max_states_) break;
      if (!Visit(at, &result)) break;
    }
    result.states = states_.size();
    result.complete = result.problem.empty() && states_.size() <= max_states_;
    return result;
  }

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  struct Slot {
    uint32_t tag = 0;  // of the hash, so that few states are compared in full
    uint32_t index = kNone;
  };
  struct Origin {
    uint32_t parent;
    Action action;
  };

  bool Visit(uint32_t at, Exploration* result) {
    const State state = states_[at];
    const uint32_t measure = model_.Measure(state);
    const Enabled enabled = model_.Next(state, [&](Action action, const State& next) {
      ++result->transitions;
      if (result->problem.empty() && model_.Measure(next) >= measure) {
        result->problem = StrCat("no progress, a run could be endless: ", model_.Text(action));
      }
      Add(next, at, action);
    });
    if (enabled.terminal()) ++result->terminals;
    if (result->problem.empty()) result->problem = model_.Check(state, enabled);
    if (result->problem.empty()) return true;
    result->trace = Trace(at);
    return false;
  }

  std::string Trace(uint32_t at) const {
    std::vector<uint32_t> path;
    for (; at != kNone; at = origins_[at].parent) path.push_back(at);
    std::reverse(path.begin(), path.end());
    std::string text;
    for (size_t i = 1; i < path.size(); ++i) {
      StrAppend(&text, "  ", i, ". ", model_.Text(origins_[path[i]].action), "\n");
    }
    return text + model_.Text(states_[path.back()]);
  }

  static uint64_t Hash(const State& state) {
    uint64_t hash = 0x9E3779B97F4A7C15u;
    const char* bytes = reinterpret_cast<const char*>(&state);
    for (size_t i = 0; i < sizeof(State); i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, bytes + i, std::min<size_t>(8, sizeof(State) - i));
      hash = (hash ^ word) * 0xD6E8FEB86659FD93u;
      hash ^= (hash >> 32) ^ (hash << 29);
    }
    hash *= 0xFF51AFD7ED558CCDu;
    return hash ^ (hash >> 32);
  }

  void Add(const State& state, uint32_t parent, Action action) {
    if (2 * states_.size() >= table_.size()) Grow();
    const uint64_t hash = Hash(state);
    const auto tag = static_cast<uint32_t>(hash >> 32);
    size_t slot = hash & (table_.size() - 1);
    for (; table_[slot].index != kNone; slot = (slot + 1) & (table_.size() - 1)) {
      if (table_[slot].tag != tag) continue;
      if (std::memcmp(&states_[table_[slot].index], &state, sizeof(State)) == 0) return;
    }
    table_[slot] = {tag, static_cast<uint32_t>(states_.size())};
    states_.push_back(state);
    origins_.push_back({parent, action});
  }

  void Grow() {
    table_.assign(4 * table_.size(), Slot{});
    for (uint32_t i = 0; i < states_.size(); ++i) {
      const uint64_t hash = Hash(states_[i]);
      size_t slot = hash & (table_.size() - 1);
      while (table_[slot].index != kNone) slot = (slot + 1) & (table_.size() - 1);
      table_[slot] = {static_cast<uint32_t>(hash >> 32), i};
    }
  }

  Model& model_;
  const uint64_t max_states_;
  std::vector<State> states_;
  std::vector<Origin> origins_;
  std::vector<Slot> table_;  // open addressing over states_
};

// EXPERTD_MODEL_STATES, for builds in which every state takes long; 0: not set.
inline uint64_t StateLimit() {
  const char* text = std::getenv("EXPERTD_MODEL_STATES");
  return text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
}

template <typename Model>
Exploration Explore(Model& model) {
  constexpr uint64_t kMaxStates = 5'000'000;
  const uint64_t limit = StateLimit();
  Exploration result = Explorer<Model>(model, limit == 0 ? kMaxStates : limit).Run();
  result.limited = limit != 0 && !result.complete && result.problem.empty();
  return result;
}

}  // namespace expertd::model

#endif  // TESTS_MODEL_EXPLORER_H_
