// What the EP conformance suite expects: inputs, and a layout computed by brute force.
//
// Written from SEMANTICS (five operations), not from the product: it shares no code with kernels
// but the plain types. Values are small integers, exact in every float dtype.
#ifndef TESTS_CONFORMANCE_EP_EP_MODEL_H_
#define TESTS_CONFORMANCE_EP_EP_MODEL_H_

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/ep_backend.h"
#include "kernels/types.h"

namespace expertd::conformance {

enum class Routes { kRandom, kHoles, kAllHoles, kOneExpert, kNotToLastRank, kSkewed };

struct Scenario {
  std::string name;
  int64_t experts_per_rank = 3;
  int64_t top_k = 2;
  int64_t alignment = 1;
  int64_t hidden = 8;
  std::vector<int64_t> tokens = {7};  // of rank r: tokens[r % size]
  Routes routes = Routes::kRandom;
  CapacityPolicy policy = CapacityPolicy::kRefuse;
  int64_t capacity = 0;  // 0: more than enough
  uint32_t seed = 1;
};

struct RankInput {
  int64_t tokens = 0;
  std::vector<int64_t> ids;    // [T, K]
  std::vector<float> weights;  // [T, K]
};

struct Problem {
  Scenario scenario;
  int64_t world = 1;
  int64_t experts = 1;
  int64_t top_k = 1;  // the scenario's, at most the number of experts
  std::vector<RankInput> ranks;
};

inline std::vector<int64_t> ChooseIds(const Problem& problem, std::mt19937& random) {
  std::vector<int64_t> all(static_cast<size_t>(problem.experts));
  for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int64_t>(e);
  std::shuffle(all.begin(), all.end(), random);
  const Routes routes = problem.scenario.routes;
  const int64_t last_begin = problem.experts - problem.scenario.experts_per_rank;
  std::vector<int64_t> ids(all.begin(), all.begin() + problem.top_k);
  for (size_t k = 0; k < ids.size(); ++k) {
    if (routes == Routes::kHoles && random() % 3 == 0) ids[k] = -1;
    if (routes == Routes::kAllHoles) ids[k] = -1;
    if (routes == Routes::kOneExpert) ids[k] = k == 0 ? problem.experts / 2 : -1;
    if (routes == Routes::kNotToLastRank && ids[k] >= last_begin && problem.world > 1) ids[k] = -1;
    if (routes == Routes::kSkewed && ids[k] % 4 != 0 && random() % 4 != 0) ids[k] = -1;
  }
  return ids;
}

inline Problem MakeProblem(const Scenario& scenario, int64_t world) {
  Problem problem = {scenario, world, scenario.experts_per_rank * world, 0, {}};
  problem.top_k = std::min(scenario.top_k, problem.experts);
  std::mt19937 random(scenario.seed);
  for (int64_t rank = 0; rank < world; ++rank) {
    RankInput input;
    input.tokens = scenario.tokens[static_cast<size_t>(rank) % scenario.tokens.size()];
    for (int64_t t = 0; t < input.tokens; ++t) {
      for (int64_t id : ChooseIds(problem, random)) {
        input.ids.push_back(id);
        input.weights.push_back(static_cast<float>(random() % 4096) / 2048.0f - 0.5f);
      }
    }
    problem.ranks.push_back(std::move(input));
  }
  return problem;
}

// Who fills a slot; source -1 for padding.
struct SlotSource {
  int64_t source = -1;
  int64_t token = 0;
  int64_t k = 0;
};

struct Layout {
  std::vector<RecvCounts> counts;              // [world]
  std::vector<std::vector<SlotSource>> slots;  // [world][total]
  std::vector<std::vector<int64_t>> slot_of;   // [world][T * K]: slot, -1 no route, -2 dropped
};

inline Layout BuildLayout(const Problem& problem) {
  const Scenario& scenario = problem.scenario;
  Layout layout;
  for (const RankInput& input : problem.ranks) layout.slot_of.emplace_back(input.ids.size(), -1);
  for (int64_t rank = 0; rank < problem.world; ++rank) {
    RecvCounts counts;
    std::vector<SlotSource> slots;
    for (int64_t j = 0; j < scenario.experts_per_rank; ++j) {
      int64_t kept = 0;
      int64_t dropped = 0;
      const int64_t limit =
          scenario.capacity / (scenario.experts_per_rank * scenario.alignment) * scenario.alignment;
      for (int64_t source = 0; source < problem.world; ++source) {
        const RankInput& input = problem.ranks[static_cast<size_t>(source)];
        for (int64_t i = 0; i < static_cast<int64_t>(input.ids.size()); ++i) {
          if (input.ids[static_cast<size_t>(i)] != rank * scenario.experts_per_rank + j) continue;
          int64_t& slot = layout.slot_of[static_cast<size_t>(source)][static_cast<size_t>(i)];
          if (scenario.policy == CapacityPolicy::kDrop && kept == limit) {
            slot = -2;
            ++dropped;
            continue;
          }
          slot = static_cast<int64_t>(slots.size());
          slots.push_back({source, i / problem.top_k, i % problem.top_k});
          ++kept;
        }
      }
      int64_t padded = kept;
      while (padded % scenario.alignment != 0) ++padded;
      slots.resize(slots.size() + static_cast<size_t>(padded - kept));
      counts.tokens_per_expert.push_back(kept);
      counts.padded_per_expert.push_back(padded);
      counts.dropped_per_expert.push_back(dropped);
      counts.total += padded;
    }
    layout.counts.push_back(counts);
    layout.slots.push_back(slots);
  }
  return layout;
}

// An integer in [-15, 15] that depends on everything; (valid k) times it is exact in bf16.
inline double RowValue(int64_t rank, int64_t token, int64_t column, uint32_t salt) {
  if (column == 0) return static_cast<double>(token % 16);
  if (column == 1) return static_cast<double>(rank % 16);
  uint64_t hash = static_cast<uint64_t>(rank) * 1000003u + static_cast<uint64_t>(token) * 10007u +
                  static_cast<uint64_t>(column) * 101u + salt;
  hash = (hash ^ (hash >> 13)) * 0x9E3779B97F4A7C15u;
  return static_cast<double>((hash >> 33) % 31) - 15;
}

inline void Encode(DType dtype, double value, std::byte* to) {
  if (dtype == DType::kF32) {
    const auto narrow = static_cast<float>(value);
    std::memcpy(to, &narrow, 4);
  } else if (dtype == DType::kF16) {
    const auto narrow = static_cast<_Float16>(value);
    std::memcpy(to, &narrow, 2);
  } else if (dtype == DType::kBF16) {  // exact values only: the lower half is zero
    const auto upper =
        static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16);
    std::memcpy(to, &upper, 2);
  } else {  // integers and bytes: two's complement, truncated
    const auto wide = static_cast<int64_t>(value);
    std::memcpy(to, &wide, DTypeSize(dtype));
  }
}

