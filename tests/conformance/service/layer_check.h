// One layer's forward and backward through the service, compared with the float64 reference.
//
//   LayerCheck check(*this, {.config = config, .routing = RoutingKind::kLogits}, random);
//   check.Run();
// Every output, gradient and count is compared, within bounds that layer_bounds.h derives.
#ifndef TESTS_CONFORMANCE_SERVICE_LAYER_CHECK_H_
#define TESTS_CONFORMANCE_SERVICE_LAYER_CHECK_H_

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "tests/conformance/service/layer_bounds.h"
#include "tests/conformance/service/layer_case.h"
#include "tests/conformance/service/router_bounds.h"
#include "tests/conformance/service/service_test.h"
#include "tests/reference/layer.h"
#include "tests/reference/matrix.h"
#include "tests/reference/router.h"
#include "tests/reference/test_random.h"

namespace expertd::conformance {

class LayerCheck {
 public:
  LayerCheck(ServiceTest& test, LayerCase c, reference::TestRandom& random)
      : test_(test), c_(std::move(c)), random_(random), world_(test.world()) {
    for (int64_t rank = 0; rank < world_ && c_.tokens.size() < static_cast<size_t>(world_);
         ++rank) {
      c_.tokens.push_back(4 + rank % 3);
    }
    c_.config.set_hidden(test_.FitHidden(c_.config.hidden(), c_.config.token_dtype()));
    if (c_.train_first) c_.config.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    config_ = ReferenceOf(c_, world_);
  }

  const std::string& layer_id() const { return layer_id_; }

  void Run() {
    layer_id_ = test_.MakeLayer(c_.config, /*seed=*/7);
    if (c_.train_first) Train();
    if (::testing::Test::HasFailure()) return;
    ReadParameters();
    MakeInputs();
    const auto forwards = test_.Run(ForwardRequests(/*keep=*/true));
    if (forwards.empty()) return;
    std::vector<v1::BackwardRequest> requests(forwards.size());
    for (size_t rank = 0; rank < forwards.size(); ++rank) {
      requests[rank].set_ticket(forwards[rank].ticket());
      *requests[rank].mutable_output_gradient() =
          TokenTensor(c_.config.token_dtype(), problem_.gy[rank], c_.config.hidden());
      requests[rank].set_aux_loss_gradient(c_.aux_loss_gradient);
    }
    const auto backwards = test_.Run(std::move(requests));
    if (backwards.empty()) return;
    Expect();
    CheckForward(forwards);
    CheckBackward(backwards);
    CheckParameterGradients();
  }

 private:
  std::vector<double> ReadParameter(const std::string& name, v1::ParameterKind kind) {
    return Widen(test_.Parameter(layer_id_, name, kind));
  }

  void ReadParameters() {
    problem_ = {.config = config_, .token = RoundingOf(c_.config.token_dtype())};
    problem_.parameters.gate_up = ReadParameter("gate_up", v1::PARAMETER_KIND_COMPUTE);
    problem_.parameters.down = ReadParameter("down", v1::PARAMETER_KIND_COMPUTE);
    if (c_.config.gate_up_bias()) {
      problem_.parameters.gate_up_bias = ReadParameter("gate_up_bias", v1::PARAMETER_KIND_MASTER);
    }
    if (c_.config.down_bias()) {
      problem_.parameters.down_bias = ReadParameter("down_bias", v1::PARAMETER_KIND_MASTER);
    }
    if (c_.train_first) {
      for (const auto* bias : {&problem_.parameters.gate_up_bias, &problem_.parameters.down_bias}) {
        EXPECT_TRUE(bias->empty() || std::ranges::any_of(*bias, [](double b) { return b != 0; }));
      }
    }
    if (c_.routing != RoutingKind::kLayerRouter) return;
    router_weights_ = ReadParameter("router", v1::PARAMETER_KIND_MASTER);
    if (c_.config.router().selection_bias()) {
      router_bias_ = ReadParameter("router_bias", v1::PARAMETER_KIND_MASTER);
    }
  }

  void MakeInputs() {
    const int64_t hidden = c_.config.hidden();
    const v1::DType dtype = c_.config.token_dtype();
    problem_.x.clear();
    problem_.gy.clear();
    problem_.weights.clear();
    routed_.clear();
    for (const int64_t tokens : c_.tokens) {
      problem_.x.push_back(RoundTo(dtype, random_.Values(tokens * hidden)));
      problem_.gy.push_back(RoundTo(dtype, random_.Values(tokens * hidden)));
    }
    if (c_.routing != RoutingKind::kTopk) return MakeRouted();
    problem_.ids = c_.ids.empty()
                       ? random_.Ids(c_.tokens, c_.config.top_k(), c_.config.expert_count())
                       : c_.ids;
    for (const auto& ids : problem_.ids) {
      BoundedRow& weights = problem_.weights.emplace_back();
      for (size_t i = 0; i < ids.size(); ++i) {
        weights.push_back(Exact(static_cast<float>(random_.Uniform(0.05, 1))));
      }
    }
  }

