// The router on the GPU against the CPU's: equal ids, values within the roundings of f32 and sums.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

#include "kernels/cpu/cpu_router.h"
#include "tests/kernels/cuda/gpu_memory.h"
#include "tests/kernels/test_values.h"

namespace expertd {
namespace {

struct Variant {
  std::string name;
  RouterConfig config;
};

std::vector<Variant> Variants() {
  return {
      {"softmax_after", {RouterKind::kSoftmax, false, 1, 1, 1.0, false, 64, 8}},
      {"softmax_after_one", {RouterKind::kSoftmax, false, 1, 1, 1.0, false, 13, 1}},
      {"softmax_after_all", {RouterKind::kSoftmax, false, 1, 1, 1.0, false, 7, 7}},
      {"softmax_before", {RouterKind::kSoftmax, true, 1, 1, 2.5, false, 256, 8}},
      {"softmax_groups", {RouterKind::kSoftmax, false, 4, 2, 1.0, false, 64, 4}},
      {"softmax_before_groups", {RouterKind::kSoftmax, true, 3, 2, 1.5, false, 12, 4}},
      {"sigmoid", {RouterKind::kSigmoid, false, 1, 1, 1.0, false, 64, 8}},
      {"sigmoid_one", {RouterKind::kSigmoid, false, 1, 1, 3.0, false, 12, 1}},
      {"sigmoid_bias_groups", {RouterKind::kSigmoid, false, 8, 4, 2.5, true, 256, 8}},
      {"many_experts", {RouterKind::kSoftmax, true, 1, 1, 1.0, false, 4096, 16}},
  };
}

class RouterGpu : public testing::TestWithParam<Variant> {
 protected:
  static constexpr int64_t kTokens = 77;

  RouterGpu() : config_(GetParam().config) {
    std::mt19937 random(3);
    logits_ = Random(kTokens * config_.expert_count, random);
    for (size_t i = 0; i < logits_.size(); i += 5) logits_[i] = 0.25f;  // ties
    bias_ = Random(config_.expert_count, random);
    grad_weights_ = Random(kTokens * config_.top_k, random);
    ids_.resize(static_cast<size_t>(kTokens * config_.top_k));
    weights_.resize(ids_.size());
    EXPECT_TRUE(
        on_cpu_->Select(config_, logits_.data(), bias(), kTokens, ids_.data(), weights_.data())
            .ok());
  }

  static std::vector<float> Random(int64_t count, std::mt19937& random) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = std::uniform_real_distribution<float>(-3, 3)(random);
    return values;
  }
  const float* bias() const { return config_.selection_bias ? bias_.data() : nullptr; }
  static void ExpectClose(const std::vector<float>& got, const std::vector<float>& want,
                          double relative, double absolute) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], relative * std::abs(static_cast<double>(want[i])) + absolute)
          << i;
    }
  }

  const RouterConfig config_;
  std::unique_ptr<Device> gpu_ = MakeGpu();
  std::unique_ptr<RouterKernels> on_gpu_ = CreateRouterKernels(*gpu_);
  std::unique_ptr<RouterKernels> on_cpu_ = CreateCpuRouter();
  std::vector<float> logits_, bias_, grad_weights_, weights_;
  std::vector<int64_t> ids_;
};

TEST_P(RouterGpu, SelectsTheCpusExpertsAndWeights) {
  const DeviceBuffer logits = Upload(*gpu_, logits_);
  const DeviceBuffer on_bias = Upload(*gpu_, bias_);
  const DeviceBuffer ids = Upload(*gpu_, std::vector<int64_t>(ids_.size(), -7));
  const DeviceBuffer weights = Upload(*gpu_, std::vector<float>(ids_.size(), -7));
  ASSERT_TRUE(on_gpu_
                  ->Select(config_, logits.as<float>(),
                           config_.selection_bias ? on_bias.as<float>() : nullptr, kTokens,
                           ids.as<int64_t>(), weights.as<float>())
                  .ok());
  EXPECT_EQ(Download<int64_t>(*gpu_, ids), ids_);
  ExpectClose(Download<float>(*gpu_, weights), weights_, 0x1p-23, 0);
}

