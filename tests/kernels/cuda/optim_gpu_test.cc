// Parameter arithmetic on the GPU against the CPU's: the same bits, but for the order of Inspect.
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "base/error.h"
#include "kernels/cpu/cpu_optim.h"
#include "tests/kernels/cuda/gpu_memory.h"

namespace expertd {
namespace {

class OptimGpu : public testing::TestWithParam<int64_t> {
 protected:
  std::vector<float> Random(uint32_t seed, float low = -1, float high = 1) const {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform(low, high);
    std::vector<float> values(static_cast<size_t>(GetParam()));
    for (float& value : values) value = uniform(random);
    return values;
  }

  std::unique_ptr<Device> gpu_ = MakeGpu();
  std::unique_ptr<OptimKernels> on_gpu_ = CreateOptimKernels(*gpu_);
  std::unique_ptr<OptimKernels> on_cpu_ = CreateCpuOptim();
};

TEST_P(OptimGpu, InitialWeightsHaveTheCpusBits) {
  for (int64_t first : {int64_t{0}, int64_t{1}, int64_t{6}, (int64_t{1} << 36) + 3}) {
    const InitArgs args = {.seed = 0x123456789ABCDEFu,
                           .layer_key = 0xFEDCBA9876543210u,
                           .parameter_key = 2,
                           .first_index = first,
                           .count = GetParam(),
                           .bound = 0.0221f};
    std::vector<float> expected(static_cast<size_t>(GetParam()));
    ASSERT_TRUE(on_cpu_->InitUniform(args, expected.data()).ok());
    const DeviceBuffer out = Upload(*gpu_, std::vector<float>(expected.size(), -7.0f));
    ASSERT_TRUE(on_gpu_->InitUniform(args, out.as<float>()).ok());
    EXPECT_EQ(Download<float>(*gpu_, out), expected);
  }
}

TEST_P(OptimGpu, SgdHasTheCpusBits) {
  const std::vector<float> gradient = Random(1);
  for (const double momentum : {0.0, 0.9}) {
    const SgdArgs args = {
        .learning_rate = 0.031, .momentum = momentum, .weight_decay = 0.01, .gradient_scale = 0.37};
    std::vector<float> weight = Random(2);
    std::vector<float> buffer = Random(3);
    const DeviceBuffer on_weight = Upload(*gpu_, weight);
    const DeviceBuffer on_buffer = Upload(*gpu_, buffer);
    const DeviceBuffer on_gradient = Upload(*gpu_, gradient);
    const bool with_buffer = momentum != 0 && GetParam() > 0;  // an empty vector has no address
    if (momentum != 0 && !with_buffer) continue;
    for (int step = 0; step < 3; ++step) {
      ASSERT_TRUE(on_cpu_
                      ->Sgd(args, gradient.data(), GetParam(),
                            with_buffer ? buffer.data() : nullptr, weight.data())
                      .ok());
      ASSERT_TRUE(on_gpu_
                      ->Sgd(args, on_gradient.as<float>(), GetParam(),
                            with_buffer ? on_buffer.as<float>() : nullptr, on_weight.as<float>())
                      .ok());
    }
    EXPECT_EQ(Download<float>(*gpu_, on_weight), weight);
    EXPECT_EQ(Download<float>(*gpu_, on_buffer), buffer);
  }
}

TEST_P(OptimGpu, AdamWHasTheCpusBits) {
  const std::vector<float> gradient = Random(4);
  std::vector<float> weight = Random(5);
  std::vector<float> first = Random(6);
  std::vector<float> second = Random(7, 0, 1);
  const DeviceBuffer on_gradient = Upload(*gpu_, gradient);
  const DeviceBuffer on_weight = Upload(*gpu_, weight);
  const DeviceBuffer on_first = Upload(*gpu_, first);
  const DeviceBuffer on_second = Upload(*gpu_, second);
  for (int64_t step = 1; step <= 3; ++step) {
    const AdamWArgs args = {
        .learning_rate = 1e-3, .weight_decay = 0.1, .gradient_scale = 0.5, .step = step};
    ASSERT_TRUE(
        on_cpu_
            ->AdamW(args, gradient.data(), GetParam(), first.data(), second.data(), weight.data())
            .ok());
    ASSERT_TRUE(on_gpu_
                    ->AdamW(args, on_gradient.as<float>(), GetParam(), on_first.as<float>(),
                            on_second.as<float>(), on_weight.as<float>())
                    .ok());
  }
  EXPECT_EQ(Download<float>(*gpu_, on_weight), weight);
  EXPECT_EQ(Download<float>(*gpu_, on_first), first);
  EXPECT_EQ(Download<float>(*gpu_, on_second), second);
}

TEST_P(OptimGpu, RoundingHasTheCpusBits) {
  std::vector<float> from = Random(8, -70000, 70000);
  const float special[] = {
      0.0f,     -0.0f,       1e-40f,      65519.9f,
      65520.0f, 1.00390625f, 1.01171875f, std::numeric_limits<float>::infinity(),
      3.0e-8f,  2.9e-8f};
  for (size_t i = 0; i < std::size(special) && i < from.size(); ++i) from[i] = special[i];
  const DeviceBuffer on_from = Upload(*gpu_, from);
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<uint16_t> expected(from.size());
    ASSERT_TRUE(on_cpu_->Round(from.data(), GetParam(), dtype, expected.data()).ok());
    const DeviceBuffer to = Upload(*gpu_, expected);
    ASSERT_TRUE(gpu_->Zero(to.data(), to.size()).ok());
    ASSERT_TRUE(on_gpu_->Round(on_from.as<float>(), GetParam(), dtype, to.data()).ok());
    EXPECT_EQ(Download<uint16_t>(*gpu_, to), expected);
  }
}

TEST_P(OptimGpu, InspectSumsSquaresTheSameWayEachTime) {
  const std::vector<float> gradient = Random(9);
  double sum = 0;
  for (float value : gradient) sum += static_cast<double>(value) * static_cast<double>(value);
  const DeviceBuffer on_gradient = Upload(*gpu_, gradient);
  const auto first = on_gpu_->Inspect(on_gradient.as<float>(), GetParam());
  const auto second = on_gpu_->Inspect(on_gradient.as<float>(), GetParam());
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NEAR(first->sum_of_squares, sum, 1e-12 * sum);
  EXPECT_EQ(first->sum_of_squares, second->sum_of_squares);
  EXPECT_TRUE(first->finite);
}

TEST_P(OptimGpu, InspectFindsASingleSpecialValueAnywhere) {
  if (GetParam() == 0) return;
  for (float bad :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (int64_t at : {int64_t{0}, GetParam() / 2, GetParam() - 1}) {
      std::vector<float> gradient = Random(10);
      gradient[static_cast<size_t>(at)] = bad;
      const DeviceBuffer on_gradient = Upload(*gpu_, gradient);
      EXPECT_FALSE(on_gpu_->Inspect(on_gradient.as<float>(), GetParam())->finite) << at;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Counts, OptimGpu, testing::Values(0, 1, 2, 5, 255, 4099, 1000003));

}  // namespace
}  // namespace expertd
