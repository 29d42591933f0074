// A MoeLayer in this process: plain f32, no service. For tests and for tuning the model.
#ifndef CLIENT_EXPERTCTL_TRAIN_LOCAL_MOE_H_
#define CLIENT_EXPERTCTL_TRAIN_LOCAL_MOE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/expertctl/train/moe_layer.h"
#include "client/expertctl/train/parameter.h"

namespace expertd::train {

struct LocalMoeOptions {
  int64_t hidden = 128;
  int64_t intermediate = 256;
  int64_t experts = 8;
  int64_t top_k = 2;
  double aux_loss_coefficient = 0.01;
  double momentum = 0.9;
  uint64_t seed = 1;
};

// Softmax after top-k, ties to the lower expert id, silu-gated experts without biases, SGD with
// momentum (velocity = momentum * velocity + gradient; weight -= learning_rate * velocity).
// Weights start uniform within +-sqrt(3 / inputs): unit variance in, unit variance out.
class LocalMoe : public MoeLayer {
 public:
  // Errors: INVALID_ARGUMENT.
  static absl::StatusOr<std::unique_ptr<LocalMoe>> Create(const LocalMoeOptions& options);

  absl::StatusOr<ForwardResult> Forward(const std::vector<float>& tokens,
                                        const std::vector<float>& router_logits,
                                        Keep keep) override;
  absl::StatusOr<BackwardResult> Backward(uint64_t ticket,
                                          const std::vector<float>& output_gradient,
                                          double aux_loss_gradient) override;
  absl::Status Apply(double learning_rate) override;

  // For tests: each expert's gate_up [hidden, 2 * intermediate], then its down
  // [intermediate, hidden].
  std::vector<Parameter>& weights() { return weights_; }

 private:
  struct Route {
    int64_t token;
    float weight;
  };
  // One expert's part of a forward; rows are its routes in token order.
  struct ExpertState {
    std::vector<Route> routes;
    std::vector<float> inputs;     // [rows, hidden]
    std::vector<float> gate_up;    // [rows, 2 * intermediate], before the activation.
    std::vector<float> activated;  // [rows, intermediate]
    std::vector<float> output;     // [rows, hidden], unweighted.
  };
  struct Ticket {
    std::vector<ExpertState> experts;
    std::vector<float> softmax;  // [tokens, experts], over all experts, for the aux loss.
  };

  explicit LocalMoe(const LocalMoeOptions& options);
  Parameter& gate_up(int64_t expert) { return weights_[2 * expert]; }
  Parameter& down(int64_t expert) { return weights_[2 * expert + 1]; }
  void RouteTokens(const std::vector<float>& logits, std::vector<ExpertState>* experts) const;
  void RunExpert(int64_t expert, const std::vector<float>& tokens, ExpertState* state);
  void BackwardExpert(int64_t expert, const ExpertState& state,
                      const std::vector<float>& output_gradient, BackwardResult* result);
  void RouterBackward(const Ticket& ticket, double aux_loss_gradient,
                      std::vector<float>* logits_gradient) const;

  LocalMoeOptions options_;
  std::vector<Parameter> weights_;
  std::vector<std::vector<float>> velocities_;
  std::map<uint64_t, Ticket> tickets_;
  uint64_t next_ticket_ = 1;
};

}  // namespace expertd::train

#endif  // CLIENT_EXPERTCTL_TRAIN_LOCAL_MOE_H_
