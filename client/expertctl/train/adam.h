// AdamW (Loshchilov and Hutter 2019) with global norm clipping, for the client's own parameters.
#ifndef CLIENT_EXPERTCTL_TRAIN_ADAM_H_
#define CLIENT_EXPERTCTL_TRAIN_ADAM_H_

#include <cstdint>
#include <vector>

#include "client/expertctl/train/parameter.h"

namespace expertd::train {

struct AdamOptions {
  double beta1 = 0.9;
  double beta2 = 0.98;
  double epsilon = 1e-8;
  double weight_decay = 0.01;  // Times the learning rate, on `decayed` parameters only.
  double max_norm = 1.0;       // Of all gradients together; 0 turns clipping off.
};

class Adam {
 public:
  // The parameters must outlive this object and keep their sizes.
  Adam(const AdamOptions& options, std::vector<Parameter*> parameters);

  // One update of every parameter, then zero gradients. Returns the gradient norm before clipping.
  double Step(double learning_rate);

 private:
  struct Moments {
    std::vector<float> first;
    std::vector<float> second;
  };

  AdamOptions options_;
  std::vector<Parameter*> parameters_;
  std::vector<Moments> moments_;
  int64_t steps_ = 0;
};

}  // namespace expertd::train

#endif  // CLIENT_EXPERTCTL_TRAIN_ADAM_H_
