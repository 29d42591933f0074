// plain and onednn against f64 within derived bounds; padding, tails, empty experts, accumulation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "base/strings.h"
#include "kernels/backends.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/onednn_mlp.h"
#include "tests/kernels/mlp_reference.h"
#include "tests/kernels/staged_mlp.h"
#include "tests/kernels/test_values.h"

namespace expertd {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kTail = 3;  // poisoned rows past the total

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

MlpConfig Config(Activation activation, Weighting weighting, bool bias, DType token, DType weight,
                 int64_t hidden = 37, int64_t intermediate = 21) {
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

std::vector<Case> Cases() {
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
      {"unaligned", Config(Activation::kSilu, Weighting::kLate, false, kF32, kF32), mixed, 1},
  };
  return cases;
}

class ExpertMlpTest : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<ExpertMlp> Make(const MlpConfig& config) {
    const bool on_cpu = GetParam() != "cublaslt";
    auto device = CreateDevice(on_cpu ? "cpu" : "cuda:0");
    EXPECT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    auto made = CreateExpertMlp(GetParam(), *device_, config);
    EXPECT_TRUE(made.ok()) << made.status();
    if (on_cpu) return *std::move(made);
    return std::make_unique<StagedMlp>(config, *device_, *std::move(made));
  }
  std::unique_ptr<Device> device_;
};

Bounded WeightOf(const Layer& layer, int64_t row) { return {layer.recv_w[Layer::At(row)], 0}; }

void CheckForward(const Layer& layer) {
  const MlpConfig& config = layer.config;
  const bool early = config.weighting == Weighting::kEarly;
  layer.ForRows([&](int64_t j, int64_t row) {
    std::vector<Bounded> h(Layer::At(2 * layer.i_size));
    for (int64_t n = 0; n < 2 * layer.i_size; ++n) {
      BoundedSum sum;
      for (int64_t k = 0; k < layer.h_size; ++k) {
        sum.Add({layer.recv_x.Get(row * layer.h_size + k), 0}, layer.GateUp(j, k, n));
      }
      if (config.gate_up_bias) {
        sum.Add({layer.gate_up_bias[Layer::At(j * 2 * layer.i_size + n)], 0}, {1, 0});
      }
      h[Layer::At(n)] = sum.Result();
      const Bounded stored = Stored(h[Layer::At(n)], config.token_dtype);
      ASSERT_NEAR(layer.h.Get(row * 2 * layer.i_size + n), stored.value, stored.error)
          << "h " << row;
    }
    std::vector<Bounded> u;
    for (int64_t i = 0; i < layer.i_size; ++i) {
      Bounded value =
          Times(BoundedAct(config.activation, h[Layer::At(i)]), h[Layer::At(layer.i_size + i)]);
      if (early) value = Times(value, WeightOf(layer, row));
      u.push_back(Stored(value, config.token_dtype));
    }
    for (int64_t n = 0; n < layer.h_size; ++n) {
      BoundedSum sum;
      for (int64_t i = 0; i < layer.i_size; ++i) sum.Add(u[Layer::At(i)], layer.Down(j, i, n));
      if (config.down_bias) {
        sum.Add({layer.down_bias[Layer::At(j * layer.h_size + n)], 0},
                early ? WeightOf(layer, row) : Bounded{1, 0});
      }
      const Bounded z = Stored(sum.Result(), config.token_dtype);
      ASSERT_NEAR(layer.z.Get(row * layer.h_size + n), z.value, z.error) << "z " << row << " " << n;
    }
  });
  layer.ExpectPadsAndTail(layer.h, 2 * layer.i_size, "h");
  layer.ExpectPadsAndTail(layer.z, layer.h_size, "z");
}

TEST_P(ExpertMlpTest, ForwardIsWithinItsBound) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    Layer layer(c);
    const absl::Status status = Make(c.config)->Forward({.segments = layer.segments(),
                                                         .weights = layer.weights(),
                                                         .recv_x = layer.recv_x.data(),
                                                         .recv_w = layer.recv_w.data(),
                                                         .h = layer.h.data(),
                                                         .z = layer.z.data()});
    ASSERT_TRUE(status.ok()) << status;
    CheckForward(layer);
  }
}

