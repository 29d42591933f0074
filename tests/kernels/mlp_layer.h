// One MoE layer's tensors on one rank for the expert MLP tests, and the cases they run.
#ifndef TESTS_KERNELS_MLP_LAYER_H_
#define TESTS_KERNELS_MLP_LAYER_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/expert_mlp.h"
#include "tests/kernels/mlp_reference.h"
#include "tests/kernels/test_values.h"

namespace expertd::mlp_test {

inline constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
inline constexpr int64_t kTail = 3;  // poisoned rows past the total

struct Case {
  std::string name;
  MlpConfig config;
  std::vector<int64_t> counts;
  int64_t alignment = 8;
};

// All tensors of one layer on one rank, exact in their dtypes; pads and tails poisoned.
class Layer {
 public:
  explicit Layer(const Case& c)
      : config(c.config),
        counts(c.counts),
        padded(PaddedOf(c)),
        total(std::accumulate(padded.begin(), padded.end(), int64_t{0})),
        rows(total + kTail),
        h_size(config.hidden),
        i_size(config.intermediate),
        recv_x(config.token_dtype, rows * h_size),
        h(config.token_dtype, rows * 2 * i_size),
        z(config.token_dtype, rows * h_size),
        grad_out(config.token_dtype, rows * h_size),
        grad_h(config.token_dtype, rows * 2 * i_size),
        grad_x(config.token_dtype, rows * h_size),
        gate_up(config.weight_dtype, Experts() * h_size * 2 * i_size),
        down(config.weight_dtype, Experts() * i_size * h_size),
        recv_w(static_cast<size_t>(rows), kPoison),
        grad_w(static_cast<size_t>(rows), -77.0f) {
    std::mt19937 random(9);
    FillRows(recv_x, h_size, random);
    FillRows(grad_out, h_size, random);
    ForRows(
        [&](int64_t, int64_t row) { recv_w[At(row)] = static_cast<float>(SmallValue(random)); });
    for (int64_t n = 0; n < gate_up.size(); ++n) gate_up.Set(n, SmallValue(random) / 4);
    for (int64_t n = 0; n < down.size(); ++n) down.Set(n, SmallValue(random) / 4);
    for (int64_t n = 0; n < Experts() * 2 * i_size; ++n) {
      gate_up_bias.push_back(static_cast<float>(SmallValue(random)));
    }
    for (int64_t n = 0; n < Experts() * h_size; ++n) {
      down_bias.push_back(static_cast<float>(SmallValue(random)));
    }
  }

  static size_t At(int64_t index) { return static_cast<size_t>(index); }
  int64_t Experts() const { return config.local_experts; }
  ExpertSegments segments() const { return {&counts, &padded, total}; }
  MlpWeights weights(uint64_t version = 1) {
    return {.gate_up = gate_up.data(),
            .down = down.data(),
            .gate_up_bias = config.gate_up_bias ? gate_up_bias.data() : nullptr,
            .down_bias = config.down_bias ? down_bias.data() : nullptr,
            .version = version};
  }
  // Calls f(expert, row) for every data row.
  template <typename F>
  void ForRows(const F& f) const {
    int64_t base = 0;
    for (int64_t j = 0; j < Experts(); ++j) {
      for (int64_t r = 0; r < counts[At(j)]; ++r) f(j, base + r);
      base += padded[At(j)];
    }
  }
  bool IsData(int64_t row) const {
    bool found = false;
    ForRows([&](int64_t, int64_t data) { found = found || data == row; });
    return found;
  }
  void FillRows(TypedArray& to, int64_t cols, std::mt19937& random) const {
    ForRows([&](int64_t, int64_t row) {
      for (int64_t c = 0; c < cols; ++c) to.Set(row * cols + c, SmallValue(random));
    });
  }
  // Pad rows are zero and rows past the total untouched.
  void ExpectPadsAndTail(const TypedArray& tensor, int64_t cols, const char* what) const {
    for (int64_t row = 0; row < total; ++row) {
      if (IsData(row)) continue;
      for (int64_t c = 0; c < cols; ++c)
        ASSERT_EQ(tensor.Get(row * cols + c), 0) << what << " pad " << row;
    }
    EXPECT_TRUE(tensor.Untouched(total * cols, rows * cols)) << what;
  }
  Bounded GateUp(int64_t j, int64_t k, int64_t n) const {
    return {gate_up.Get((j * h_size + k) * 2 * i_size + n), 0};
  }
  Bounded Down(int64_t j, int64_t k, int64_t n) const {
    return {down.Get((j * i_size + k) * h_size + n), 0};
  }

