// Two GPUs: nccl and nccl_lsa give the bits that loopback gives on the CPU, sums included.
#include <gtest/gtest.h>

#include <random>

#include "tests/conformance/ep/ep_world.h"

namespace expertd::conformance {
namespace {

constexpr int64_t kWorld = 2;

// What all operations of one step wrote, on both ranks.
using Outputs = std::vector<std::vector<std::byte>>;

TestMatrix RandomRows(DType dtype, int64_t rows, int64_t cols, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  TestMatrix matrix(dtype, rows, cols);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) matrix.Set(row, col, normal(random));
  }
  return matrix;
}

Outputs RunStep(EpWorld& world, const Scenario& scenario, DType dtype) {
  const Problem problem = MakeProblem(scenario, kWorld);
  const Handles handles = PrepareAll(world, problem);
  const OpContext combine = world.Next();
  const OpContext plain = world.Next();
  const OpContext spread = world.Next();
  Outputs outputs(3 * kWorld);
  world.Run([&](int64_t rank) {
    const auto index = static_cast<size_t>(rank);
    const EpHandle& handle = *handles[index];
    EpBackend& ep = world.rank(rank);
    const auto seed = static_cast<uint32_t>(100 + rank);
    const int64_t total = handle.counts().total;
    TestMatrix z = RandomRows(dtype, total, scenario.hidden, seed);
    std::vector<float> weights(static_cast<size_t>(total));
    std::mt19937 random(seed);
    for (float& weight : weights) weight = static_cast<float>(random() % 4096) / 1777.0f - 1.0f;
    TestMatrix y(dtype, handle.tokens(), scenario.hidden);
    absl::Status status = ep.Combine(combine, handle, z.view(), weights.data(), y.view());
    ASSERT_TRUE(status.ok()) << status;
    outputs[3 * index] = y.bytes();
    status = ep.DispatchBackward(plain, handle, z.view(), nullptr, y.view(), nullptr);
    ASSERT_TRUE(status.ok()) << status;
    outputs[3 * index + 1] = y.bytes();
    TestMatrix g = RandomRows(dtype, handle.tokens(), scenario.hidden, seed + 7);
    TestMatrix grad_z(dtype, total, scenario.hidden);
    status = ep.CombineBackward(spread, handle, g.view(), weights.data(), grad_z.view());
    ASSERT_TRUE(status.ok()) << status;
    outputs[3 * index + 2] = grad_z.bytes();
  });
  return outputs;
}

TEST(EpBits, SumsAreTheSameOnEveryBackend) {
  const std::vector<Scenario> scenarios = {{.name = "wide",
                                            .experts_per_rank = 8,
                                            .top_k = 8,
                                            .alignment = 16,
                                            .hidden = 520,
                                            .tokens = {300, 270}},
                                           {.name = "narrow_and_dropped",
                                            .experts_per_rank = 3,
                                            .top_k = 4,
                                            .alignment = 4,
                                            .hidden = 37,
                                            .tokens = {40, 31},
                                            .routes = Routes::kHoles,
                                            .policy = CapacityPolicy::kDrop,
                                            .capacity = 3 * 24}};
  for (const Scenario& scenario : scenarios) {
    const EpGroupConfig config = EpWorld::ConfigFor(scenario);
    EpWorld cpu("loopback", kWorld, config);
    for (const char* backend : {"nccl_lsa", "nccl"}) {
      EpWorld gpus(backend, kWorld, config);
      for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
        SCOPED_TRACE(scenario.name + " " + backend + " " + std::string(DTypeName(dtype)));
        const Outputs expected = RunStep(cpu, scenario, dtype);
        if (HasFatalFailure()) return;
        EXPECT_TRUE(RunStep(gpus, scenario, dtype) == expected);
      }
    }
  }
}

}  // namespace
}  // namespace expertd::conformance