void CheckDgrad(const Layer& layer) {
  const MlpConfig& config = layer.config;
  layer.ForRows([&](int64_t j, int64_t row) {
    const auto g = [&](int64_t n) {
      return Bounded{layer.grad_out.Get(row * layer.h_size + n), 0};
    };
    const auto h = [&](int64_t n) { return Bounded{layer.h.Get(row * 2 * layer.i_size + n), 0}; };
    BoundedSum grad_w;
    std::vector<Bounded> grad_h(Layer::At(2 * layer.i_size));
    for (int64_t i = 0; i < layer.i_size; ++i) {
      BoundedSum sum;
      for (int64_t n = 0; n < layer.h_size; ++n) sum.Add(g(n), layer.Down(j, i, n));
      const Bounded unweighted = sum.Result();
      const Bounded value = BoundedAct(config.activation, h(i));
      grad_w.Add(Times(value, h(layer.i_size + i)), unweighted);
      const Bounded grad_u = Times(unweighted, WeightOf(layer, row));
      grad_h[Layer::At(i)] =
          Stored(Times(Times(grad_u, h(layer.i_size + i)), BoundedSlope(config.activation, h(i))),
                 config.token_dtype);
      grad_h[Layer::At(layer.i_size + i)] = Stored(Times(grad_u, value), config.token_dtype);
    }
    if (config.down_bias) {
      for (int64_t n = 0; n < layer.h_size; ++n) {
        grad_w.Add({layer.down_bias[Layer::At(j * layer.h_size + n)], 0}, g(n));
      }
    }
    const Bounded want_w = grad_w.Result();
    ASSERT_NEAR(layer.grad_w[Layer::At(row)], want_w.value, want_w.error) << "grad_w " << row;
    for (int64_t n = 0; n < 2 * layer.i_size; ++n) {
      ASSERT_NEAR(layer.grad_h.Get(row * 2 * layer.i_size + n), grad_h[Layer::At(n)].value,
                  grad_h[Layer::At(n)].error)
          << "grad_h " << row << " " << n;
    }
    for (int64_t k = 0; k < layer.h_size; ++k) {
      BoundedSum sum;
      for (int64_t n = 0; n < 2 * layer.i_size; ++n)
        sum.Add(grad_h[Layer::At(n)], layer.GateUp(j, k, n));
      const Bounded want = Stored(sum.Result(), config.token_dtype);
      ASSERT_NEAR(layer.grad_x.Get(row * layer.h_size + k), want.value, want.error)
          << "grad_x " << row;
    }
  });
  layer.ExpectPadsAndTail(layer.grad_h, 2 * layer.i_size, "grad_h");
  layer.ExpectPadsAndTail(layer.grad_x, layer.h_size, "grad_x");
  for (int64_t row = 0; row < layer.rows; ++row) {
    if (layer.IsData(row)) continue;
    ASSERT_EQ(layer.grad_w[Layer::At(row)], row < layer.total ? 0.0f : -77.0f);
  }
}

TEST_P(ExpertMlpTest, DgradIsWithinItsBound) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    Layer layer(c);
    std::mt19937 random(10);
    layer.FillRows(layer.h, 2 * layer.i_size, random);
    const absl::Status status = Make(c.config)->Dgrad({.segments = layer.segments(),
                                                       .weights = layer.weights(),
                                                       .h = layer.h.data(),
                                                       .recv_w = layer.recv_w.data(),
                                                       .grad_out = layer.grad_out.data(),
                                                       .grad_h = layer.grad_h.data(),
                                                       .grad_recv_x = layer.grad_x.data(),
                                                       .grad_w = layer.grad_w.data()});
    ASSERT_TRUE(status.ok()) << status;
    CheckDgrad(layer);
  }
}

