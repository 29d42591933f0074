// What a whole group computes in one layer's forward and backward, every number with its bound.
//
// Follows the roundings that the service documents: products of rows with weights in f32; h, u, z,
// the gradients of h and of the received rows rounded to the token dtype once each; the backward
// starts from the stored h; one rank's part of a token's sum rounded once before it travels and the
// sum once more. The values must agree with tests/reference, which the caller checks: this file
// then only adds the errors.
#ifndef TESTS_CONFORMANCE_SERVICE_LAYER_BOUNDS_H_
#define TESTS_CONFORMANCE_SERVICE_LAYER_BOUNDS_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/conformance/service/bounded.h"
#include "tests/reference/layer.h"

namespace expertd::conformance {

struct LayerProblem {
  reference::LayerConfig config;
  reference::ExpertParameters parameters;  // As the matrix products read them.
  reference::Routing ids;                  // Per rank [T, K].
  reference::PerRank x;                    // Per rank [T, H].
  reference::PerRank gy;                   // Per rank [T, H].
  std::vector<BoundedRow> weights;         // Per rank [T, K]: route weights.
  Rounding token;
};

struct LayerBounds {
  std::vector<BoundedRow> output;            // Per rank [T, H].
  std::vector<BoundedRow> tokens_gradient;   // Per rank [T, H].
  std::vector<BoundedRow> weights_gradient;  // Per rank [T, K]; 0 without a route.
  // Of all experts; shapes as in ExpertParameters, empty without the bias.
  BoundedRow gate_up, down, gate_up_bias, down_bias;
};

class LayerBounder {
 public:
  LayerBounder(const LayerProblem& problem, const reference::Layout& layout)
      : p_(problem), layout_(layout) {
    gate_up_.resize(p_.parameters.gate_up.size());
    down_.resize(p_.parameters.down.size());
    gate_up_bias_.resize(p_.parameters.gate_up_bias.size());
    down_bias_.resize(p_.parameters.down_bias.size());
  }

  LayerBounds Run() {
    LayerBounds bounds;
    const size_t hidden = H();
    for (size_t rank = 0; rank < p_.x.size(); ++rank) {
      const size_t tokens = p_.x[rank].size() / hidden;
      BoundedRow& output = bounds.output.emplace_back();
      BoundedRow& gradient = bounds.tokens_gradient.emplace_back();
      bounds.weights_gradient.emplace_back(tokens * K());
      for (size_t t = 0; t < tokens; ++t) {
        std::vector<Sum> y(hidden), dx(hidden);
        for (size_t k = 0; k < K(); ++k) {
          const auto& target = layout_.Target(static_cast<int64_t>(rank), static_cast<int64_t>(t),
                                              static_cast<int64_t>(k));
          if (target.state != reference::RouteState::kPlaced) continue;
          const Route route = {.expert = static_cast<size_t>(p_.ids[rank][t * K() + k]),
                               .x = &p_.x[rank][t * hidden],
                               .gy = &p_.gy[rank][t * hidden],
                               .weight = p_.weights[rank][t * K() + k]};
          const BoundedRow h = Hidden(route);
          AddOutput(route, h, y);
          bounds.weights_gradient[rank][t * K() + k] = Backward(route, h, dx);
        }
        for (size_t i = 0; i < hidden; ++i) {
          output.push_back(Gathered(y[i]));
          gradient.push_back(Gathered(dx[i]));
        }
      }
    }
    bounds.gate_up = Totals(gate_up_);
    bounds.down = Totals(down_);
    bounds.gate_up_bias = Totals(gate_up_bias_);
    bounds.down_bias = Totals(down_bias_);
    return bounds;
  }

 private:
  struct Route {
    size_t expert;
    const double* x;   // [H]
    const double* gy;  // [H]
    Bounded weight;
  };

  size_t H() const { return static_cast<size_t>(p_.config.hidden); }
  size_t I() const { return static_cast<size_t>(p_.config.intermediate); }
  size_t K() const { return static_cast<size_t>(p_.config.ep.top_k); }
  bool Early() const { return p_.config.weighting == reference::Weighting::kEarly; }
  double GateUp(size_t e, size_t row, size_t column) const {
    return p_.parameters.gate_up[(e * H() + row) * 2 * I() + column];
  }
  double Down(size_t e, size_t row, size_t column) const {
    return p_.parameters.down[(e * I() + row) * H() + column];
  }

  static BoundedRow Totals(const std::vector<Sum>& sums) {
    BoundedRow totals;
    for (const Sum& sum : sums) totals.push_back(sum.Total());
    return totals;
  }

  // A token's sum: each rank's part is rounded before it travels, then the whole.
  Bounded Gathered(const Sum& sum) const {
    Bounded total = sum.Total();
    const auto parts = static_cast<double>(p_.x.size());
    total.error += p_.token.unit * (sum.magnitude() + total.error) + parts * p_.token.tiny;
    return Rounded(total, p_.token);
  }

