// Layers that route by themselves: selection, weights, auxiliary loss and gradients.
#include <vector>

#include "tests/conformance/service/layer_check.h"

namespace expertd::conformance {
namespace {

using reference::TestRandom;

struct NamedRouter {
  const char* name;
  int64_t top_k = 4;
  v1::RouterConfig router;
};

v1::RouterConfig Softmax(bool before_topk, int64_t groups, int64_t kept, double scaling) {
  v1::RouterConfig router;
  router.set_kind(v1::ROUTER_KIND_SOFTMAX);
  router.set_softmax_before_topk(before_topk);
  router.set_groups(groups);
  router.set_kept_groups(kept);
  router.set_scaling_factor(scaling);
  return router;
}

v1::RouterConfig Sigmoid(int64_t groups, int64_t kept, double scaling) {
  v1::RouterConfig router = Softmax(false, groups, kept, scaling);
  router.set_kind(v1::ROUTER_KIND_SIGMOID);
  return router;
}

std::vector<NamedRouter> Routers() {
  return {{"softmax after selection", 4, Softmax(false, 0, 0, 0)},
          {"softmax after selection, one expert", 1, Softmax(false, 0, 0, 0)},
          {"softmax after selection, two of six groups", 4, Softmax(false, 6, 2, 0)},
          {"softmax before selection", 4, Softmax(true, 0, 0, 0)},
          {"softmax before selection, groups, scaled", 4, Softmax(true, 4, 2, 2.5)},
          {"sigmoid", 4, Sigmoid(0, 0, 0)},
          {"sigmoid, one expert", 1, Sigmoid(0, 0, 0)},
          {"sigmoid, four of eight groups, scaled", 4, Sigmoid(8, 4, 1.75)}};
}

v1::LayerConfig LayerOf(const NamedRouter& router) {
  v1::LayerConfig config = SmallLayer(24, router.top_k, 10, 6);
  *config.mutable_router() = router.router;
  return config;
}

TEST_P(ServiceTest, EachRouterByLogitsMatchesTheReference) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const NamedRouter& router : Routers()) {
    SCOPED_TRACE(router.name);
    LayerCheck(*this, {.config = LayerOf(router), .routing = RoutingKind::kLogits}, random).Run();
  }
}

TEST_P(ServiceTest, EachRouterOnTheServerMatchesTheReference) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const NamedRouter& router : Routers()) {
    SCOPED_TRACE(router.name);
    v1::LayerConfig config = LayerOf(router);
    config.mutable_router()->set_on_server(true);
    config.mutable_router()->set_selection_bias(router.router.kind() == v1::ROUTER_KIND_SIGMOID);
    LayerCheck(*this, {.config = config, .routing = RoutingKind::kLayerRouter}, random).Run();
  }
}

TEST_P(ServiceTest, RouterOnTheServerAfterAnUpdateMatchesTheReference) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  v1::LayerConfig config = LayerOf(Routers().front());
  config.mutable_router()->set_on_server(true);
  config.set_aux_loss_coefficient(0.5);
  // The update sums the router's gradient over all ranks: its copies must stay equal.
  LayerCheck(*this, {.config = config, .routing = RoutingKind::kLayerRouter, .train_first = true},
             random)
      .Run();
}

TEST_P(ServiceTest, AuxiliaryLossAndItsGradientMatchTheReference) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const NamedRouter& router : Routers()) {
    for (const bool on_server : {false, true}) {
      SCOPED_TRACE(::testing::Message() << router.name << (on_server ? ", on the server" : ""));
      v1::LayerConfig config = LayerOf(router);
      config.set_aux_loss_coefficient(0.25);
      config.mutable_router()->set_on_server(on_server);
      LayerCheck(*this,
                 {.config = config,
                  .routing = on_server ? RoutingKind::kLayerRouter : RoutingKind::kLogits,
                  .aux_loss_gradient = 3},
                 random)
          .Run();
    }
  }
}

TEST_P(ServiceTest, RoutersInNarrowPrecisionMatchTheReference) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  for (const v1::DType dtype : {v1::DTYPE_BF16, v1::DTYPE_F16}) {
    for (const v1::Weighting weighting : {v1::WEIGHTING_LATE, v1::WEIGHTING_EARLY}) {
      SCOPED_TRACE(::testing::Message()
                   << v1::DType_Name(dtype) << ", " << v1::Weighting_Name(weighting));
      v1::LayerConfig config = LayerOf(Routers().back());
      config.mutable_router()->set_on_server(true);
      config.set_token_dtype(dtype);
      config.set_weight_dtype(dtype);
      config.set_weighting(weighting);
      config.set_aux_loss_coefficient(0.25);
      LayerCheck(*this,
                 {.config = config, .routing = RoutingKind::kLayerRouter, .aux_loss_gradient = 1},
                 random)
          .Run();
    }
  }
}

TEST_P(ServiceTest, AuxiliaryLossOfNoTokensIsZero) {
  TestRandom random;
  SCOPED_TRACE(random.Trace());
  v1::LayerConfig config = LayerOf(Routers().front());
  config.set_aux_loss_coefficient(0.25);
  LayerCheck(*this,
             {.config = config,
              .routing = RoutingKind::kLogits,
              .tokens = std::vector<int64_t>(static_cast<size_t>(world()), 0),
              .aux_loss_gradient = 1},
             random)
      .Run();
}

}  // namespace
}  // namespace expertd::conformance
