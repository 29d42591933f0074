// The expert MLP's tests, the CPU's own, on the GPU implementation; and its waves.
#include "tests/kernels/expert_mlp_cases.h"

#include "kernels/mlp/cublaslt_mlp.h"
#include "kernels/mlp/row_waves.h"
#include "kernels/mlp/sm90_mlp.h"
#include "tests/kernels/cuda/gpu_memory.h"

namespace expertd {
namespace {

INSTANTIATE_TEST_SUITE_P(Gpu, ExpertMlpTest, testing::Values("cublaslt", "sm90"),
                         [](const auto& info) { return info.param; });

TEST(RowWaves, CoverEveryDataRowOnceWithinTheirLimits) {
  const std::vector<int64_t> counts = {5, 0, 16, 1, 33, 0};
  const std::vector<int64_t> padded = {8, 0, 16, 8, 40, 0};
  for (int64_t run_rows : {1, 3, 7, 100}) {
    for (int64_t wave_rows : {1, 8, 20, 1000}) {
      std::vector<std::vector<bool>> seen;
      for (int64_t count : counts) seen.emplace_back(static_cast<size_t>(count), false);
      for (const RowRuns& wave :
           CutWaves({&counts, &padded, 72}, {.run_rows = run_rows, .wave_rows = wave_rows})) {
        ASSERT_GE(wave.count, 1);
        ASSERT_TRUE(wave.count == 1 || RowsOf(wave) <= wave_rows);
        int64_t scratch = 0;
        for (int i = 0; i < wave.count; ++i) {
          ASSERT_LE(wave.rows[i], run_rows);
          ASSERT_EQ(wave.scratch[i], scratch);
          scratch += wave.rows[i];
          const auto expert = static_cast<size_t>(wave.expert[i]);
          const int64_t base =
              std::accumulate(padded.begin(), padded.begin() + wave.expert[i], int64_t{0});
          for (int64_t r = 0; r < wave.rows[i]; ++r) {
            const auto row = static_cast<size_t>(wave.begin[i] - base + r);
            ASSERT_FALSE(seen[expert].at(row));
            seen[expert][row] = true;
          }
        }
      }
      for (const std::vector<bool>& rows : seen) {
        EXPECT_EQ(std::count(rows.begin(), rows.end(), false), 0);
      }
    }
  }
}

TEST(RowWaves, AWaveTakesOnlySoManyRuns) {
  const std::vector<int64_t> counts(200, 1);
  const std::vector<RowRuns> waves = CutWaves({&counts, &counts, 200}, {});
  ASSERT_EQ(waves.size(), 4u);
  EXPECT_EQ(waves[0].count, kMostRuns);
  EXPECT_EQ(waves[3].count, 200 - 3 * kMostRuns);
}

// Tiny waves of tiny runs on three lanes, with the bounds of the suite.
class WavesGpu : public testing::Test {
 protected:
  WavesGpu() { PoisonPool(*device_); }
  std::unique_ptr<ExpertMlp> Make(const MlpConfig& config, int64_t lanes, WaveLimits limits) {
    auto mlp = CublasLtMlp::Create(config, static_cast<CudaDevice&>(*device_), lanes, limits);
    EXPECT_TRUE(mlp.ok()) << mlp.status();
    return std::make_unique<StagedMlp>(config, *device_, *std::move(mlp));
  }
  std::unique_ptr<Device> device_ = *CreateDevice("cuda:0");
};

TEST_F(WavesGpu, ForwardAndDgradAreWithinTheirBounds) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    Layer layer(c);
    auto mlp = Make(c.config, 3, {.run_rows = 5, .wave_rows = 12});
    ASSERT_TRUE(mlp->Forward({.segments = layer.segments(),
                              .weights = layer.weights(),
                              .recv_x = layer.recv_x.data(),
                              .recv_w = layer.recv_w.data(),
                              .h = layer.h.data(),
                              .z = layer.z.data()})
                    .ok());
    CheckForward(layer);
    std::mt19937 random(10);
    layer.FillRows(layer.h, 2 * layer.i_size, random);
    ASSERT_TRUE(mlp->Dgrad({.segments = layer.segments(),
                            .weights = layer.weights(),
                            .h = layer.h.data(),
                            .recv_w = layer.recv_w.data(),
                            .grad_out = layer.grad_out.data(),
                            .grad_h = layer.grad_h.data(),
                            .grad_recv_x = layer.grad_x.data(),
                            .grad_w = layer.grad_w.data()})
                    .ok());
    CheckDgrad(layer);
  }
}