  // Logits, or tokens, whose choice does not hang on the last bit.
  void MakeRouted() {
    const auto experts = static_cast<size_t>(c_.config.expert_count());
    const auto hidden = static_cast<size_t>(c_.config.hidden());
    const reference::RouterConfig router = RouterOf(c_.config);
    problem_.ids.clear();
    for (std::vector<double>& x : problem_.x) {
      RoutedTokens& routed = routed_.emplace_back();
      for (size_t t = 0; t < x.size() / hidden; ++t) {
        std::vector<double> logits;
        do {
          if (c_.routing == RoutingKind::kLogits) {
            logits = RoundTo(v1::DTYPE_F32, random_.Values(static_cast<int64_t>(experts)));
            for (double& logit : logits) logit *= 2;
            continue;
          }
          const std::vector<double> token =
              RoundTo(c_.config.token_dtype(), random_.Values(static_cast<int64_t>(hidden)));
          std::ranges::copy(token, x.begin() + static_cast<std::ptrdiff_t>(t * hidden));
          logits = reference::RouterLogits(token, router_weights_, c_.config.hidden(),
                                           c_.config.expert_count());
        } while (!IsClearChoice(router, logits, router_bias_, random_));
        routed.logits.insert(routed.logits.end(), logits.begin(), logits.end());
      }
      routed.logits_error = std::vector<double>(x.size() / hidden, 0.0);
      if (c_.routing == RoutingKind::kLayerRouter) {
        routed.logits_error =
            LogitErrors(x, router_weights_, c_.config.hidden(), c_.config.expert_count());
      }
      routed.choice = reference::ChooseExperts(router, routed.logits, router_bias_);
      routed.weights = BoundWeights(routed, c_.config.top_k());
      problem_.ids.push_back(routed.choice.ids);
      problem_.weights.push_back(routed.weights);
    }
  }

  std::vector<v1::ForwardRequest> ForwardRequests(bool keep) const {
    std::vector<v1::ForwardRequest> requests;
    for (size_t rank = 0; rank < problem_.x.size(); ++rank) {
      v1::ForwardRequest& request = requests.emplace_back();
      request.set_layer_id(layer_id_);
      request.set_keep_for_backward(keep);
      *request.mutable_tokens() =
          TokenTensor(c_.config.token_dtype(), problem_.x[rank], c_.config.hidden());
      if (c_.routing == RoutingKind::kTopk) {
        std::vector<double> weights;
        for (size_t i = 0; i < problem_.weights[rank].size(); ++i) {
          // The weight of a route that does not exist may be anything.
          weights.push_back(problem_.ids[rank][i] < 0 ? reference::kNan
                                                      : problem_.weights[rank][i].value);
        }
        *request.mutable_topk()->mutable_topk_ids() =
            IdTensor(problem_.ids[rank], c_.config.top_k());
        *request.mutable_topk()->mutable_topk_weights() = WeightTensor(weights, c_.config.top_k());
      } else if (c_.routing == RoutingKind::kLogits) {
        *request.mutable_router_logits() =
            WeightTensor(routed_[rank].logits, c_.config.expert_count());
      } else {
        request.set_layer_router(true);
      }
    }
    return requests;
  }

  // One backward and one update with a large step.
  void Train() {
    ReadParametersForTraining();
    MakeInputs();
    const auto forwards = test_.Run(ForwardRequests(/*keep=*/true));
    std::vector<v1::BackwardRequest> requests(forwards.size());
    for (size_t rank = 0; rank < forwards.size(); ++rank) {
      requests[rank].set_ticket(forwards[rank].ticket());
      *requests[rank].mutable_output_gradient() =
          TokenTensor(c_.config.token_dtype(), problem_.gy[rank], c_.config.hidden());
    }
    if (requests.empty() || test_.Run(std::move(requests)).empty()) return;
    v1::ApplyGradientsRequest apply;
    apply.set_layer_id(layer_id_);
    apply.set_learning_rate(0.1);
    apply.set_expected_version(1);
    test_.RunSame(apply);
  }
  void ReadParametersForTraining() {
    if (c_.routing != RoutingKind::kLayerRouter) return;
    router_weights_ = ReadParameter("router", v1::PARAMETER_KIND_MASTER);
  }

