// Trains a Model on a Corpus within a budget of steps or seconds, and says how it goes.
#ifndef CLIENT_EXPERTCTL_TRAIN_TRAINER_H_
#define CLIENT_EXPERTCTL_TRAIN_TRAINER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/expertctl/train/adam.h"
#include "client/expertctl/train/batch.h"
#include "client/expertctl/train/corpus.h"
#include "client/expertctl/train/model.h"

namespace expertd::train {

struct TrainOptions {
  // At least one of the two limits must be set; the first one reached ends the training. `seconds`
  // includes the validations.
  int64_t steps = 0;
  double seconds = 0;

  int64_t sequences = 16;           // Per batch.
  double learning_rate = 8e-3;      // Peak, of the client's parameters.
  double expert_learning_rate = 2;  // Peak, passed to MoeLayer::Apply.
  double warmup = 0.1;              // Part of the budget with a rising learning rate.
  double last_rate = 0.05;          // Learning rate at the end, relative to the peak.
  int64_t middle_validations = 3;   // Evenly spread between the first and the last.
  int64_t validation_runs = 16;     // At most so many runs are validated on, evenly spread.
  AdamOptions adam = {};
  uint64_t seed = 1;  // Of the batches.
};

struct Progress {
  int64_t step = 0;              // Steps done.
  int64_t steps = 0;             // Limit; 0 when only time limits.
  double fraction = 0;           // Of the budget, 0 to 1.
  double loss = 0;               // Of the last training batch, nats per byte; 0 before the first.
  double validation_loss = 0;    // The latest, nats per byte.
  double tokens_per_second = 0;  // Over all training steps so far.
  double elapsed_seconds = 0;
  std::vector<std::vector<int64_t>> tokens_per_expert;  // [layers][experts], last training batch.
};

struct TrainResult {
  int64_t steps = 0;
  double first_loss = 0;      // Validation, nats per byte, before the first step.
  double final_loss = 0;      // The same after the last.
  double bigram_entropy = 0;  // Of the same pairs of bytes; see BigramEntropy.
  double tokens_per_second = 0;
  double elapsed_seconds = 0;
  bool stopped = false;  // By the stop flag.
};

struct TrainHooks {
  // Called after each step and each validation; may be null.
  std::function<void(const Progress&)> progress = nullptr;
  const std::atomic<bool>* stop = nullptr;  // Read before each step.
  std::function<double()> clock = nullptr;  // Seconds, steady; null means the real one.
};

// The learning rate relative to its peak: a linear rise over `warmup`, then half a cosine down to
// `last_rate`. fraction: 0 to 1.
double LearningRateFactor(const TrainOptions& options, double fraction);

// Mean loss over all batches, nats per scored byte.
absl::StatusOr<double> Evaluate(const std::vector<Batch>& batches, Model* model);

// Runs the whole training. It validates on validation_runs of corpus.validation and takes the
// bigram entropy of the same ones. The stop flag ends it early but in order, with its last
// validation. Errors: INVALID_ARGUMENT, every problem at once; a layer's error ends the training as
// it is.
absl::StatusOr<TrainResult> Train(const TrainOptions& options, const Corpus& corpus,
                                  const TrainHooks& hooks, Model* model);

}  // namespace expertd::train

#endif  // CLIENT_EXPERTCTL_TRAIN_TRAINER_H_