// Sums of 33 products of values up to 2 * 2 * 2: any two orders differ by at most 37 * 2^-22 of
// 264.
TEST_F(WavesGpu, WgradIsThatOfOneWave) {
  const Case c = Cases()[4];
  std::vector<float> results[2];
  const WaveLimits limits[] = {{.run_rows = 5, .wave_rows = 12},
                               CublasLtMlp::DefaultLimits(c.config)};
  for (int i = 0; i < 2; ++i) {
    Layer layer(c);
    std::mt19937 random(12);
    layer.FillRows(layer.h, 2 * layer.i_size, random);
    layer.FillRows(layer.grad_h, 2 * layer.i_size, random);
    std::vector<float> gate_up(static_cast<size_t>(layer.gate_up.size()));
    std::vector<float> down(static_cast<size_t>(layer.down.size()));
    ASSERT_TRUE(Make(c.config, 3, limits[i])
                    ->Wgrad({.segments = layer.segments(),
                             .recv_x = layer.recv_x.data(),
                             .h = layer.h.data(),
                             .recv_w = layer.recv_w.data(),
                             .grad_out = layer.grad_out.data(),
                             .grad_h = layer.grad_h.data(),
                             .gradients = {gate_up.data(), down.data(), nullptr, nullptr}})
                    .ok());
    results[i] = gate_up;
    results[i].insert(results[i].end(), down.begin(), down.end());
  }
  for (size_t i = 0; i < results[0].size(); ++i) {
    ASSERT_NEAR(results[0][i], results[1][i], 37 * 0x1p-22 * 264) << i;
  }
}

// Every kind of tile, on few blocks so that each makes many tiles.
class Sm90KindsGpu : public testing::TestWithParam<sm90::TileKind> {
 protected:
  std::unique_ptr<ExpertMlp> Make(const MlpConfig& config) {
    auto mlp =
        Sm90Mlp::Create(config, static_cast<CudaDevice&>(*device_), {.sms = 4, .kind = GetParam()});
    EXPECT_TRUE(mlp.ok()) << mlp.status();
    return std::make_unique<StagedMlp>(config, *device_, *std::move(mlp));
  }
  std::unique_ptr<ExpertMlp> Default(const MlpConfig& config) {
    return std::make_unique<StagedMlp>(config, *device_,
                                       *CreateExpertMlp("sm90", *device_, config));
  }
  std::unique_ptr<Device> device_ = *CreateDevice("cuda:0");
};

TEST_P(Sm90KindsGpu, ForwardAndDgradAreWithinTheirBounds) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    Layer layer(c);
    auto mlp = Make(c.config);
    ASSERT_TRUE(mlp->Forward({.segments = layer.segments(),
                              .weights = layer.weights(),
                              .recv_x = layer.recv_x.data(),
                              .recv_w = layer.recv_w.data(),
                              .h = layer.h.data(),
                              .z = layer.z.data()})
                    .ok());
    CheckForward(layer);
    std::mt19937 random(10);
    layer.FillRows(layer.h, 2 * layer.i_size, random);
    ASSERT_TRUE(mlp->Dgrad({.segments = layer.segments(),
                            .weights = layer.weights(),
                            .h = layer.h.data(),
                            .recv_w = layer.recv_w.data(),
                            .grad_out = layer.grad_out.data(),
                            .grad_h = layer.grad_h.data(),
                            .grad_recv_x = layer.grad_x.data(),
                            .grad_w = layer.grad_w.data()})
                    .ok());
    CheckDgrad(layer);
  }
}

// Every element of a gradient is of one tile, whoever makes it.
TEST_P(Sm90KindsGpu, GradientBitsDoNotDependOnTheNumberOfBlocks) {
  for (const Case& c : Cases()) {
    if (!sm90::Refusal(c.config).empty()) continue;
    SCOPED_TRACE(c.name);
    std::vector<float> results[2];
    for (std::vector<float>& result : results) {
      Layer layer(c);
      std::mt19937 random(12);
      layer.FillRows(layer.h, 2 * layer.i_size, random);
      layer.FillRows(layer.grad_h, 2 * layer.i_size, random);
      std::vector<float> gate_up(static_cast<size_t>(layer.gate_up.size()), 0.5f);
      std::vector<float> down(static_cast<size_t>(layer.down.size()), 0.25f);
      std::vector<float> gate_up_bias(layer.gate_up_bias.size());
      std::vector<float> down_bias(layer.down_bias.size());
      auto mlp = &result == results ? Make(c.config) : Default(c.config);
      ASSERT_TRUE(mlp->Wgrad({.segments = layer.segments(),
                              .recv_x = layer.recv_x.data(),
                              .h = layer.h.data(),
                              .recv_w = layer.recv_w.data(),
                              .grad_out = layer.grad_out.data(),
                              .grad_h = layer.grad_h.data(),
                              .gradients = {gate_up.data(), down.data(), gate_up_bias.data(),
                                            down_bias.data()}})
                      .ok());
      result = gate_up;
      result.insert(result.end(), down.begin(), down.end());
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, Sm90KindsGpu,
                         testing::Values(sm90::TileKind::kWide, sm90::TileKind::kNarrow));

}  // namespace
}  // namespace expertd