inline double Decode(DType dtype, const std::byte* from) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, from, 4);
    return value;
  }
  if (dtype == DType::kF16) {
    _Float16 value;
    std::memcpy(&value, from, 2);
    return static_cast<double>(value);
  }
  uint16_t upper;  // bf16
  std::memcpy(&upper, from, 2);
  return std::bit_cast<float>(static_cast<uint32_t>(upper) << 16);
}

// Relative error of one rounding to nearest.
inline double UnitRoundoff(DType dtype) {
  return dtype == DType::kF32 ? 0x1p-24 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
}

// A [rows, cols] matrix in host memory; every byte 0xFF (NaN) until written.
class TestMatrix {
 public:
  TestMatrix(DType dtype, int64_t rows, int64_t cols)
      : dtype_(dtype),
        rows_(rows),
        cols_(cols),
        bytes_(static_cast<size_t>(rows * cols) * DTypeSize(dtype), std::byte{0xFF}) {}

  Matrix view() { return {bytes_.data(), dtype_, rows_, cols_}; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  void Set(int64_t row, int64_t col, double value) { Encode(dtype_, value, At(row, col)); }
  double Get(int64_t row, int64_t col) { return Decode(dtype_, At(row, col)); }
  std::byte* At(int64_t row, int64_t col) {
    return bytes_.data() + static_cast<size_t>(row * cols_ + col) * DTypeSize(dtype_);
  }
  size_t row_bytes() const { return static_cast<size_t>(cols_) * DTypeSize(dtype_); }
  bool RowIs(int64_t row, std::byte value) {
    const std::byte* begin = At(row, 0);
    return std::all_of(begin, begin + row_bytes(), [&](std::byte b) { return b == value; });
  }

 private:
  DType dtype_;
  int64_t rows_;
  int64_t cols_;
  std::vector<std::byte> bytes_;
};

// The rows of one rank: [T, H] of RowValue.
inline TestMatrix TokenRows(const Problem& problem, int64_t rank, DType dtype, uint32_t salt) {
  const RankInput& input = problem.ranks[static_cast<size_t>(rank)];
  TestMatrix rows(dtype, input.tokens, problem.scenario.hidden);
  for (int64_t t = 0; t < rows.rows(); ++t) {
    for (int64_t h = 0; h < rows.cols(); ++h) rows.Set(t, h, RowValue(rank, t, h, salt));
  }
  return rows;
}

}  // namespace expertd::conformance

#endif  // TESTS_CONFORMANCE_EP_EP_MODEL_H_