// sum over the rows of expert j of left(row) * right(row), called twice on top of `start`.
template <typename Left, typename Right>
void ExpectTwice(const Layer& layer, int64_t expert, double start, float got, const Left& left,
                 const Right& right, const char* what) {
  BoundedSum sum;
  layer.ForRows([&](int64_t j, int64_t row) {
    if (j == expert) sum.Add(left(row), right(row));
  });
  const Bounded once = sum.Result();
  ASSERT_NEAR(got, start + 2 * once.value,
              2 * once.error + 3 * 0x1p-23 * (start + std::abs(once.value)))
      << what << " of expert " << expert;
  if (layer.counts[Layer::At(expert)] == 0) {
    ASSERT_EQ(got, static_cast<float>(start)) << what;
  }
}

TEST_P(ExpertMlpTest, WgradAddsWithinItsBoundAndLeavesEmptyExpertsAlone) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    Layer layer(c);
    std::mt19937 random(12);
    layer.FillRows(layer.h, 2 * layer.i_size, random);
    layer.FillRows(layer.grad_h, 2 * layer.i_size, random);
    std::vector<float> gate_up(static_cast<size_t>(layer.gate_up.size()), 1.5f);
    std::vector<float> down(static_cast<size_t>(layer.down.size()), 2.5f);
    std::vector<float> gate_up_bias(layer.gate_up_bias.size(), 3.5f);
    std::vector<float> down_bias(layer.down_bias.size(), 4.5f);
    auto mlp = Make(c.config);
    for (int round = 0; round < 2; ++round) {
      const absl::Status status =
          mlp->Wgrad({.segments = layer.segments(),
                      .recv_x = layer.recv_x.data(),
                      .h = layer.h.data(),
                      .recv_w = layer.recv_w.data(),
                      .grad_out = layer.grad_out.data(),
                      .grad_h = layer.grad_h.data(),
                      .gradients = {gate_up.data(), down.data(),
                                    c.config.gate_up_bias ? gate_up_bias.data() : nullptr,
                                    c.config.down_bias ? down_bias.data() : nullptr}});
      ASSERT_TRUE(status.ok()) << status;
    }
    const int64_t inner = layer.i_size;
    const int64_t hidden = layer.h_size;
    // (w u) as the product reads it: bf16 operands round it once.
    const auto u = [&](int64_t row, int64_t i) {
      const Bounded gate = {layer.h.Get(row * 2 * inner + i), 0};
      const Bounded up = {layer.h.Get(row * 2 * inner + inner + i), 0};
      return Stored(Times(Times(BoundedAct(c.config.activation, gate), up), WeightOf(layer, row)),
                    c.config.token_dtype);
    };
    const auto from = [](const TypedArray& tensor, int64_t cols, int64_t col) {
      return [&tensor, cols, col](int64_t row) { return Bounded{tensor.Get(row * cols + col), 0}; };
    };
    for (int64_t j = 0; j < layer.Experts(); ++j) {
      for (int64_t n = 0; n < 2 * inner; ++n) {
        for (int64_t k = 0; k < hidden; ++k) {
          ExpectTwice(layer, j, 1.5, gate_up[Layer::At((j * hidden + k) * 2 * inner + n)],
                      from(layer.recv_x, hidden, k), from(layer.grad_h, 2 * inner, n), "gate_up");
        }
        ExpectTwice(
            layer, j, 3.5, gate_up_bias[Layer::At(j * 2 * inner + n)],
            [&](int64_t) {
              return Bounded{c.config.gate_up_bias ? 1.0 : 0.0, 0};
            },
            from(layer.grad_h, 2 * inner, n), "gate_up_bias");
      }
      for (int64_t n = 0; n < hidden; ++n) {
        for (int64_t i = 0; i < inner; ++i) {
          ExpectTwice(
              layer, j, 2.5, down[Layer::At((j * inner + i) * hidden + n)],
              [&](int64_t row) { return u(row, i); }, from(layer.grad_out, hidden, n), "down");
        }
        if (!c.config.down_bias) continue;
        ExpectTwice(
            layer, j, 4.5, down_bias[Layer::At(j * hidden + n)],
            [&](int64_t row) { return WeightOf(layer, row); }, from(layer.grad_out, hidden, n),
            "down_bias");
      }
    }
  }
}

