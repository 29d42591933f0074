// Wrong fields of the collectives that make, change and delete layers.
#include "tests/abuse/abuse_test.h"

namespace expertd::abuse {
namespace {

class AbuseLayersTest : public AbuseTest {
 protected:
  // A layer of its own for requests that change it.
  void Remake(const std::string& layer_id) {
    service_->driver().Distrust();
    v1::DeleteLayerRequest remove;
    remove.set_layer_id(layer_id);
    (void)service_->driver().RunSame(remove);
    service_->driver().Distrust();
    v1::CreateLayerRequest create;
    create.set_layer_id(layer_id);
    *create.mutable_config() = LayerOf();
    Must(create);
    v1::InitializeWeightsRequest initialize;
    initialize.set_layer_id(layer_id);
    Must(initialize);
  }
};

TEST_F(AbuseLayersTest, CreateLayer) {
  SpoilCollective<v1::CreateLayerRequest>([this] {
    service_->driver().Distrust();
    v1::DeleteLayerRequest remove;
    remove.set_layer_id("other");
    (void)service_->driver().RunSame(remove);
    v1::CreateLayerRequest request;
    request.set_layer_id("other");
    *request.mutable_config() = LayerOf();
    service_->driver().Distrust();
    return request;
  });
}

TEST_F(AbuseLayersTest, DeleteLayer) {
  SpoilCollective<v1::DeleteLayerRequest>([this] {
    Remake("other");
    return OfLayer<v1::DeleteLayerRequest>("other");
  });
}

TEST_F(AbuseLayersTest, InitializeWeights) {
  SpoilCollective<v1::InitializeWeightsRequest>([this] {
    Remake("other");
    return OfLayer<v1::InitializeWeightsRequest>("other");
  });
}

TEST_F(AbuseLayersTest, FreezeLayer) {
  SpoilCollective<v1::FreezeLayerRequest>([this] {
    Remake("other");
    return OfLayer<v1::FreezeLayerRequest>("other");
  });
}

TEST_F(AbuseLayersTest, ConfigureOptimizer) {
  SpoilCollective<v1::ConfigureOptimizerRequest>([this] {
    Remake("other");
    auto request = OfLayer<v1::ConfigureOptimizerRequest>("other");
    *request.mutable_optimizer() = LayerOf().optimizer();
    return request;
  });
}

TEST_F(AbuseLayersTest, ApplyGradients) {
  SpoilCollective<v1::ApplyGradientsRequest>([this] {
    Remake("other");
    auto request = OfLayer<v1::ApplyGradientsRequest>("other");
    request.set_learning_rate(0.5);
    request.set_expected_version(1);
    request.set_gradient_scale(1);
    return request;
  });
}

TEST_F(AbuseLayersTest, ClearGradients) {
  SpoilCollective<v1::ClearGradientsRequest>(
      [] { return OfLayer<v1::ClearGradientsRequest>(kLayer); });
}

}  // namespace
}  // namespace expertd::abuse
