// Float64 reference of one MoE FFN layer: see layer.h.
#include "tests/reference/layer.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <span>
#include <utility>
#include <vector>

#include "tests/reference/matrix.h"

namespace expertd::reference {
namespace {

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double NormalCdf(double x) { return 0.5 * (1.0 + std::erf(x / std::numbers::sqrt2)); }

double NormalDensity(double x) {
  return std::exp(-0.5 * x * x) * std::numbers::inv_sqrtpi / std::numbers::sqrt2;
}

// The parameters of one expert (const double) or their gradients (double).
template <typename T>
struct ExpertView {
  std::span<T> gate_up;       // [H, 2I]
  std::span<T> down;          // [I, H]
  std::span<T> gate_up_bias;  // [2I], or empty
  std::span<T> down_bias;     // [H], or empty
};

// The `index`-th of `count` equal blocks. An absent bias is a block of nothing.
template <typename Vector>
auto Block(Vector& all, int64_t index, int64_t count) {
  const size_t size = all.size() / static_cast<size_t>(count);
  return std::span(all).subspan(static_cast<size_t>(index) * size, size);
}

template <typename Parameters>
auto ViewExpert(Parameters& parameters, int64_t expert, int64_t count) {
  using T = typename decltype(Block(parameters.down, 0, 1))::element_type;
  return ExpertView<T>{.gate_up = Block(parameters.gate_up, expert, count),
                       .down = Block(parameters.down, expert, count),
                       .gate_up_bias = Block(parameters.gate_up_bias, expert, count),
                       .down_bias = Block(parameters.down_bias, expert, count)};
}

// out += x @ w, w being [x.size(), out.size()].
void AddProduct(std::span<const double> x, std::span<const double> w, std::span<double> out) {
  for (size_t i = 0; i < x.size(); ++i) AddScaled(x[i], w.subspan(i * out.size(), out.size()), out);
}

// out += g @ w^T, w being [out.size(), g.size()].
void AddProductTransposed(std::span<const double> g, std::span<const double> w,
                          std::span<double> out) {
  for (size_t i = 0; i < out.size(); ++i) out[i] += Dot(g, w.subspan(i * g.size(), g.size()));
}

// dw += x^T g, dw being [x.size(), g.size()].
void AddOuter(std::span<const double> x, std::span<const double> g, std::span<double> dw) {
  for (size_t i = 0; i < x.size(); ++i) AddScaled(x[i], g, dw.subspan(i * g.size(), g.size()));
}

void AddIfPresent(double scale, std::span<const double> bias, std::span<double> out) {
  if (!bias.empty()) AddScaled(scale, bias, out);
}

// One slot row through its expert. All outputs start as zero.
struct ForwardRow {
  std::span<const double> x;  // [H]
  double weight;              // the route weight
  std::span<double> h;        // [2I]
  std::span<double> u;        // [I]
  std::span<double> z;        // [H]
};

void RunForwardRow(const LayerConfig& config, const ExpertView<const double>& expert,
                   const ForwardRow& row) {
  AddProduct(row.x, expert.gate_up, row.h);
  AddIfPresent(1.0, expert.gate_up_bias, row.h);

  const size_t intermediate = row.u.size();
  for (size_t i = 0; i < intermediate; ++i) {
    row.u[i] = Activate(config.activation, row.h[i]) * row.h[intermediate + i];
  }

  const double early = config.weighting == Weighting::kEarly ? row.weight : 1.0;
  std::vector<double> weighted_u(row.u.begin(), row.u.end());
  for (double& value : weighted_u) value *= early;
  AddProduct(weighted_u, expert.down, row.z);
  AddIfPresent(early, expert.down_bias, row.z);
}

// The backward of one slot row. `dx` starts as zero; expert gradients are added to.
struct BackwardRow {
  std::span<const double> x;   // [H]
  double weight;               // the route weight
  std::span<const double> h;   // [2I]
  std::span<const double> u;   // [I]
  std::span<const double> z;   // [H]
  std::span<const double> gy;  // [H]: the gradient of the token's output, unweighted
  std::span<double> dx;        // [H]
};

// Gradient of h = [gate | up] from that of u = act(gate) * up.
std::vector<double> ActivationBackward(Activation activation, std::span<const double> h,
                                       std::span<const double> du) {
  const size_t intermediate = du.size();
  std::vector<double> dh(2 * intermediate);
  for (size_t i = 0; i < intermediate; ++i) {
    const double gate = h[i];
    const double up = h[intermediate + i];
    dh[i] = du[i] * up * ActivateDerivative(activation, gate);
    dh[intermediate + i] = du[i] * Activate(activation, gate);
  }
  return dh;
}

// Returns the gradient of the route weight.
double RunBackwardRow(const LayerConfig& config, const ExpertView<const double>& expert,
                      const BackwardRow& row, const ExpertView<double>& gradients) {
  const double late = config.weighting == Weighting::kLate ? row.weight : 1.0;
  const double early = config.weighting == Weighting::kEarly ? row.weight : 1.0;

  // z = (early * u) @ down + early * down_bias, and the token's output gains late * z.
  std::vector<double> gz(row.gy.begin(), row.gy.end());
  for (double& value : gz) value *= late;
  std::vector<double> du(row.u.size(), 0.0);
  AddProductTransposed(gz, expert.down, du);  // gradient of early * u, so far

  double weight_gradient = 0.0;
  if (config.weighting == Weighting::kLate) {
    weight_gradient = Dot(row.gy, row.z);
  } else {
    weight_gradient = Dot(du, row.u);
    if (!expert.down_bias.empty()) weight_gradient += Dot(gz, expert.down_bias);
  }

  std::vector<double> weighted_u(row.u.begin(), row.u.end());
  for (double& value : weighted_u) value *= early;
  AddOuter(weighted_u, gz, gradients.down);
  if (!gradients.down_bias.empty()) AddScaled(early, gz, gradients.down_bias);

  for (double& value : du) value *= early;  // now the gradient of u
  const std::vector<double> dh = ActivationBackward(config.activation, row.h, du);
  AddOuter(row.x, dh, gradients.gate_up);
  if (!gradients.gate_up_bias.empty()) AddScaled(1.0, dh, gradients.gate_up_bias);
  AddProductTransposed(dh, expert.gate_up, row.dx);
  return weight_gradient;
}

// Calls fn(global expert, slot row) for each row of a rank that holds a route: never for pads.
template <typename Fn>
void ForEachRow(const Layout& layout, int64_t rank, Fn fn) {
  const RankLayout& rank_layout = layout.ranks[rank];
  const int64_t local_experts = layout.config.LocalExperts();
  for (int64_t j = 0; j < local_experts; ++j) {
    for (int64_t i = 0; i < rank_layout.tokens_per_expert[j]; ++i) {
      fn(rank * local_experts + j, rank_layout.base[j] + i);
    }
  }
}

// Zeros, `columns` wide, for the slot rows of every rank.
PerRank ZeroRows(const Layout& layout, int64_t columns) {
  PerRank zeros;
  for (const RankLayout& rank : layout.ranks) {
    zeros.push_back(std::vector<double>(rank.total * columns, 0.0));
  }
  return zeros;
}

}  // namespace

double Activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kSilu:
      return x * Sigmoid(x);
    case Activation::kGelu:
      return x * NormalCdf(x);
    case Activation::kRelu2:
      return x > 0.0 ? x * x : 0.0;
  }
  return 0.0;
}