  // The reference's results and their bounds.
  void Expect() {
    reference::PerRank weights;
    for (const BoundedRow& row : problem_.weights) {
      std::vector<double>& values = weights.emplace_back();
      for (const Bounded& weight : row) values.push_back(weight.value);
    }
    forward_ =
        reference::LayerForward(config_, problem_.parameters, problem_.x, problem_.ids, weights);
    gradients_ = reference::LayerBackward(config_, problem_.parameters, forward_, problem_.gy);
    bounds_ = LayerBounder(problem_, forward_.layout).Run();
    if (c_.routing != RoutingKind::kTopk) ExpectRouter();
  }

  void ExpectRouter() {
    const reference::RouterConfig router = RouterOf(c_.config);
    const int64_t experts = c_.config.expert_count();
    std::vector<double> all_logits;
    std::vector<int64_t> all_ids;
    for (const RoutedTokens& routed : routed_) {
      all_logits.insert(all_logits.end(), routed.logits.begin(), routed.logits.end());
      all_ids.insert(all_ids.end(), routed.choice.ids.begin(), routed.choice.ids.end());
    }
    const std::vector<int64_t> counts = reference::CountRoutes(all_ids, experts);
    const double coefficient = c_.config.aux_loss_coefficient();
    aux_loss_ = reference::AuxLoss(router, coefficient, all_logits, counts);
    const std::vector<double> aux =
        reference::AuxLossBackward(router, coefficient, all_logits, counts, c_.aux_loss_gradient);
    const double tokens = static_cast<double>(all_logits.size()) / static_cast<double>(experts);
    const double scale =
        tokens == 0 ? 0
                    : std::abs(c_.aux_loss_gradient) * coefficient * static_cast<double>(experts) /
                          (static_cast<double>(c_.config.top_k()) * tokens * tokens) *
                          static_cast<double>(*std::ranges::max_element(counts));
    router_gradient_.assign(router_weights_.size(), Sum());
    gradients_router_.assign(router_weights_.size(), 0.0);
    size_t begin = 0;
    for (size_t rank = 0; rank < routed_.size(); ++rank) {
      const size_t size = routed_[rank].logits.size();
      const std::vector<double> part(aux.begin() + static_cast<std::ptrdiff_t>(begin),
                                     aux.begin() + static_cast<std::ptrdiff_t>(begin + size));
      begin += size;
      logits_gradient_.push_back(
          BoundLogitsGradient(router, routed_[rank], bounds_.weights_gradient[rank], part, scale));
      if (c_.routing == RoutingKind::kLayerRouter) AddRouterGradients(rank);
    }
  }

  // What the router adds to the tokens' gradient, and the gradient of its own weights.
  void AddRouterGradients(size_t rank) {
    const auto experts = static_cast<size_t>(c_.config.expert_count());
    const auto hidden = static_cast<size_t>(c_.config.hidden());
    const BoundedRow& dl = logits_gradient_[rank];
    std::vector<double> values;
    for (const Bounded& value : dl) values.push_back(value.value);
    const reference::RouterGradients gradients = reference::RouterLogitsBackward(
        problem_.x[rank], router_weights_, c_.config.hidden(), c_.config.expert_count(), values);
    reference::AddScaled(1, gradients.x, gradients_.tokens[rank]);
    reference::AddScaled(1, gradients.weights, gradients_router_);
    for (size_t i = 0; i < problem_.x[rank].size(); ++i) {
      const size_t token = i / hidden;
      const size_t column = i % hidden;
      Sum extra;
      for (size_t e = 0; e < experts; ++e) {
        extra.AddProduct(dl[token * experts + e], Exact(router_weights_[column * experts + e]));
        router_gradient_[column * experts + e].AddProduct(dl[token * experts + e],
                                                          Exact(problem_.x[rank][i]));
      }
      Sum both;
      both.Add(bounds_.tokens_gradient[rank][i]);
      both.Add(extra.Total());
      bounds_.tokens_gradient[rank][i] = Rounded(both.Total(), problem_.token);
    }
  }