TEST_P(RouterGpu, SelectionGradientIsTheCpus) {
  std::vector<float> want(logits_.size());
  ASSERT_TRUE(on_cpu_
                  ->SelectBackward(config_, logits_.data(), ids_.data(), grad_weights_.data(),
                                   kTokens, want.data())
                  .ok());
  const DeviceBuffer logits = Upload(*gpu_, logits_);
  const DeviceBuffer ids = Upload(*gpu_, ids_);
  const DeviceBuffer grad = Upload(*gpu_, grad_weights_);
  const DeviceBuffer out = Upload(*gpu_, std::vector<float>(logits_.size(), -7));
  ASSERT_TRUE(on_gpu_
                  ->SelectBackward(config_, logits.as<float>(), ids.as<int64_t>(), grad.as<float>(),
                                   kTokens, out.as<float>())
                  .ok());
  ExpectClose(Download<float>(*gpu_, out), want, 0x1p-22, 1e-12);
}

TEST_P(RouterGpu, AuxiliaryLossAndItsGradientAreTheCpus) {
  const auto experts = static_cast<size_t>(config_.expert_count);
  std::vector<float> routed(experts), affinity(experts);
  ASSERT_TRUE(
      on_cpu_
          ->AuxSums(config_, logits_.data(), ids_.data(), kTokens, routed.data(), affinity.data())
          .ok());
  std::vector<float> want = logits_;  // something to add to
  ASSERT_TRUE(
      on_cpu_->AuxBackward(config_, logits_.data(), bias_.data(), kTokens, want.data()).ok());
  const DeviceBuffer logits = Upload(*gpu_, logits_);
  const DeviceBuffer ids = Upload(*gpu_, ids_);
  const DeviceBuffer scale = Upload(*gpu_, bias_);
  const DeviceBuffer sums = Upload(*gpu_, std::vector<float>(2 * experts, -7));
  const DeviceBuffer grad = Upload(*gpu_, logits_);
  ASSERT_TRUE(on_gpu_
                  ->AuxSums(config_, logits.as<float>(), ids.as<int64_t>(), kTokens,
                            sums.as<float>(), sums.as<float>() + experts)
                  .ok());
  ASSERT_TRUE(
      on_gpu_
          ->AuxBackward(config_, logits.as<float>(), scale.as<float>(), kTokens, grad.as<float>())
          .ok());
  const std::vector<float> got = Download<float>(*gpu_, sums);
  EXPECT_EQ(std::vector<float>(got.begin(), got.begin() + static_cast<ptrdiff_t>(experts)), routed);
  ExpectClose({got.begin() + static_cast<ptrdiff_t>(experts), got.end()}, affinity, 0x1p-23, 0);
  ExpectClose(Download<float>(*gpu_, grad), want, 0x1p-22, 1e-7);
}

INSTANTIATE_TEST_SUITE_P(Variants, RouterGpu, testing::ValuesIn(Variants()),
                         [](const auto& info) { return info.param.name; });

// Logits, their gradients and AddTo, for every token dtype. Sums of n products in f32, in any
// order, are within (n + 4) 2^-23 of the sum of magnitudes.
class RouterProductsGpu : public testing::TestWithParam<DType> {};

