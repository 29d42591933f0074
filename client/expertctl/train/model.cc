// The model's forward, and its backward in the reverse order.
#include "client/expertctl/train/model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/expertctl/train/ops.h"

namespace expertd::train {
namespace {

constexpr int64_t kBytes = 256;
constexpr uint64_t kStreamsPerBlock = 8;

absl::Status InBlock(const absl::Status& status, size_t index, absl::string_view call) {
  return absl::Status(status.code(),
                      absl::StrCat("block ", index, " ", call, ": ", status.message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> Model::Create(const ModelOptions& options,
                                                     std::vector<MoeLayer*> layers) {
  std::string problems;
  const auto require_positive = [&problems](absl::string_view name, int64_t value) {
    if (value < 1) absl::StrAppend(&problems, " ", name, "=", value, " must be positive;");
  };
  require_positive("hidden", options.hidden);
  require_positive("experts", options.experts);
  require_positive("taps", options.taps);
  require_positive("length", options.length);
  require_positive("layers", static_cast<int64_t>(layers.size()));
  if (!problems.empty()) return absl::InvalidArgumentError(absl::StrCat("model:", problems));
  return std::unique_ptr<Model>(new Model(options, std::move(layers)));
}

Model::Model(const ModelOptions& options, std::vector<MoeLayer*> layers)
    : options_(options),
      layers_(std::move(layers)),
      embedding_("embedding", kBytes * options.hidden, 0.0f),
      last_gain_("last_gain", options.hidden, 1.0f),
      head_("head", options.hidden * kBytes, 0.0f) {
  const float bound = std::sqrt(3.0f / static_cast<float>(options.hidden));
  Initialize({options.seed, 0, 1.0f}, &embedding_);
  Initialize({options.seed, 1, bound}, &head_);
  head_.decayed = true;
  const MixerShape shape{options.hidden, options.taps, options.length};
  for (size_t i = 0; i < layers_.size(); ++i) {
    const std::string name = absl::StrCat("block", i);
    const uint64_t stream = (i + 1) * kStreamsPerBlock;
    blocks_.push_back({Parameter(name + ".mixer_gain", options.hidden, 1.0f),
                       CausalMixer(shape, name + ".mixer", options.seed, stream),
                       Parameter(name + ".moe_gain", options.hidden, 1.0f),
                       Parameter(name + ".router", options.hidden * options.experts, 0.0f)});
    Initialize({options.seed, stream + kStreamsPerBlock - 1, bound}, &blocks_.back().router);
  }
}

absl::StatusOr<Model::Pass> Model::Forward(const std::vector<uint8_t>& inputs, Keep keep) {
  if (inputs.size() % options_.length != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("got ", inputs.size(), " bytes, need a multiple of ", options_.length));
  }
  Pass pass;
  std::vector<float> x = EmbeddingForward(inputs, embedding_);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (absl::Status status = ForwardBlock(i, keep, &x, &pass); !status.ok()) return status;
  }
  std::vector<float> head_input = RmsNormForward(x, last_gain_);
  pass.logits = LinearForward(head_input, options_.hidden, head_);
  if (keep == Keep::kForBackward) {
    pass.inputs = inputs;
    pass.last = std::move(x);
    pass.head_input = std::move(head_input);
  }
  return pass;
}

absl::Status Model::ForwardBlock(size_t index, Keep keep, std::vector<float>* x, Pass* pass) {
  const Block& block = blocks_[index];
  BlockState state;
  state.input = *x;
  state.mixer_input = RmsNormForward(*x, block.mixer_gain);
  AddInPlace(block.mixer.Forward(state.mixer_input, &state.mixer), x);
  state.middle = *x;
  state.moe_input = RmsNormForward(*x, block.moe_gain);
  const std::vector<float> logits = LinearForward(state.moe_input, options_.hidden, block.router);
  absl::StatusOr<MoeLayer::ForwardResult> result =
      layers_[index]->Forward(state.moe_input, logits, keep);
  if (!result.ok()) return InBlock(result.status(), index, "forward");
  if (result->output.size() != x->size()) {
    return absl::InternalError(absl::StrCat("block ", index, " forward: got ",
                                            result->output.size(), " values, need ", x->size()));
  }
  AddInPlace(result->output, x);
  pass->aux_loss += result->aux_loss;
  pass->tokens_per_expert.push_back(std::move(result->tokens_per_expert));
  state.ticket = result->ticket;
  if (keep == Keep::kForBackward) pass->blocks.push_back(std::move(state));
  return absl::OkStatus();
}

absl::Status Model::Backward(const Pass& pass, const std::vector<float>& logits_gradient) {
  std::vector<float> gradient =
      LinearBackward(pass.head_input, options_.hidden, logits_gradient, &head_);
  gradient = RmsNormBackward(pass.last, gradient, &last_gain_);
  for (size_t i = blocks_.size(); i-- > 0;) {
    if (absl::Status status = BackwardBlock(i, pass.blocks[i], &gradient); !status.ok()) {
      return status;
    }
  }
  EmbeddingBackward(pass.inputs, gradient, &embedding_);
  return absl::OkStatus();
}

absl::Status Model::BackwardBlock(size_t index, const BlockState& state,
                                  std::vector<float>* gradient) {
  Block& block = blocks_[index];
  absl::StatusOr<MoeLayer::BackwardResult> result =
      layers_[index]->Backward(state.ticket, *gradient, 1.0);
  if (!result.ok()) return InBlock(result.status(), index, "backward");
  const size_t tokens = gradient->size() / options_.hidden;
  if (result->tokens_gradient.size() != gradient->size() ||
      result->router_logits_gradient.size() != tokens * options_.experts) {
    return absl::InternalError(absl::StrCat("block ", index, " backward: got ",
                                            result->tokens_gradient.size(), " and ",
                                            result->router_logits_gradient.size(), " values, need ",
                                            gradient->size(), " and ", tokens * options_.experts));
  }
  std::vector<float> moe_gradient = LinearBackward(state.moe_input, options_.hidden,
                                                   result->router_logits_gradient, &block.router);
  AddInPlace(result->tokens_gradient, &moe_gradient);
  AddInPlace(RmsNormBackward(state.middle, moe_gradient, &block.moe_gain), gradient);
  const std::vector<float> mixer_gradient =
      block.mixer.Backward(state.mixer_input, state.mixer, *gradient);
  AddInPlace(RmsNormBackward(state.input, mixer_gradient, &block.mixer_gain), gradient);
  return absl::OkStatus();
}

std::vector<Parameter*> Model::parameters() {
  std::vector<Parameter*> all = {&embedding_, &last_gain_, &head_};
  for (Block& block : blocks_) {
    all.insert(all.end(), {&block.mixer_gain, &block.moe_gain, &block.router});
    for (Parameter* parameter : block.mixer.parameters()) all.push_back(parameter);
  }
  return all;
}

}  // namespace expertd::train