  const MlpConfig config;
  const std::vector<int64_t> counts;
  const std::vector<int64_t> padded;
  const int64_t total;
  const int64_t rows;
  const int64_t h_size;
  const int64_t i_size;
  TypedArray recv_x, h, z, grad_out, grad_h, grad_x, gate_up, down;
  std::vector<float> recv_w, grad_w, gate_up_bias, down_bias;

 private:
  static std::vector<int64_t> PaddedOf(const Case& c) {
    std::vector<int64_t> padded;
    for (int64_t count : c.counts)
      padded.push_back((count + c.alignment - 1) / c.alignment * c.alignment);
    return padded;
  }
};

inline MlpConfig Config(Activation activation, Weighting weighting, bool bias, DType token,
                        DType weight, int64_t hidden = 37, int64_t intermediate = 21) {
  return {.local_experts = 5,
          .hidden = hidden,
          .intermediate = intermediate,
          .activation = activation,
          .weighting = weighting,
          .gate_up_bias = bias,
          .down_bias = bias,
          .token_dtype = token,
          .weight_dtype = weight};
}

inline std::vector<Case> Cases() {
  constexpr auto kF32 = DType::kF32;
  constexpr auto kF16 = DType::kF16;
  constexpr auto kBF16 = DType::kBF16;
  const std::vector<int64_t> mixed = {5, 0, 16, 1, 33};
  std::vector<Case> cases = {
      {"silu_late_f32", Config(Activation::kSilu, Weighting::kLate, false, kF32, kF32), mixed},
      {"silu_early_bias_f32", Config(Activation::kSilu, Weighting::kEarly, true, kF32, kF32),
       mixed},
      {"gelu_late_bias_bf16", Config(Activation::kGelu, Weighting::kLate, true, kBF16, kBF16),
       mixed},
      {"silu_early_bf16", Config(Activation::kSilu, Weighting::kEarly, false, kBF16, kBF16), mixed},
      {"relu2_late_f16", Config(Activation::kRelu2, Weighting::kLate, false, kF16, kF16), mixed},
      {"relu2_early_bias_f16", Config(Activation::kRelu2, Weighting::kEarly, true, kF16, kF16),
       mixed},
      {"f32_tokens_bf16_weights", Config(Activation::kSilu, Weighting::kLate, true, kF32, kBF16),
       mixed},
      {"bf16_tokens_f32_weights", Config(Activation::kGelu, Weighting::kEarly, true, kBF16, kF32),
       mixed},
      {"f16_tokens_bf16_weights", Config(Activation::kSilu, Weighting::kLate, false, kF16, kBF16),
       mixed},
      {"one_column", Config(Activation::kSilu, Weighting::kLate, true, kBF16, kBF16, 1, 1), mixed},
      {"no_rows", Config(Activation::kSilu, Weighting::kLate, true, kBF16, kBF16), {0, 0, 0, 0, 0}},
      {"several_blocks",
       Config(Activation::kSilu, Weighting::kLate, true, kBF16, kBF16, 16, 8),
       {700, 0, 513, 512, 3}},
      {"two_columns_of_tiles",
       Config(Activation::kSilu, Weighting::kEarly, true, kBF16, kBF16, 264, 136),
       {130, 0, 64, 1, 257},
       128},
      {"few_rows",
       Config(Activation::kGelu, Weighting::kEarly, true, kF16, kF16, 72, 200),
       {1, 65, 0, 4, 33},
       16},
      {"far_padding",
       Config(Activation::kRelu2, Weighting::kLate, false, kBF16, kBF16, 80, 48),
       {3, 0, 129, 1, 40},
       512},
      {"odd_starts",
       Config(Activation::kSilu, Weighting::kLate, true, kF16, kF16, 136, 72),
       {5, 0, 161, 1, 133},
       1},
      {"unaligned", Config(Activation::kSilu, Weighting::kLate, false, kF32, kF32), mixed, 1},
  };
  // More experts than one launch of any implementation takes.
  Case many = {
      "many_experts", Config(Activation::kSilu, Weighting::kEarly, true, kBF16, kBF16, 16, 8), {}};
  many.config.local_experts = 300;
  for (int64_t j = 0; j < many.config.local_experts; ++j) many.counts.push_back(j % 4);
  cases.push_back(many);
  return cases;
}

}  // namespace expertd::mlp_test

#endif  // TESTS_KERNELS_MLP_LAYER_H_