  void CheckForward(const std::vector<v1::ForwardResponse>& forwards) {
    const double logits_error = LargestLogitError();
    int64_t tokens = 0;
    for (const int64_t count : c_.tokens) tokens += count;
    for (size_t rank = 0; rank < forwards.size(); ++rank) {
      const v1::ForwardResponse& response = forwards[rank];
      const std::string who = "rank " + std::to_string(rank) + " ";
      EXPECT_EQ(response.output().dtype(), c_.config.token_dtype());
      ExpectBounded(who + "output", Values(response.output()), forward_.output[rank],
                    bounds_.output[rank]);
      const reference::RankLayout& layout = forward_.layout.ranks[rank];
      EXPECT_TRUE(
          std::ranges::equal(response.stats().tokens_per_expert(), layout.tokens_per_expert));
      EXPECT_TRUE(
          std::ranges::equal(response.stats().padded_per_expert(), layout.padded_per_expert));
      int64_t dropped = 0;
      for (const int64_t count : layout.dropped_per_expert) dropped += count;
      EXPECT_EQ(response.stats().routes_dropped(), dropped);
      if (c_.routing == RoutingKind::kTopk) continue;
      EXPECT_EQ(Ints(response.routing().topk_ids()), problem_.ids[rank]) << who;
      ExpectBounded(who + "routing.topk_weights", Values(response.routing().topk_weights()),
                    routed_[rank].choice.weights, problem_.weights[rank]);
      // Sums of positive affinities over tokens and ranks in f32, and what the logits move them by.
      EXPECT_NEAR(
          response.aux_loss(), aux_loss_,
          aux_loss_ * (static_cast<double>(tokens + world_ + 8) * kUnitF32 + 4 * logits_error));
      EXPECT_EQ(response.aux_loss(), forwards.front().aux_loss());
    }
  }

  double LargestLogitError() const {
    double largest = 0;
    for (const RoutedTokens& routed : routed_) {
      for (const double error : routed.logits_error) largest = std::max(largest, error);
    }
    return largest;
  }

  void CheckBackward(const std::vector<v1::BackwardResponse>& backwards) {
    for (size_t rank = 0; rank < backwards.size(); ++rank) {
      const v1::BackwardResponse& response = backwards[rank];
      const std::string who = "rank " + std::to_string(rank) + " ";
      EXPECT_EQ(response.tokens_gradient().dtype(), c_.config.token_dtype());
      ExpectBounded(who + "tokens_gradient", Values(response.tokens_gradient()),
                    gradients_.tokens[rank], bounds_.tokens_gradient[rank]);
      EXPECT_EQ(response.has_topk_weights_gradient(), c_.routing == RoutingKind::kTopk);
      EXPECT_EQ(response.has_router_logits_gradient(), c_.routing == RoutingKind::kLogits);
      if (c_.routing == RoutingKind::kTopk) {
        EXPECT_EQ(response.topk_weights_gradient().dtype(), v1::DTYPE_F32);
        ExpectBounded(who + "topk_weights_gradient", Values(response.topk_weights_gradient()),
                      gradients_.topk_weights[rank], bounds_.weights_gradient[rank]);
      } else if (c_.routing == RoutingKind::kLogits) {
        std::vector<double> want;
        for (const Bounded& value : logits_gradient_[rank]) want.push_back(value.value);
        ExpectBounded(who + "router_logits_gradient", Values(response.router_logits_gradient()),
                      want, logits_gradient_[rank]);
      }
    }
  }

  void CheckParameterGradients() {
    const auto check = [this](const std::string& name, const std::vector<double>& want,
                              const BoundedRow& bounds) {
      if (want.empty()) return;
      ExpectBounded("gradient of " + name, ReadParameter(name, v1::PARAMETER_KIND_GRADIENT), want,
                    bounds);
    };
    check("gate_up", gradients_.experts.gate_up, bounds_.gate_up);
    check("down", gradients_.experts.down, bounds_.down);
    check("gate_up_bias", gradients_.experts.gate_up_bias, bounds_.gate_up_bias);
    check("down_bias", gradients_.experts.down_bias, bounds_.down_bias);
    if (c_.routing != RoutingKind::kLayerRouter) return;
    // Each rank holds the part of its own tokens.
    std::vector<double> got(router_weights_.size(), 0.0);
    for (const auto& part : test_.Shards(layer_id_, "router", v1::PARAMETER_KIND_GRADIENT)) {
      for (size_t i = 0; i < got.size(); ++i) got[i] += part[i];
    }
    BoundedRow bounds;
    for (const Sum& sum : router_gradient_) bounds.push_back(sum.Total());
    ExpectBounded("gradient of router", got, gradients_router_, bounds);
  }

  ServiceTest& test_;
  LayerCase c_;
  reference::TestRandom& random_;
  const int64_t world_;
  reference::LayerConfig config_;
  std::string layer_id_;
  std::vector<double> router_weights_;  // [H, E]
  std::vector<double> router_bias_;     // [E], or empty
  LayerProblem problem_;
  std::vector<RoutedTokens> routed_;
  reference::LayerForwardResult forward_;
  reference::LayerGradients gradients_;
  LayerBounds bounds_;
  std::vector<BoundedRow> logits_gradient_;
  std::vector<double> gradients_router_;  // [H, E], of all ranks
  std::vector<Sum> router_gradient_;      // The same with bounds
  double aux_loss_ = 0;
};

}  // namespace expertd::conformance

#endif  // TESTS_CONFORMANCE_SERVICE_LAYER_CHECK_H_