TEST_P(ExpertMlpTest, SameInputsGiveTheSameBits) {
  const Case c = Cases()[2];
  Layer first(c);
  Layer second(c);
  auto mlp = Make(c.config);
  for (Layer* layer : {&first, &second}) {
    ASSERT_TRUE(mlp->Forward({.segments = layer->segments(),
                              .weights = layer->weights(),
                              .recv_x = layer->recv_x.data(),
                              .recv_w = layer->recv_w.data(),
                              .h = layer->h.data(),
                              .z = layer->z.data()})
                    .ok());
  }
  EXPECT_EQ(first.z.bytes(), second.z.bytes());
  EXPECT_EQ(first.h.bytes(), second.h.bytes());
}

TEST_P(ExpertMlpTest, ForwardWithoutBackwardNeedsNoH) {
  const Case c = Cases()[1];
  Layer with(c);
  Layer without(c);
  auto mlp = Make(c.config);
  for (Layer* layer : {&with, &without}) {
    ASSERT_TRUE(mlp->Forward({.segments = layer->segments(),
                              .weights = layer->weights(),
                              .recv_x = layer->recv_x.data(),
                              .recv_w = layer->recv_w.data(),
                              .h = layer == &with ? layer->h.data() : nullptr,
                              .z = layer->z.data()})
                    .ok());
  }
  EXPECT_EQ(with.z.bytes(), without.z.bytes());
}

TEST_P(ExpertMlpTest, ANewVersionOfTheWeightsIsUsed) {
  const Case c = Cases()[3];
  Layer layer(c);
  auto mlp = Make(c.config);
  const auto run = [&](uint64_t version) {
    ASSERT_TRUE(mlp->Forward({.segments = layer.segments(),
                              .weights = layer.weights(version),
                              .recv_x = layer.recv_x.data(),
                              .recv_w = layer.recv_w.data(),
                              .h = layer.h.data(),
                              .z = layer.z.data()})
                    .ok());
  };
  run(1);
  for (int64_t n = 0; n < layer.gate_up.size(); ++n) layer.gate_up.Set(n, 0.25);
  for (int64_t n = 0; n < layer.down.size(); ++n) layer.down.Set(n, -0.5);
  run(2);
  CheckForward(layer);
}

TEST_P(ExpertMlpTest, EveryThreadCountIsWithinTheBound) {
  const int before = CpuThreads();
  const Case c = Cases()[11];
  auto mlp = Make(c.config);
  for (int threads : {1, 2, 3, 1}) {
    SetCpuThreads(threads);
    Layer layer(c);
    ASSERT_TRUE(mlp->Forward({.segments = layer.segments(),
                              .weights = layer.weights(),
                              .recv_x = layer.recv_x.data(),
                              .recv_w = layer.recv_w.data(),
                              .h = layer.h.data(),
                              .z = layer.z.data()})
                    .ok());
    CheckForward(layer);
  }
  SetCpuThreads(before);
}

INSTANTIATE_TEST_SUITE_P(Cpu, ExpertMlpTest, testing::Values("plain", "onednn"),
                         [](const auto& info) { return info.param; });

TEST(OnednnRowClass, IsNeverSmallerAndAtMostAnEighthMore) {
  int64_t classes = 0;
  for (int64_t rows = 1; rows <= 512; ++rows) {
    const int64_t padded = OnednnRowClass(rows);
    ASSERT_GE(padded, rows);
    ASSERT_EQ(OnednnRowClass(padded), padded);
    if (rows >= 128) {
      ASSERT_LE(padded * 8, rows * 9 + 8);
    }
    if (padded == rows) ++classes;
  }
  EXPECT_LE(classes, 32) << "each class is a primitive per product";
}

}  // namespace
}  // namespace expertd
