// The trainer's MoE layer, served by a group: tokens are sharded over the ranks, results merged.
#ifndef CLIENT_EXPERTCTL_SERVED_MOE_H_
#define CLIENT_EXPERTCTL_SERVED_MOE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/step_driver.h"
#include "client/expertctl/train/moe_layer.h"

namespace expertd::expertctl {

// A layer with SGD with momentum, softmax routing after top-k on the caller's logits, f32 tokens.
struct ServedMoeOptions {
  std::string layer_id;
  int64_t hidden = 128;
  int64_t intermediate = 256;
  int64_t experts = 8;
  int64_t top_k = 2;
  double aux_loss_coefficient = 0.01;
  double momentum = 0.9;
  uint64_t seed = 1;
};

class ServedMoe : public train::MoeLayer {
 public:
  // Creates the layer unless it exists; `driver` must outlive it. Errors: those of the service.
  static absl::StatusOr<std::unique_ptr<ServedMoe>> Create(const ServedMoeOptions& options,
                                                           client::StepDriver* driver);

  absl::StatusOr<ForwardResult> Forward(const std::vector<float>& tokens,
                                        const std::vector<float>& router_logits,
                                        train::Keep keep) override;
  absl::StatusOr<BackwardResult> Backward(uint64_t ticket,
                                          const std::vector<float>& output_gradient,
                                          double aux_loss_gradient) override;
  // Exactly once per version: the version moves on only when every rank applied.
  absl::Status Apply(double learning_rate) override;

  const std::string& layer_id() const { return options_.layer_id; }
  uint64_t weights_version() const { return version_; }

 private:
  ServedMoe(const ServedMoeOptions& options, uint64_t version, client::StepDriver* driver)
      : options_(options), driver_(driver), version_(version) {}

  ServedMoeOptions options_;
  client::StepDriver* driver_;
  uint64_t version_;
  uint64_t next_ticket_ = 1;
  std::map<uint64_t, std::vector<uint64_t>> tickets_;  // Ours -> each rank's.
};

v1::LayerConfig MakeLayerConfig(const ServedMoeOptions& options);

// Rows [begin, begin + count) of rank `rank` when `rows` are split evenly over `world` ranks; the
// first ranks take one more.
struct RowRange {
  int64_t begin = 0;
  int64_t count = 0;
};
RowRange ShardOf(int64_t rows, int64_t world, int64_t rank);

}  // namespace expertd::expertctl

#endif  // CLIENT_EXPERTCTL_SERVED_MOE_H_