TEST_P(RouterProductsGpu, LogitsAndGradientsAreWithinTheirBounds) {
  const DType dtype = GetParam();
  const int64_t tokens = 67, hidden = 93, experts = 22;
  auto gpu = MakeGpu();
  auto router = CreateRouterKernels(*gpu);
  std::mt19937 random(5);
  TypedArray x(dtype, tokens * hidden);
  for (int64_t i = 0; i < x.size(); ++i) x.Set(i, SmallValue(random));
  std::vector<float> weight, grad_logits;
  for (int64_t i = 0; i < hidden * experts; ++i) {
    weight.push_back(static_cast<float>(SmallValue(random)) / 7);
  }
  for (int64_t i = 0; i < tokens * experts; ++i) {
    grad_logits.push_back(static_cast<float>(SmallValue(random)) / 3);
  }
  const DeviceBuffer on_x = Upload(*gpu, x.bytes());
  const DeviceBuffer on_weight = Upload(*gpu, weight);
  const DeviceBuffer on_grad = Upload(*gpu, grad_logits);
  const DeviceBuffer logits = Upload(*gpu, std::vector<float>(grad_logits.size(), -7));
  const DeviceBuffer grad_x =
      Upload(*gpu, std::vector<float>(static_cast<size_t>(tokens * hidden), 1.5f));
  const DeviceBuffer grad_weight = Upload(*gpu, std::vector<float>(weight.size(), 2.5f));
  const ConstMatrix view = {on_x.data(), dtype, tokens, hidden};
  ASSERT_TRUE(router->Logits(view, on_weight.as<float>(), experts, logits.as<float>()).ok());
  ASSERT_TRUE(router
                  ->LogitsBackward(view, on_weight.as<float>(), experts, on_grad.as<float>(),
                                   grad_x.as<float>(), grad_weight.as<float>())
                  .ok());
  const auto expect = [](float got, double start, int64_t terms, const auto& product) {
    double sum = start;
    double magnitude = std::abs(start);
    for (int64_t i = 0; i < terms; ++i) {
      sum += product(i);
      magnitude += std::abs(product(i));
    }
    ASSERT_NEAR(got, sum, static_cast<double>(terms + 4) * 0x1p-23 * magnitude);
  };
  const auto at = [](const std::vector<float>& values, int64_t i) {
    return static_cast<double>(values[static_cast<size_t>(i)]);
  };
  const std::vector<float> got_logits = Download<float>(*gpu, logits);
  const std::vector<float> got_x = Download<float>(*gpu, grad_x);
  const std::vector<float> got_weight = Download<float>(*gpu, grad_weight);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t e = 0; e < experts; ++e) {
      expect(got_logits[static_cast<size_t>(t * experts + e)], 0, hidden,
             [&](int64_t h) { return x.Get(t * hidden + h) * at(weight, h * experts + e); });
    }
    for (int64_t h = 0; h < hidden; ++h) {
      expect(got_x[static_cast<size_t>(t * hidden + h)], 1.5, experts, [&](int64_t e) {
        return at(grad_logits, t * experts + e) * at(weight, h * experts + e);
      });
    }
  }
  for (int64_t h = 0; h < hidden; ++h) {
    for (int64_t e = 0; e < experts; ++e) {
      expect(got_weight[static_cast<size_t>(h * experts + e)], 2.5, tokens,
             [&](int64_t t) { return x.Get(t * hidden + h) * at(grad_logits, t * experts + e); });
    }
  }
}

TEST_P(RouterProductsGpu, AddToRoundsTheSumOnce) {
  const DType dtype = GetParam();
  auto gpu = MakeGpu();
  std::mt19937 random(6);
  TypedArray grad(dtype, 7 * 11);
  std::vector<float> extra;
  for (int64_t i = 0; i < grad.size(); ++i) {
    grad.Set(i, SmallValue(random));
    extra.push_back(static_cast<float>(SmallValue(random)) / 3);
  }
  TypedArray want = grad;
  ASSERT_TRUE(CreateCpuRouter()->AddTo(extra.data(), {want.data(), dtype, 7, 11}).ok());
  const DeviceBuffer on_grad = Upload(*gpu, grad.bytes());
  const DeviceBuffer on_extra = Upload(*gpu, extra);
  ASSERT_TRUE(
      CreateRouterKernels(*gpu)->AddTo(on_extra.as<float>(), {on_grad.data(), dtype, 7, 11}).ok());
  EXPECT_EQ(Download<std::byte>(*gpu, on_grad), want.bytes());
}

TEST_P(RouterProductsGpu, NoTokensAddNothing) {
  auto gpu = MakeGpu();
  auto router = CreateRouterKernels(*gpu);
  const DeviceBuffer weight = Upload(*gpu, std::vector<float>(8 * 4, 1.0f));
  const DeviceBuffer grad = Upload(*gpu, std::vector<float>(8 * 4, 3.0f));
  const ConstMatrix none = {weight.data(), GetParam(), 0, 8};
  float* nothing = weight.as<float>();
  EXPECT_TRUE(router->Logits(none, weight.as<float>(), 4, nothing).ok());
  EXPECT_TRUE(
      router->LogitsBackward(none, weight.as<float>(), 4, nothing, nothing, grad.as<float>()).ok());
  EXPECT_EQ(Download<float>(*gpu, grad), std::vector<float>(8 * 4, 3.0f));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, RouterProductsGpu,
                         testing::Values(DType::kF32, DType::kF16, DType::kBF16));

}  // namespace
}  // namespace expertd