double ActivateDerivative(Activation activation, double x) {
  switch (activation) {
    case Activation::kSilu:
      return Sigmoid(x) * (1.0 + x * (1.0 - Sigmoid(x)));
    case Activation::kGelu:
      return NormalCdf(x) + x * NormalDensity(x);
    case Activation::kRelu2:
      return x > 0.0 ? 2.0 * x : 0.0;
  }
  return 0.0;
}

LayerForwardResult LayerForward(const LayerConfig& config, const ExpertParameters& parameters,
                                const PerRank& x, const Routing& ids, const PerRank& weights) {
  const int64_t hidden = config.hidden;
  const int64_t intermediate = config.intermediate;
  LayerForwardResult result;
  result.layout = Prepare(config.ep, ids);
  if (result.layout.refused) return result;

  result.recv = Dispatch(result.layout, hidden, x, weights);
  result.h = ZeroRows(result.layout, 2 * intermediate);
  result.u = ZeroRows(result.layout, intermediate);
  result.z = ZeroRows(result.layout, hidden);
  for (int64_t rank = 0; rank < config.ep.num_ranks; ++rank) {
    ForEachRow(result.layout, rank, [&](int64_t expert, int64_t row) {
      RunForwardRow(config, ViewExpert(parameters, expert, config.ep.num_experts),
                    {.x = Row(result.recv.x[rank], row, hidden),
                     .weight = result.recv.weights[rank][row],
                     .h = MutableRow(result.h[rank], row, 2 * intermediate),
                     .u = MutableRow(result.u[rank], row, intermediate),
                     .z = MutableRow(result.z[rank], row, hidden)});
    });
  }
  const bool late = config.weighting == Weighting::kLate;
  result.output = Combine(result.layout, hidden, result.z, late ? &result.recv.weights : nullptr);
  return result;
}

LayerGradients LayerBackward(const LayerConfig& config, const ExpertParameters& parameters,
                             const LayerForwardResult& forward, const PerRank& gy) {
  const int64_t hidden = config.hidden;
  const int64_t intermediate = config.intermediate;
  LayerGradients result;
  result.experts.gate_up.assign(parameters.gate_up.size(), 0.0);
  result.experts.down.assign(parameters.down.size(), 0.0);
  result.experts.gate_up_bias.assign(parameters.gate_up_bias.size(), 0.0);
  result.experts.down_bias.assign(parameters.down_bias.size(), 0.0);

  const PerRank gy_rows = CombineBackward(forward.layout, hidden, gy);
  PerRank dx = ZeroRows(forward.layout, hidden);
  PerRank weight_gradients = ZeroRows(forward.layout, 1);
  for (int64_t rank = 0; rank < config.ep.num_ranks; ++rank) {
    ForEachRow(forward.layout, rank, [&](int64_t expert, int64_t row) {
      weight_gradients[rank][row] =
          RunBackwardRow(config, ViewExpert(parameters, expert, config.ep.num_experts),
                         {.x = Row(forward.recv.x[rank], row, hidden),
                          .weight = forward.recv.weights[rank][row],
                          .h = Row(forward.h[rank], row, 2 * intermediate),
                          .u = Row(forward.u[rank], row, intermediate),
                          .z = Row(forward.z[rank], row, hidden),
                          .gy = Row(gy_rows[rank], row, hidden),
                          .dx = MutableRow(dx[rank], row, hidden)},
                         ViewExpert(result.experts, expert, config.ep.num_experts));
    });
  }

  DispatchGradients inputs = DispatchBackward(forward.layout, hidden, dx, weight_gradients);
  result.tokens = std::move(inputs.x);
  result.topk_weights = std::move(inputs.weights);
  return result;
}

}  // namespace expertd::reference
