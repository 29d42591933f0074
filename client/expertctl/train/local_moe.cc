// Routes tokens, runs each expert on its rows, and the backward of both.
#include "client/expertctl/train/local_moe.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/expertctl/train/ops.h"

namespace expertd::train {
namespace {

// probabilities = softmax over each row of `width`.
std::vector<float> RowSoftmax(const std::vector<float>& logits, int64_t width) {
  std::vector<float> probabilities(logits.size());
  for (size_t row = 0; row < logits.size(); row += width) {
    const float top = *std::max_element(&logits[row], &logits[row] + width);
    float sum = 0;
    for (int64_t e = 0; e < width; ++e) {
      probabilities[row + e] = std::exp(logits[row + e] - top);
      sum += probabilities[row + e];
    }
    for (int64_t e = 0; e < width; ++e) probabilities[row + e] /= sum;
  }
  return probabilities;
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalMoe>> LocalMoe::Create(const LocalMoeOptions& options) {
  if (options.hidden < 1 || options.intermediate < 1 || options.top_k < 1 ||
      options.top_k > options.experts) {
    return absl::InvalidArgumentError(absl::StrCat(
        "local MoE layer: hidden=", options.hidden, " intermediate=", options.intermediate,
        " top_k=", options.top_k, " experts=", options.experts,
        ": need positive sizes and top_k no larger than experts"));
  }
  return std::unique_ptr<LocalMoe>(new LocalMoe(options));
}

LocalMoe::LocalMoe(const LocalMoeOptions& options) : options_(options) {
  const int64_t size = options.hidden * options.intermediate;
  const float hidden_bound = std::sqrt(3.0f / static_cast<float>(options.hidden));
  const float inner_bound = std::sqrt(3.0f / static_cast<float>(options.intermediate));
  for (int64_t e = 0; e < options.experts; ++e) {
    const uint64_t stream = 2 * static_cast<uint64_t>(e);
    weights_.emplace_back("gate_up", 2 * size, 0.0f);
    Initialize({options.seed, stream, hidden_bound}, &weights_.back());
    weights_.emplace_back("down", size, 0.0f);
    Initialize({options.seed, stream + 1, inner_bound}, &weights_.back());
  }
  for (const Parameter& weight : weights_) velocities_.emplace_back(weight.value.size(), 0.0f);
}

absl::StatusOr<MoeLayer::ForwardResult> LocalMoe::Forward(const std::vector<float>& tokens,
                                                          const std::vector<float>& router_logits,
                                                          Keep keep) {
  const int64_t count = static_cast<int64_t>(tokens.size()) / options_.hidden;
  if (static_cast<int64_t>(tokens.size()) != count * options_.hidden ||
      static_cast<int64_t>(router_logits.size()) != count * options_.experts) {
    return absl::InvalidArgumentError(
        absl::StrCat("got ", tokens.size(), " token values and ", router_logits.size(),
                     " logits for hidden=", options_.hidden, " experts=", options_.experts));
  }
  Ticket ticket;
  ticket.experts.resize(options_.experts);
  ticket.softmax = RowSoftmax(router_logits, options_.experts);
  RouteTokens(router_logits, &ticket.experts);

  ForwardResult result;
  result.output.assign(tokens.size(), 0.0f);
  double balance = 0;
  for (int64_t e = 0; e < options_.experts; ++e) {
    ExpertState& state = ticket.experts[e];
    RunExpert(e, tokens, &state);
    for (size_t row = 0; row < state.routes.size(); ++row) {
      float* to = &result.output[state.routes[row].token * options_.hidden];
      const float* from = &state.output[row * options_.hidden];
      for (int64_t i = 0; i < options_.hidden; ++i) to[i] += state.routes[row].weight * from[i];
    }
    double probability = 0;
    for (int64_t t = 0; t < count; ++t) probability += ticket.softmax[t * options_.experts + e];
    balance += static_cast<double>(state.routes.size()) * probability;
    result.tokens_per_expert.push_back(static_cast<int64_t>(state.routes.size()));
  }
  if (count > 0) {
    result.aux_loss = options_.aux_loss_coefficient * static_cast<double>(options_.experts) *
                      balance / (static_cast<double>(options_.top_k) * count * count);
  }
  if (keep == Keep::kForBackward) {
    result.ticket = next_ticket_++;
    tickets_.emplace(result.ticket, std::move(ticket));
  }
  return result;
}

void LocalMoe::RouteTokens(const std::vector<float>& logits,
                           std::vector<ExpertState>* experts) const {
  const int64_t width = options_.experts;
  std::vector<int64_t> order(width);
  for (size_t row = 0; row < logits.size(); row += width) {
    std::iota(order.begin(), order.end(), 0);
    const auto higher = [&](int64_t a, int64_t b) {
      return logits[row + a] != logits[row + b] ? logits[row + a] > logits[row + b] : a < b;
    };
    std::partial_sort(order.begin(), order.begin() + options_.top_k, order.end(), higher);
    const float top = logits[row + order[0]];
    float sum = 0;
    for (int64_t k = 0; k < options_.top_k; ++k) sum += std::exp(logits[row + order[k]] - top);
    for (int64_t k = 0; k < options_.top_k; ++k) {
      const float weight = std::exp(logits[row + order[k]] - top) / sum;
      (*experts)[order[k]].routes.push_back({static_cast<int64_t>(row) / width, weight});
    }
  }
}

void LocalMoe::RunExpert(int64_t expert, const std::vector<float>& tokens, ExpertState* state) {
  const int64_t inner = options_.intermediate;
  const int64_t rows = static_cast<int64_t>(state->routes.size());
  state->inputs.reserve(rows * options_.hidden);
  for (const Route& route : state->routes) {
    const auto first = tokens.begin() + route.token * options_.hidden;
    state->inputs.insert(state->inputs.end(), first, first + options_.hidden);
  }
  state->gate_up = LinearForward(state->inputs, options_.hidden, gate_up(expert));
  state->activated.resize(rows * inner);
  for (int64_t row = 0; row < rows; ++row) {
    const float* gate = &state->gate_up[row * 2 * inner];
    for (int64_t i = 0; i < inner; ++i) {
      state->activated[row * inner + i] = gate[i] * Sigmoid(gate[i]) * gate[inner + i];
    }
  }
  state->output = LinearForward(state->activated, inner, down(expert));
}

absl::StatusOr<MoeLayer::BackwardResult> LocalMoe::Backward(
    uint64_t ticket, const std::vector<float>& output_gradient, double aux_loss_gradient) {
  auto node = tickets_.extract(ticket);
  if (node.empty()) return absl::NotFoundError(absl::StrCat("no ticket ", ticket));
  const Ticket& forward = node.mapped();
  const size_t tokens = forward.softmax.size() / options_.experts;
  if (output_gradient.size() != tokens * options_.hidden) {
    return absl::InvalidArgumentError(absl::StrCat(
        "got ", output_gradient.size(), " gradient values, need ", tokens * options_.hidden));
  }
  BackwardResult result;
  result.tokens_gradient.assign(output_gradient.size(), 0.0f);
  result.router_logits_gradient.assign(forward.softmax.size(), 0.0f);
  for (int64_t e = 0; e < options_.experts; ++e) {
    BackwardExpert(e, forward.experts[e], output_gradient, &result);
  }
  RouterBackward(forward, aux_loss_gradient, &result.router_logits_gradient);
  return result;
}

// Leaves each route weight's gradient in router_logits_gradient; RouterBackward finishes it.
void LocalMoe::BackwardExpert(int64_t expert, const ExpertState& state,
                              const std::vector<float>& output_gradient, BackwardResult* result) {
  const int64_t hidden = options_.hidden;
  const int64_t inner = options_.intermediate;
  const int64_t rows = static_cast<int64_t>(state.routes.size());
  std::vector<float> weighted(rows * hidden);
  for (int64_t row = 0; row < rows; ++row) {
    const Route& route = state.routes[row];
    const float* from = &output_gradient[route.token * hidden];
    float dot = 0;
    for (int64_t i = 0; i < hidden; ++i) {
      dot += from[i] * state.output[row * hidden + i];
      weighted[row * hidden + i] = route.weight * from[i];
    }
    result->router_logits_gradient[route.token * options_.experts + expert] = dot;
  }
  const std::vector<float> inner_gradient =
      LinearBackward(state.activated, inner, weighted, &down(expert));
  std::vector<float> gate_up_gradient(rows * 2 * inner);
  for (int64_t row = 0; row < rows; ++row) {
    const float* gate = &state.gate_up[row * 2 * inner];
    float* gradient = &gate_up_gradient[row * 2 * inner];
    for (int64_t i = 0; i < inner; ++i) {
      const float g = inner_gradient[row * inner + i];
      const float sigmoid = Sigmoid(gate[i]);
      gradient[i] = g * gate[inner + i] * sigmoid * (1.0f + gate[i] * (1.0f - sigmoid));
      gradient[inner + i] = g * gate[i] * sigmoid;
    }
  }
  const std::vector<float> row_gradient =
      LinearBackward(state.inputs, hidden, gate_up_gradient, &gate_up(expert));
  for (int64_t row = 0; row < rows; ++row) {
    float* to = &result->tokens_gradient[state.routes[row].token * hidden];
    for (int64_t i = 0; i < hidden; ++i) to[i] += row_gradient[row * hidden + i];
  }
}

// Through the softmax over the selected experts, and that over all of them in the aux loss. For
// p = softmax(z): dz_e = p_e * (g_e - sum over f of p_f * g_f).
void LocalMoe::RouterBackward(const Ticket& ticket, double aux_loss_gradient,
                              std::vector<float>* logits_gradient) const {
  const int64_t width = options_.experts;
  const size_t tokens = ticket.softmax.size() / width;
  std::vector<float> selected(ticket.softmax.size(), 0.0f);  // 0 where not selected.
  std::vector<float> aux(width);
  for (int64_t e = 0; e < width; ++e) {
    const std::vector<Route>& routes = ticket.experts[e].routes;
    for (const Route& route : routes) selected[route.token * width + e] = route.weight;
    const double count = static_cast<double>(tokens);
    aux[e] = static_cast<float>(aux_loss_gradient * options_.aux_loss_coefficient * width *
                                static_cast<double>(routes.size()) /
                                (static_cast<double>(options_.top_k) * count * count));
  }
  for (size_t row = 0; row < ticket.softmax.size(); row += width) {
    float* gradient = &(*logits_gradient)[row];
    const float* p = &selected[row];
    const float* a = &ticket.softmax[row];
    const float mean = std::inner_product(p, p + width, gradient, 0.0f);
    const float aux_mean = std::inner_product(a, a + width, aux.begin(), 0.0f);
    for (int64_t e = 0; e < width; ++e) {
      gradient[e] = p[e] * (gradient[e] - mean) + a[e] * (aux[e] - aux_mean);
    }
  }
}

absl::Status LocalMoe::Apply(double learning_rate) {
  const float momentum = static_cast<float>(options_.momentum);
  const float step = static_cast<float>(learning_rate);
  for (size_t w = 0; w < weights_.size(); ++w) {
    for (size_t i = 0; i < weights_[w].value.size(); ++i) {
      float& velocity = velocities_[w][i];
      velocity = momentum * velocity + weights_[w].gradient[i];
      weights_[w].value[i] -= step * velocity;
    }
    std::fill(weights_[w].gradient.begin(), weights_[w].gradient.end(), 0.0f);
  }
  return absl::OkStatus();
}

}  // namespace expertd::train