  // act and its slope, evaluated in f32 at most 16 u32 (1 + |x|) away from the exact functions of
  // the argument; the argument's own error counts with the slope, and with the Lipschitz constant
  // 2 of the slope, which bounds those of silu (0.5), gelu (0.8) and relu2 (2).
  Bounded Act(const Bounded& gate) const {
    const double value = reference::Activate(p_.config.activation, gate.value);
    const double slope = reference::ActivateDerivative(p_.config.activation, gate.value);
    return {value, (std::abs(slope) + gate.error) * gate.error +
                       16 * kUnitF32 * (1 + std::abs(gate.value) + std::abs(value))};
  }
  Bounded Slope(const Bounded& gate) const {
    const double slope = reference::ActivateDerivative(p_.config.activation, gate.value);
    return {slope, 2 * gate.error + 16 * kUnitF32 * (1 + std::abs(gate.value))};
  }

  // h in f32, [2I].
  BoundedRow Hidden(const Route& route) const {
    BoundedRow h;
    for (size_t j = 0; j < 2 * I(); ++j) {
      Sum sum;
      for (size_t i = 0; i < H(); ++i) {
        sum.AddProduct(Exact(route.x[i]), Exact(GateUp(route.expert, i, j)));
      }
      if (!gate_up_bias_.empty()) {
        sum.Add(Exact(p_.parameters.gate_up_bias[route.expert * 2 * I() + j]));
      }
      h.push_back(sum.Total());
    }
    return h;
  }

  // y += w z, with z rounded to the token dtype.
  void AddOutput(const Route& route, const BoundedRow& h, std::vector<Sum>& y) const {
    BoundedRow u;
    for (size_t i = 0; i < I(); ++i) {
      Bounded value = Times(Act(h[i]), h[I() + i]);
      if (Early()) value = Times(value, route.weight);
      u.push_back(Rounded(value, p_.token));
    }
    for (size_t j = 0; j < H(); ++j) {
      Sum z;
      for (size_t i = 0; i < I(); ++i) z.AddProduct(u[i], Exact(Down(route.expert, i, j)));
      if (!down_bias_.empty()) {
        const Bounded bias = Exact(p_.parameters.down_bias[route.expert * H() + j]);
        z.Add(Early() ? Times(bias, route.weight) : bias);
      }
      const Bounded rounded = Rounded(z.Total(), p_.token);
      y[j].Add(Early() ? rounded : Times(rounded, route.weight));
    }
  }

  // Adds this route's part to dx and to the parameters' gradients; returns that of its weight.
  Bounded Backward(const Route& route, const BoundedRow& h, std::vector<Sum>& dx) {
    const size_t e = route.expert;
    Sum weight_gradient;
    BoundedRow dh(2 * I());
    for (size_t i = 0; i < I(); ++i) {
      const Bounded gate = Rounded(h[i], p_.token);
      const Bounded up = Rounded(h[I() + i], p_.token);
      Sum du_sum;
      for (size_t j = 0; j < H(); ++j) {
        du_sum.AddProduct(Exact(route.gy[j]), Exact(Down(e, i, j)));
      }
      const Bounded du = Times(du_sum.Total(), route.weight);
      const Bounded u = Times(Act(gate), up);
      weight_gradient.AddProduct(u, du_sum.Total());
      dh[i] = Rounded(Times(Times(du, up), Slope(gate)), p_.token);
      dh[I() + i] = Rounded(Times(du, Act(gate)), p_.token);
      const Bounded weighted_u = Rounded(Times(u, route.weight), p_.token);
      for (size_t j = 0; j < H(); ++j) {
        down_[(e * I() + i) * H() + j].AddProduct(weighted_u, Exact(route.gy[j]));
      }
    }
    for (size_t j = 0; j < H() && !down_bias_.empty(); ++j) {
      const Bounded bias = Exact(p_.parameters.down_bias[e * H() + j]);
      weight_gradient.AddProduct(bias, Exact(route.gy[j]));
      down_bias_[e * H() + j].AddProduct(route.weight, Exact(route.gy[j]));
    }
    for (size_t j = 0; j < 2 * I() && !gate_up_bias_.empty(); ++j) {
      gate_up_bias_[e * 2 * I() + j].Add(dh[j]);
    }
    for (size_t i = 0; i < H(); ++i) {
      Sum sum;
      for (size_t j = 0; j < 2 * I(); ++j) {
        sum.AddProduct(dh[j], Exact(GateUp(e, i, j)));
        gate_up_[(e * H() + i) * 2 * I() + j].AddProduct(Exact(route.x[i]), dh[j]);
      }
      dx[i].Add(Rounded(sum.Total(), p_.token));
    }
    return weight_gradient.Total();
  }

  const LayerProblem& p_;
  const reference::Layout& layout_;
  std::vector<Sum> gate_up_, down_, gate_up_bias_, down_bias_;
};

}  // namespace expertd::conformance

#endif  // TESTS_CONFORMANCE_SERVICE_LAYER_BOUNDS_H_
