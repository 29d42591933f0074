// Causal token mixing of one block: a short convolution per channel, then a projection.
//
// It is linear on purpose. Together with linear routers and head it leaves every non-linearity but
// the norms to the served experts, so that what the model learns beyond short-range statistics is
// learned there.
#ifndef CLIENT_EXPERTCTL_TRAIN_MIXER_H_
#define CLIENT_EXPERTCTL_TRAIN_MIXER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "client/expertctl/train/parameter.h"

namespace expertd::train {

struct MixerShape {
  int64_t hidden = 0;
  int64_t taps = 0;    // Positions that one output sees, itself included.
  int64_t length = 0;  // Positions per sequence; nothing mixes across sequences.
};

// y[t] = (sum over d < taps of x[t - d] * kernel[d]) @ project, with x zero before the start of a
// sequence. Stateless between calls.
class CausalMixer {
 public:
  // What Backward needs of a forward.
  struct Saved {
    std::vector<float> mixed;  // [tokens, hidden], the convolution's output.
  };

  // Draws the initial weights from streams init_stream and init_stream + 1 of `seed`.
  CausalMixer(const MixerShape& shape, const std::string& name, uint64_t seed,
              uint64_t init_stream);

  // x: [tokens, hidden], tokens a multiple of `length`.
  std::vector<float> Forward(const std::vector<float>& x, Saved* saved) const;

  // Adds to the parameters' gradients; returns the gradient of x.
  std::vector<float> Backward(const std::vector<float>& x, const Saved& saved,
                              const std::vector<float>& output_gradient);

  std::vector<Parameter*> parameters() { return {&kernel_, &project_}; }

 private:
  MixerShape shape_;
  Parameter kernel_;   // [taps, hidden]; tap d reads position t - d.
  Parameter project_;  // [hidden, hidden]
};

}  // namespace expertd::train

#endif  // CLIENT_EXPERTCTL_TRAIN_MIXER_H_
