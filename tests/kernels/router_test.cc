// The router's variants against a brute force in f64, and its gradients by finite differences.
#include "kernels/cpu/cpu_router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/strings.h"
#include "tests/kernels/test_values.h"

namespace expertd {
namespace {

struct Variant {
  const char* name;
  RouterConfig config;
};

const Variant kVariants[] = {
    {"softmax_after", {RouterKind::kSoftmax, false, 1, 1, 1.0, false, 12, 4}},
    {"softmax_after_one", {RouterKind::kSoftmax, false, 1, 1, 1.0, false, 12, 1}},
    {"softmax_after_all", {RouterKind::kSoftmax, false, 1, 1, 1.0, false, 7, 7}},
    {"softmax_before", {RouterKind::kSoftmax, true, 1, 1, 1.0, false, 12, 4}},
    {"softmax_before_scaled", {RouterKind::kSoftmax, true, 1, 1, 2.5, false, 12, 3}},
    {"softmax_groups", {RouterKind::kSoftmax, false, 4, 2, 1.0, false, 12, 4}},
    {"softmax_before_groups", {RouterKind::kSoftmax, true, 3, 2, 1.5, false, 12, 4}},
    {"sigmoid", {RouterKind::kSigmoid, false, 1, 1, 1.0, false, 12, 4}},
    {"sigmoid_one", {RouterKind::kSigmoid, false, 1, 1, 3.0, false, 12, 1}},
    {"sigmoid_bias", {RouterKind::kSigmoid, false, 1, 1, 2.5, true, 12, 4}},
    {"sigmoid_bias_groups", {RouterKind::kSigmoid, false, 4, 2, 2.5, true, 16, 4}},
};

std::vector<double> Probabilities(const RouterConfig& config, const std::vector<double>& x) {
  std::vector<double> p(x.size());
  if (config.kind == RouterKind::kSigmoid) {
    std::transform(x.begin(), x.end(), p.begin(), [](double v) { return 1 / (1 + std::exp(-v)); });
    return p;
  }
  std::transform(x.begin(), x.end(), p.begin(), [](double v) { return std::exp(v); });
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& value : p) value /= sum;
  return p;
}

// Indices by descending value, lower index first among equals.
std::vector<int64_t> Ranked(const std::vector<double>& values) {
  std::vector<int64_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  return order;
}

std::vector<int64_t> SelectIds(const RouterConfig& config, const std::vector<double>& x,
                               const float* bias) {
  const bool raw = config.kind == RouterKind::kSoftmax && !config.softmax_before_topk;
  std::vector<double> scores = raw ? x : Probabilities(config, x);
  if (bias != nullptr) {
    for (size_t e = 0; e < scores.size(); ++e) scores[e] += static_cast<double>(bias[e]);
  }
  const auto group_size = static_cast<size_t>(config.expert_count / config.groups);
  std::vector<double> group_scores;
  for (size_t g = 0; g < static_cast<size_t>(config.groups); ++g) {
    std::vector<double> group(scores.begin() + static_cast<ptrdiff_t>(g * group_size),
                              scores.begin() + static_cast<ptrdiff_t>((g + 1) * group_size));
    std::sort(group.rbegin(), group.rend());
    const auto best =
        std::min<size_t>(group_size, static_cast<size_t>(config.top_k / config.kept_groups));
    group_scores.push_back(
        std::accumulate(group.begin(), group.begin() + static_cast<ptrdiff_t>(best), 0.0));
  }
  std::vector<int64_t> groups = Ranked(group_scores);
  groups.resize(static_cast<size_t>(config.kept_groups));
  std::vector<int64_t> ids;
  for (int64_t e : Ranked(scores)) {
    const int64_t group = e / static_cast<int64_t>(group_size);
    if (std::find(groups.begin(), groups.end(), group) == groups.end()) continue;
    if (static_cast<int64_t>(ids.size()) < config.top_k) ids.push_back(e);
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

std::vector<double> Weights(const RouterConfig& config, const std::vector<double>& x,
                            const std::vector<int64_t>& ids) {
  const std::vector<double> p = Probabilities(config, x);
  std::vector<double> weights;
  double sum = 0;
  for (int64_t id : ids) {
    weights.push_back(p[static_cast<size_t>(id)]);
    sum += weights.back();
  }
  const bool normalise =
      config.kind == RouterKind::kSigmoid ? ids.size() > 1 : !config.softmax_before_topk;
  for (double& w : weights) w *= config.scaling_factor / (normalise ? sum : 1);
  return weights;
}

std::vector<double> Affinity(const RouterConfig& config, const std::vector<double>& x) {
  std::vector<double> a = Probabilities(config, x);
  const double sum = std::accumulate(a.begin(), a.end(), 0.0);
  for (double& value : a) value /= sum;
  return a;
}

class Router : public testing::TestWithParam<Variant> {
 protected:
  static constexpr int64_t kTokens = 40;

  Router() : config_(GetParam().config) {
    std::mt19937 random(11);
    for (int64_t i = 0; i < kTokens * config_.expert_count; ++i) {
      logits_.push_back(static_cast<float>(SmallValue(random) * 2 + (random() % 1000) * 1e-3));
    }
    for (int64_t e = 0; e < config_.expert_count; ++e) {
      bias_.push_back(static_cast<float>(SmallValue(random) / 8));
    }
  }

  const float* bias() const { return config_.selection_bias ? bias_.data() : nullptr; }
  std::vector<double> Row(int64_t t) const {
    const auto begin = logits_.begin() + t * config_.expert_count;
    return {begin, begin + config_.expert_count};
  }

  const RouterConfig config_;
  std::unique_ptr<RouterKernels> router_ = CreateCpuRouter();
  std::vector<float> logits_;
  std::vector<float> bias_;
};

TEST_P(Router, SelectsTheExpertsAndWeightsOfTheFormulas) {
  std::vector<int64_t> ids(static_cast<size_t>(kTokens * config_.top_k), -7);
  std::vector<float> weights(ids.size());
  ASSERT_TRUE(
      router_->Select(config_, logits_.data(), bias(), kTokens, ids.data(), weights.data()).ok());
  for (int64_t t = 0; t < kTokens; ++t) {
    const std::vector<int64_t> want_ids = SelectIds(config_, Row(t), bias());
    const std::vector<double> want = Weights(config_, Row(t), want_ids);
    for (size_t k = 0; k < want_ids.size(); ++k) {
      const auto at = static_cast<size_t>(t * config_.top_k) + k;
      ASSERT_EQ(ids[at], want_ids[k]) << "token " << t;
      ASSERT_NEAR(weights[at], want[k], 1e-7 * config_.scaling_factor);
    }
  }
}

TEST_P(Router, SelectBackwardIsTheFiniteDifference) {
  std::mt19937 random(3);
  std::vector<int64_t> ids(static_cast<size_t>(kTokens * config_.top_k));
  std::vector<float> weights(ids.size());
  std::vector<float> grad_weights(ids.size());
  for (float& g : grad_weights) g = static_cast<float>(SmallValue(random));
  std::vector<float> grad(logits_.size(), std::numeric_limits<float>::quiet_NaN());
  ASSERT_TRUE(
      router_->Select(config_, logits_.data(), bias(), kTokens, ids.data(), weights.data()).ok());
  ASSERT_TRUE(router_
                  ->SelectBackward(config_, logits_.data(), ids.data(), grad_weights.data(),
                                   kTokens, grad.data())
                  .ok());
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto first = ids.begin() + t * config_.top_k;
    const std::vector<int64_t> chosen(first, first + config_.top_k);
    const auto loss = [&](const std::vector<double>& x) {
      const std::vector<double> w = Weights(config_, x, chosen);
      double sum = 0;
      for (size_t k = 0; k < w.size(); ++k) {
        sum += w[k] * static_cast<double>(grad_weights[static_cast<size_t>(t * config_.top_k) + k]);
      }
      return sum;
    };
    for (int64_t e = 0; e < config_.expert_count; ++e) {
      std::vector<double> up = Row(t);
      std::vector<double> down = Row(t);
      up[static_cast<size_t>(e)] += 1e-5;
      down[static_cast<size_t>(e)] -= 1e-5;
      ASSERT_NEAR(grad[static_cast<size_t>(t * config_.expert_count + e)],
                  (loss(up) - loss(down)) / 2e-5, 1e-6)
          << "token " << t << " expert " << e;
    }
  }
}

TEST_P(Router, AuxSumsAndTheirGradient) {
  std::mt19937 random(4);
  const auto experts = static_cast<size_t>(config_.expert_count);
  std::vector<int64_t> ids(static_cast<size_t>(kTokens * config_.top_k));
  std::vector<float> weights(ids.size());
  ASSERT_TRUE(
      router_->Select(config_, logits_.data(), bias(), kTokens, ids.data(), weights.data()).ok());
  std::vector<float> routed(experts, 99.0f);
  std::vector<float> affinity(experts, 99.0f);
  ASSERT_TRUE(
      router_->AuxSums(config_, logits_.data(), ids.data(), kTokens, routed.data(), affinity.data())
          .ok());
  std::vector<double> want(experts, 0.0);
  for (int64_t t = 0; t < kTokens; ++t) {
    const std::vector<double> a = Affinity(config_, Row(t));
    for (size_t e = 0; e < experts; ++e) want[e] += a[e];
  }
  for (size_t e = 0; e < experts; ++e) {
    EXPECT_EQ(routed[e], std::count(ids.begin(), ids.end(), static_cast<int64_t>(e)));
    EXPECT_NEAR(affinity[e], want[e], 1e-5);
  }

  std::vector<float> scale(experts);
  for (float& s : scale) s = static_cast<float>(SmallValue(random));
  std::vector<float> grad(logits_.size(), 10.0f);
  ASSERT_TRUE(
      router_->AuxBackward(config_, logits_.data(), scale.data(), kTokens, grad.data()).ok());
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto loss = [&](const std::vector<double>& x) {
      const std::vector<double> a = Affinity(config_, x);
      double sum = 0;
      for (size_t e = 0; e < experts; ++e) sum += static_cast<double>(scale[e]) * a[e];
      return sum;
    };
    for (size_t e = 0; e < experts; ++e) {
      std::vector<double> up = Row(t);
      std::vector<double> down = Row(t);
      up[e] += 1e-5;
      down[e] -= 1e-5;
      ASSERT_NEAR(grad[static_cast<size_t>(t) * experts + e], 10 + (loss(up) - loss(down)) / 2e-5,
                  2e-6);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, Router, testing::ValuesIn(kVariants),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(RouterSelection, TiesGoToTheLowerId) {
  const RouterConfig config = {RouterKind::kSoftmax, false, 1, 1, 1.0, false, 6, 3};
  const std::vector<float> logits = {1, 2, 1, 2, 2, 1};
  int64_t ids[3];
  float weights[3];
  ASSERT_TRUE(CreateCpuRouter()->Select(config, logits.data(), nullptr, 1, ids, weights).ok());
  EXPECT_EQ(std::vector<int64_t>(ids, ids + 3), (std::vector<int64_t>{1, 3, 4}));
}

TEST(RouterSelection, ExtremeAndNanLogitsStillGiveValidIds) {
  const RouterConfig config = {RouterKind::kSigmoid, false, 2, 1, 1.0, false, 6, 2};
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::vector<float>& logits :
       {std::vector<float>(6, nan), std::vector<float>{nan, kInf, -kInf, 1e38f, -1e38f, 0}}) {
    int64_t ids[2] = {-5, -5};
    float weights[2];
    ASSERT_TRUE(CreateCpuRouter()->Select(config, logits.data(), nullptr, 1, ids, weights).ok());
    EXPECT_GE(ids[0], 0);
    EXPECT_LT(ids[0], ids[1]);
    EXPECT_LT(ids[1], 6);
  }
}

// x, weight and gradients are small multiples of 1/16: sums of 37 products are exact in f32.
TEST(RouterLogits, ProductsAndGradientsAreExact) {
  constexpr int64_t kTokens = 5;
  constexpr int64_t kHidden = 37;
  constexpr int64_t kExperts = 9;
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    std::mt19937 random(6);
    TypedArray x(dtype, kTokens * kHidden);
    for (int64_t i = 0; i < x.size(); ++i) x.Set(i, SmallValue(random));
    std::vector<float> weight(kHidden * kExperts);
    std::vector<float> grad_logits(kTokens * kExperts);
    for (float& w : weight) w = static_cast<float>(SmallValue(random));
    for (float& g : grad_logits) g = static_cast<float>(SmallValue(random));
    std::vector<float> logits(kTokens * kExperts);
    std::vector<float> grad_x(kTokens * kHidden, 1.0f);
    std::vector<float> grad_weight(kHidden * kExperts, 2.0f);
    auto router = CreateCpuRouter();
    const ConstMatrix view = {x.data(), dtype, kTokens, kHidden};
    ASSERT_TRUE(router->Logits(view, weight.data(), kExperts, logits.data()).ok());
    ASSERT_TRUE(router
                    ->LogitsBackward(view, weight.data(), kExperts, grad_logits.data(),
                                     grad_x.data(), grad_weight.data())
                    .ok());
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t e = 0; e < kExperts; ++e) {
        double want = 0;
        for (int64_t h = 0; h < kHidden; ++h) {
          want += x.Get(t * kHidden + h) *
                  static_cast<double>(weight[static_cast<size_t>(h * kExperts + e)]);
        }
        ASSERT_EQ(logits[static_cast<size_t>(t * kExperts + e)], want);
      }
      for (int64_t h = 0; h < kHidden; ++h) {
        double want = 1;
        for (int64_t e = 0; e < kExperts; ++e) {
          want += static_cast<double>(grad_logits[static_cast<size_t>(t * kExperts + e)]) *
                  static_cast<double>(weight[static_cast<size_t>(h * kExperts + e)]);
        }
        ASSERT_EQ(grad_x[static_cast<size_t>(t * kHidden + h)], want);
      }
    }
    for (int64_t h = 0; h < kHidden; ++h) {
      for (int64_t e = 0; e < kExperts; ++e) {
        double want = 2;
        for (int64_t t = 0; t < kTokens; ++t) {
          want += x.Get(t * kHidden + h) *
                  static_cast<double>(grad_logits[static_cast<size_t>(t * kExperts + e)]);
        }
        ASSERT_EQ(grad_weight[static_cast<size_t>(h * kExperts + e)], want);
      }
    }
  }
}

TEST(RouterLogits, NoTokensAndOtherDtypes) {
  auto router = CreateCpuRouter();
  const float weight[] = {1};
  EXPECT_TRUE(router->Logits({nullptr, DType::kBF16, 0, 1}, weight, 1, nullptr).ok());
  const absl::Status status = router->Logits({weight, DType::kI32, 1, 1}, weight, 1, nullptr);
  EXPECT_TRUE(HasReason(status, Reason::kDtypeUnsupported)) << status;
}

TEST(RouterAddTo, AddsInF32AndRoundsOnce) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    TypedArray grad(dtype, 6);
    for (int64_t i = 0; i < 6; ++i) grad.Set(i, static_cast<double>(i) / 2);
    const std::vector<float> extra = {0.25f, 0.5f, -1.0f, 3.0f, 0.0f, 1.5f};
    ASSERT_TRUE(CreateCpuRouter()->AddTo(extra.data(), {grad.data(), dtype, 2, 3}).ok());
    for (int64_t i = 0; i < 6; ++i) {
      EXPECT_EQ(grad.Get(i),
                static_cast<double>(i) / 2 + static_cast<double>(extra[static_cast<size_t>(i)]));
    }
  }
}

}  // namespace
}  // namespace expertd
