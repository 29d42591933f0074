// One case of a layer, the reference's view of its config, and comparison within bounds.
#ifndef TESTS_CONFORMANCE_SERVICE_LAYER_CASE_H_
#define TESTS_CONFORMANCE_SERVICE_LAYER_CASE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "expertd/v1/types.pb.h"
#include "tests/conformance/service/bounded.h"
#include "tests/reference/ep.h"
#include "tests/reference/layer.h"

namespace expertd::conformance {

enum class RoutingKind { kTopk, kLogits, kLayerRouter };

struct LayerCase {
  v1::LayerConfig config;
  RoutingKind routing = RoutingKind::kTopk;
  std::vector<int64_t> tokens;  // Per rank; empty: 4, 5, 6, 4, ...
  reference::Routing ids;       // With kTopk; empty: random, some -1.
  double aux_loss_gradient = 0;
  bool train_first = false;  // One update before, so that biases are not zero.
  int64_t capacity = 0;      // The group's, when its policy is DROP.
};

inline std::vector<double> Widen(const std::vector<float>& values) {
  return std::vector<double>(values.begin(), values.end());
}

inline reference::LayerConfig ReferenceOf(const LayerCase& c, int64_t world) {
  reference::LayerConfig config;
  config.ep = {.num_experts = c.config.expert_count(),
               .num_ranks = world,
               .top_k = c.config.top_k(),
               .alignment = std::max<int64_t>(1, c.config.alignment()),
               .capacity = c.capacity,
               .policy = c.capacity > 0 ? reference::CapacityPolicy::kDrop
                                        : reference::CapacityPolicy::kRefuse};
  config.hidden = c.config.hidden();
  config.intermediate = c.config.intermediate();
  config.activation = c.config.activation() == v1::ACTIVATION_GELU ? reference::Activation::kGelu
                      : c.config.activation() == v1::ACTIVATION_RELU2
                          ? reference::Activation::kRelu2
                          : reference::Activation::kSilu;
  config.weighting = c.config.weighting() == v1::WEIGHTING_EARLY ? reference::Weighting::kEarly
                                                                 : reference::Weighting::kLate;
  return config;
}

// Fails, once, when a value is further from the reference than its bound, or when the bounds'
// own arithmetic does not agree with the reference.
inline void ExpectBounded(const std::string& what, const std::vector<double>& got,
                          const std::vector<double>& want, const BoundedRow& bounds) {
  ASSERT_EQ(got.size(), want.size()) << what;
  ASSERT_EQ(bounds.size(), want.size()) << what;
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(bounds[i].value, want[i], 1e-9 * (1 + std::abs(want[i])))
        << what << "[" << i << "]: the bounds disagree with the reference";
    ASSERT_LE(std::abs(got[i] - want[i]), bounds[i].error)
        << what << "[" << i << "]: got " << got[i] << ", need " << want[i];
  }
}

}  // namespace expertd::conformance

#endif  // TESTS_CONFORMANCE_SERVICE_LAYER_CASE_H_
