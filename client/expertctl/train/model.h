// A byte-level causal language model whose FFN layers are MoE layers behind MoeLayer.
//
//   x = embedding[byte]
//   per block:  x += mixer(norm(x));   h = norm(x);   x += moe(h, router logits = h @ router)
//   logits = norm(x) @ head
// Everything but the experts lives here. Not thread safe.
#ifndef CLIENT_EXPERTCTL_TRAIN_MODEL_H_
#define CLIENT_EXPERTCTL_TRAIN_MODEL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/expertctl/train/mixer.h"
#include "client/expertctl/train/moe_layer.h"
#include "client/expertctl/train/parameter.h"

namespace expertd::train {

struct ModelOptions {
  int64_t hidden = 128;
  int64_t experts = 8;
  int64_t taps = 6;      // Positions that one mixer sees.
  int64_t length = 128;  // Bytes per sequence.
  uint64_t seed = 1;
};

class Model {
 public:
  // What one forward leaves for its backward.
  struct BlockState {
    std::vector<float> input;  // [tokens, hidden], as all below.
    std::vector<float> mixer_input;
    CausalMixer::Saved mixer;
    std::vector<float> middle;  // After the mixer's residual.
    std::vector<float> moe_input;
    uint64_t ticket = 0;
  };
  struct Pass {
    std::vector<float> logits;                            // [tokens, 256]
    double aux_loss = 0;                                  // Summed over the layers.
    std::vector<std::vector<int64_t>> tokens_per_expert;  // [layers][experts]
    std::vector<uint8_t> inputs;
    std::vector<BlockState> blocks;
    std::vector<float> last;  // Before the last norm.
    std::vector<float> head_input;
  };

  // One block per layer; the layers must outlive the model. Errors: INVALID_ARGUMENT.
  static absl::StatusOr<std::unique_ptr<Model>> Create(const ModelOptions& options,
                                                       std::vector<MoeLayer*> layers);

  // inputs: whole sequences of `length` bytes. Errors: a layer's, with the block named.
  absl::StatusOr<Pass> Forward(const std::vector<uint8_t>& inputs, Keep keep);

  // Gradients of (loss + pass.aux_loss), where logits_gradient is d loss / d logits: adds them to
  // parameters() and, through the layers, to the experts. `pass` was kept; it is spent.
  absl::Status Backward(const Pass& pass, const std::vector<float>& logits_gradient);

  const ModelOptions& options() const { return options_; }
  std::vector<Parameter*> parameters();
  const std::vector<MoeLayer*>& layers() const { return layers_; }

 private:
  struct Block {
    Parameter mixer_gain;
    CausalMixer mixer;
    Parameter moe_gain;
    Parameter router;  // [hidden, experts]
  };

  Model(const ModelOptions& options, std::vector<MoeLayer*> layers);
  absl::Status ForwardBlock(size_t index, Keep keep, std::vector<float>* x, Pass* pass);
  absl::Status BackwardBlock(size_t index, const BlockState& state, std::vector<float>* gradient);

  ModelOptions options_;
  std::vector<MoeLayer*> layers_;
  Parameter embedding_;  // [256, hidden]
  std::vector<Block> blocks_;
  Parameter last_gain_;
  Parameter head_;  // [hidden, 256]
};

}  // namespace expertd::train

#endif  // CLIENT_EXPERTCTL_TRAIN_MODEL_H_
