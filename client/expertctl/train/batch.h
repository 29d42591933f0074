// Windows of text as the model takes them: random ones to train on, all of them to validate on.
#ifndef CLIENT_EXPERTCTL_TRAIN_BATCH_H_
#define CLIENT_EXPERTCTL_TRAIN_BATCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace expertd::train {

struct BatchShape {
  int64_t sequences = 0;
  int64_t length = 0;  // Bytes per sequence.
};

struct Batch {
  std::vector<uint8_t> inputs;  // [sequences, length]
  std::vector<int> targets;     // [sequences, length]: the next byte, or kIgnoredTarget.
};

// Draws training batches. Batch `step` depends on (runs, shape, seed, step) only.
class BatchSampler {
 public:
  // `runs` must outlive the sampler. Errors: INVALID_ARGUMENT when no run holds length + 1 bytes.
  static absl::StatusOr<BatchSampler> Create(const std::vector<std::string>& runs,
                                             const BatchShape& shape, uint64_t seed);

  // Windows start anywhere, uniformly, and stay inside one run.
  Batch Sample(int64_t step) const;

 private:
  BatchSampler(const std::vector<std::string>& runs, const BatchShape& shape, uint64_t seed);

  const std::vector<std::string>* runs_;
  BatchShape shape_;
  uint64_t seed_;
  std::vector<int64_t> ends_;  // Running count of window starts up to and with each run.
};

// Batches that score every adjacent pair of bytes inside `runs` exactly once: the pairs of
// BigramEntropy. The last window of a run overlaps the one before, with those targets ignored; the
// last batch is filled with unscored zeros. Runs shorter than length + 1 are left out.
std::vector<Batch> ValidationBatches(const std::vector<std::string>& runs, const BatchShape& shape);

}  // namespace expertd::train

#endif  // CLIENT_EXPERTCTL_TRAIN_BATCH_H_
