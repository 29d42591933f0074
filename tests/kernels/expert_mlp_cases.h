// Expert MLPs against f64 within derived bounds; padding, tails, empty experts, accumulation.
#ifndef TESTS_KERNELS_EXPERT_MLP_CASES_H_
#define TESTS_KERNELS_EXPERT_MLP_CASES_H_
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/backends.h"
#include "kernels/cpu/cpu_device.h"
#include "tests/kernels/mlp_layer.h"
#include "tests/kernels/mlp_reference.h"
#include "tests/kernels/staged_mlp.h"
#include "tests/kernels/test_values.h"

namespace expertd {
namespace {

using mlp_test::Case;
using mlp_test::Cases;
using mlp_test::Layer;

class ExpertMlpTest : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<ExpertMlp> Make(const MlpConfig& config) {
    const bool on_cpu = GetParam() == "plain" || GetParam() == "onednn";
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

}  // namespace
}  // namespace expertd

#endif  // TESTS_KERNELS_EXPERT_MLP_CASES_H_
